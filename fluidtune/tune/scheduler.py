"""A trial scheduler that leaves every decision to the scheduler it wraps, and every execution to FluidTune.

The base scheduler promotes, pauses and stops trials. `FluidScheduler` adds three things: on the first trial it makes
Tune's controller run its trials by FluidTune, it tells the engine the trials' groups and budgets, and it does what a
user who steers the run asks for (`steered_run`). What the base scheduler is told goes through `search_memory`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat import controller, schedulers, searches
from fluidtune.ray_compat.versions import check_ray_version
from fluidtune.ray_compat.whole_files import restore_beside, stage_apart
from fluidtune.tune.executor import FluidExecutor
from fluidtune.tune.extension import Extension
from fluidtune.tune.groups import adapter_for
from fluidtune.tune.groups.budgets import earliest, stop_iteration
from fluidtune.tune.search_memory import SearchMemory
from fluidtune.tune.steered_run import SteeredRun


class FluidScheduler(TrialScheduler):
    """Runs any stock Ray Tune scheduler's trials under FluidTune, in a stock ``ray.tune.Tuner``.

    Args:
        base_scheduler: the scheduler of the script; None is Tune's own default, FIFO.
        executor: the execution settings; None for the defaults.
    """

    #: Makes the base scheduler where the script gives none, or a name: for each run a new one, as Tune does.
    #: None: the script's own object serves all runs.
    _make_base: Callable[[], TrialScheduler] | None = None
    #: What `_begin_run` sets, and what the next run goes on with.
    _OF_ONE_RUN = (
        "_mode", "_manager", "_left_to_ray", "_refusal", "_targets", "adapter",
        "_stopper_target", "steered", "_memory", "_begun", "extension",
    )  # fmt: skip
    #: What the next run, which is a restored one, goes on with; None once it does.
    extension: Extension | None = None

    def __init__(self, base_scheduler: TrialScheduler | None = None, executor: FluidExecutor | None = None):
        super().__init__()
        check_ray_version()
        stage_apart()
        if isinstance(base_scheduler, str):
            from ray.tune.schedulers import SCHEDULER_IMPORT, create_scheduler

            if base_scheduler not in SCHEDULER_IMPORT:
                known = ", ".join(sorted(SCHEDULER_IMPORT))
                raise FluidTuneError(f"there is no algorithm {base_scheduler!r} in ray.tune; known are: {known}")
            self._make_base = functools.partial(create_scheduler, base_scheduler)
            base_scheduler = self._make_base()
        elif base_scheduler is None:
            self._make_base = FIFOScheduler
            base_scheduler = self._make_base()
        if isinstance(base_scheduler, FluidScheduler):
            raise FluidTuneError("the scheduler is a FluidScheduler already; wrap it once")
        if not isinstance(base_scheduler, TrialScheduler):
            raise FluidTuneError(
                f"base_scheduler={base_scheduler!r} is not a ray.tune scheduler; pass one, or None for FIFO"
            )
        self.base_scheduler = base_scheduler
        self.executor = FluidExecutor.checked(executor) or FluidExecutor()
        #: By `kept_trainable.kept`, where the script has a `fluidtune.Tuner`.
        self.kept: tuple[str, bytes, str] | None = None
        self._begin_run(None)

    def _begin_run(self, mode: str | None) -> None:
        """Nothing has happened in this run. A Tuner may run again."""
        self._mode = mode
        self._manager: Any = None
        #: True: the job runs as under stock Tune; see `TuningJob.for_controller`.
        self._left_to_ray = False
        #: Why the run cannot begin; `choose_trial_to_run` raises it.
        self._refusal: Exception | None = None
        #: Trial that has not ended -> the iteration at which its budget ends, as the engine knows it.
        self._targets: dict[str, float | None] = {}
        #: What is known of the algorithm.
        self.adapter = adapter_for(self.base_scheduler)
        #: The iteration at which the run's stopper object ends every trial; None: it cannot be told.
        self._stopper_target: float | None = None
        self.steered = SteeredRun(self.adapter.no_keep)
        self._memory = SearchMemory(self.base_scheduler)
        #: Tune has added a trial.
        self._begun = False

    def __getstate__(self) -> dict[str, Any]:
        # Tuner pickles its configuration before the run, for a later restore. What is of one run is not part of it.
        return {name: value for name, value in vars(self).items() if name not in self._OF_ONE_RUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_run(None)

    @property
    def supports_buffered_results(self) -> bool:
        """False: every result comes to the algorithm at once."""
        return False

    @property
    def metric(self) -> str | None:
        return self.base_scheduler.metric

    @property
    def mode(self) -> str | None:
        """The script's "min" or "max"; None: the script gives neither."""
        return schedulers.mode(self.base_scheduler) or self._mode

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        # Tune says this at the beginning of each run.
        if self._make_base is not None:
            self.base_scheduler = self._make_base()
        self._begin_run(mode)
        return self.base_scheduler.set_search_properties(metric, mode, **spec)

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        behind = controller.controller_behind(tune_controller)
        if not self._begun:
            self._begun = True
            if (saved := controller.saved_with_run(behind).get(controller.SEARCH)) is not None:
                self._memory.recall(saved, controller.turn(behind))
            try:
                if controller.was_restored(behind):
                    restore_beside(behind)
            except Exception as error:
                self._refusal = error
            if self.extension is not None:
                self._extend(tune_controller, behind.search_alg, trial)
        if self.extension is not None and self._refusal is None and self.extension.reopen(trial):
            behind.get_live_trials().add(trial)
            self._memory.reopen(trial)
        # A restored experiment adds its finished trials, too.
        if not trial.is_finished() and not self._left_to_ray and self._refusal is None:
            self._stopper_target = schedulers.stopper_iteration(controller.run_stopper(behind))
            try:
                self._execute(behind, trial)
            except Exception as error:
                # Raised here, Tune would take it for a fault of the state that it restores, and begin the run anew.
                self._refusal = error
        self.steered.add(behind, trial)
        if not self.steered.goes_on_alone(trial):
            self._memory.add(tune_controller, trial)

    def _extend(self, tune_controller: Any, search: Any, first: Trial) -> None:
        assert self.extension is not None
        try:
            self.extension.begin(search, first)
        except FluidTuneError as error:
            self._refusal = error
            return
        # Samples come from the random streams that an earlier driver has left.
        searches.before_next_trial(search, lambda: self._is_ready(tune_controller))

    def _is_ready(self, tune_controller: Any) -> bool:
        """Whether the algorithm may be asked. ``tune_controller``: as Tune hands it to a scheduler."""
        ready = self._memory.ready(tune_controller)
        if self.extension is not None:
            schedulers.raise_limit(self.base_scheduler, self.extension.until)
        return ready

    def _execute(self, behind: Any, trial: Trial) -> None:
        """Have FluidTune run the trial, and with the first one the job."""
        if self._manager is not None:
            return self._manager.note_trial(trial)
        from fluidtune.tune.manager import install

        self._manager = install(behind, self, trial, self._memory)
        self._left_to_ray = self._manager is None
        if self._manager is not None:
            self.steered.begin(self._manager.job, self.executor.steer)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        self._targets.pop(trial.trial_id, None)
        if not trial.should_recover():  # else Tune adds it again
            self.steered.trial_ended(trial)
        if not self.steered.goes_on_alone(trial):
            self._memory.end("error", tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if self.steered.ends(trial):
            # As at the run's stop criterion, of which Tune tells the algorithm by `on_trial_complete` alone.
            with self._memory.asking(tune_controller) as handed:
                self.adapter.last_result(handed, trial, result)
            return TrialScheduler.STOP
        decision = TrialScheduler.CONTINUE
        if not self.steered.goes_on_alone(trial):
            decision = self._memory.result(tune_controller, trial, result)
            if decision == TrialScheduler.STOP and self.steered.lets_go_on(trial):
                self._memory.end("complete", tune_controller, trial, result)
                decision = TrialScheduler.CONTINUE
        if decision == TrialScheduler.CONTINUE and self._manager is not None:
            before = self._targets.get(trial.trial_id)
            member = self.membership(trial)
            if member.target != before:
                self._manager.budget_changed(trial.trial_id, member.target, member.group)
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        if self._ended(trial):
            self._memory.end("complete", tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        if self._manager is not None:
            self._manager.trial_removed(trial)
        if self._ended(trial):
            self._memory.end("remove", tune_controller, trial)

    def _ended(self, trial: Trial) -> bool:
        """The trial has ended. Returns whether the algorithm is to hear of that."""
        self._targets.pop(trial.trial_id, None)
        self.steered.trial_ended(trial)
        return not self.steered.goes_on_alone(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        if self._refusal is not None:
            raise self._refusal
        ready = self._is_ready(tune_controller)
        if self.extension is not None:
            self.extension.keep(tune_controller)
            self.extension = None
        self.steered.serve(tune_controller)
        if not ready:
            return None
        with self._memory.asking(tune_controller) as handed:
            self.adapter.catch_up(handed)
        for trial in self.adapter.overlooked():
            tune_controller.stop_trial(trial)
        for trial in self.adapter.promoted():
            controller.set_status(tune_controller, trial, Trial.PENDING)
        with self._memory.asking(tune_controller) as handed:
            chosen = self.base_scheduler.choose_trial_to_run(handed)
        if chosen is not None and chosen.status == Trial.PENDING:
            # Tune asks the actor manager for every pending trial by itself; the engine chooses which one starts.
            return None
        return chosen

    def debug_string(self) -> str:
        return self.base_scheduler.debug_string()

    def save(self, checkpoint_path: str) -> None:
        self.base_scheduler.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        self.base_scheduler.restore(checkpoint_path)

    # --- for the executor

    def membership(self, trial: Trial) -> Any:
        """The trial's group and budget, which the engine gets."""
        member = self.adapter.membership(trial)
        target = stop_iteration(trial) if self.steered.goes_on_alone(trial) else member.target
        turn = None if member.turn is None else self._memory.turn_of(trial)
        member = dataclasses.replace(member, target=earliest(target, self._stopper_target), turn=turn)
        self._targets[trial.trial_id] = member.target
        return member

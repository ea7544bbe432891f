"""What the acts of a user do to the trials of a run: the shell of `fluidtune.steering.acts`.

Acts are carried out in Tune's loop, when its scheduler is asked for a trial. Each is kept with its trial before its
user gets an answer, where Tune saves it with all that it knows of the trial. So a restored run has every act that was
answered, once; where Tune could not save, the answer says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.tune.experiment import Trial

from fluidtune.ray_compat.cloning import add_clone, clone_of, hide_from_search, save_now
from fluidtune.ray_compat.controller import controller_behind
from fluidtune.report.trial_lookup import UnknownTrialError, trial_called
from fluidtune.steering import acts as a
from fluidtune.steering.json_values import cut, kind_of
from fluidtune.steering.steering_files import Request, SteeringFiles

if TYPE_CHECKING:
    from fluidtune.tune.tuning_job import TuningJob

logger = logging.getLogger(__name__)

#: Under this name a trial's run metadata have its acts, each with its state. Tune saves all that is in there.
ACTS = "fluidtune_acts"


def parameters_of(config: Mapping[Any, Any]) -> dict[str, tuple[Any, ...]]:
    """The keys that lead to each parameter, by its name; one within another is "a/b", as Tune names it.

    A key may itself have a slash. Where two parameters have one name, it means the one that is less deep.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for key, value in config.items():
        inner = parameters_of(value) if isinstance(value, Mapping) else {}
        paths = {f"{key}/{name}": (key, *keys) for name, keys in inner.items()} or {str(key): (key,)}
        for name, keys in paths.items():
            if name not in found or len(keys) < len(found[name]):
                found[name] = keys
    return found


def value_at(config: Any, keys: tuple[Any, ...]) -> Any:
    """What the keys lead to."""
    for key in keys:
        config = config[key]
    return config


def with_values(config: Mapping[Any, Any], values: Mapping[str, Any]) -> dict[Any, Any]:
    """A configuration with other values of some of `parameters_of`. What stays is shared with the given one."""
    changed, keys_of = dict(config), parameters_of(config)
    for name, value in values.items():
        *outer, last = keys_of[name]
        inner = changed
        for key in outer:
            inner[key] = dict(inner[key])
            inner = inner[key]
        inner[last] = value
    return changed


class SteeredRun:
    """The acts of one run. ``no_keep``: why the run's algorithm lets no trial go on; "" if it does.

    The scheduler that wraps the run's algorithm asks it what is to be done with each result.
    """

    def __init__(self, no_keep: str) -> None:
        self._no_keep = no_keep
        self._steering = a.Steering()
        self._job: TuningJob | None = None
        self._files: SteeringFiles | None = None

    def __reduce__(self) -> Any:
        return SteeredRun, (self._no_keep,)  # Tuner pickles its configuration, and what goes on is no part of it

    def begin(self, job: TuningJob, steer: bool) -> None:
        """The run has its event log now; a second call does nothing. ``steer``: users may steer it."""
        if self._job is job:
            return
        self._job = job
        if steer:
            try:
                self._files = SteeringFiles(job.folder.path)
            except OSError as error:
                logger.warning("FluidTune: this run cannot be steered: %s", error)

    def add(self, controller: Any, trial: Trial) -> None:
        """Tune has the trial from now on, which may be one of an earlier driver. ``controller``: Tune's own."""
        for kept in getattr(trial.run_metadata, ACTS, ()):
            act = a.Act(**kept["act"])
            self._steering.restored(act, kept["state"])
            if act.clone == trial.trial_id:
                hide_from_search(controller, trial)

    # --- what the scheduler asks

    def ends(self, trial: Trial) -> bool:
        """Whether the trial ends at its new result."""
        return trial.trial_id in self._steering.stops

    def lets_go_on(self, trial: Trial) -> bool:
        """Whether the trial goes on though the algorithm wants to stop it. If so it has ended for the algorithm."""
        note = self._steering.stop_meant(trial.trial_id)
        if note is not None:
            self._keep_with(trial, note.act, "done")
            self._note(note)
        return note is not None

    def goes_on_alone(self, trial: Trial) -> bool:
        """Whether the trial has ended for the algorithm, and goes on."""
        return self._steering.goes_on_alone(trial.trial_id)

    def trial_ended(self, trial: Trial) -> None:
        for note in self._steering.ended(trial.trial_id):
            # A run that is continued has it no more.
            others = [kept for kept in getattr(trial.run_metadata, ACTS, ()) if kept["act"]["id"] != note.act.id]
            setattr(trial.run_metadata, ACTS, others)
            self._note(note)

    def serve(self, handed: Any) -> None:
        """Carry out what users have asked for. ``handed``: the controller, as a scheduler is handed it."""
        if self._files is not None:
            for request in self._files.requests():
                self._serve(request, controller_behind(handed))
        if self._job is not None and self._steering.stops:
            quiet = self._job.stall_detector.quiet(self._steering.stops, time.monotonic())
            for trial in [each for each in handed.get_trials() if each.trial_id in quiet]:
                handed.stop_trial(trial)  # a worker that does not let go of its trial is ended

    def close(self) -> None:
        """The run is over: what is asked for from now on is refused."""
        if self._files is not None:
            self._files.close()
            self._files = None

    # --- carrying out

    def _serve(self, request: Request, controller: Any) -> None:
        trials = {trial.trial_id: trial for trial in controller.get_trials()}
        try:
            found = trial_called(request.act.trial, {name: str(trial) for name, trial in trials.items()})
        except UnknownTrialError as error:
            request.answer(a.Answer(True, str(error)))
            return
        act, trial = replace(request.act, trial=found), trials[found]
        orders = self._steering.asked(act, self._facts(trial))
        self._tell(orders, request)
        if not isinstance(orders[-1], a.Answer):
            self._tell(self._carry_out(act, trial, controller), request)

    def _tell(self, orders: Iterable[a.Note | a.Answer], request: Request) -> None:
        for order in orders:
            if isinstance(order, a.Answer):
                request.answer(order)
            else:
                self._note(order)

    def _facts(self, trial: Trial) -> a.Facts:
        kinds = {}
        for name, keys in parameters_of(trial.config).items():
            value = value_at(trial.config, keys)
            kinds[name] = kind_of(value.item() if isinstance(value, np.generic) else value)
        return a.Facts(trial.is_finished(), kinds, trial.has_checkpoint(), self._no_keep)

    def _carry_out(self, act: a.Act, trial: Trial, controller: Any) -> list[a.Note | a.Answer]:
        clone = ""
        if act.kind == "clone":
            try:
                config = with_values(trial.config, act.parameters)
                trial = clone_of(trial, config, act.parameters, act.from_checkpoint)
                clone = trial.trial_id
                self._keep_with(trial, replace(act, clone=clone), "done")
                add_clone(controller, trial)
            except Exception as error:  # of the file system, and of what the script gives Tune for its trials
                what = cut(f"{type(error).__name__}: {error}", 300)
                return self._steering.failed(act.id, f"trial {act.trial} cannot be cloned: {what}")
        else:
            self._keep_with(trial, act, "taken")
        unsaved = ""
        try:
            save_now(controller, trial)
        except Exception as error:  # of the file system. The act holds, and Tune tries to save it again.
            unsaved = cut(f"{type(error).__name__}: {error}", 300)
        return self._steering.carried_out(act.id, clone, unsaved)

    @staticmethod
    def _keep_with(trial: Trial, act: a.Act, state: a.State) -> None:
        others = [kept for kept in getattr(trial.run_metadata, ACTS, ()) if kept["act"]["id"] != act.id]
        setattr(trial.run_metadata, ACTS, [*others, {"act": asdict(act), "state": state}])

    def _note(self, note: a.Note) -> None:
        act = note.act
        extra = {"clone": act.clone, "parameters": dict(act.parameters), "from_checkpoint": act.from_checkpoint}
        extra = {name: value for name, value in extra.items() if value} | ({"reason": note.why} if note.why else {})
        if self._job is not None:
            self._job.log.write(
                "steered", act=act.id, kind=act.kind, trial=act.trial, by=act.by, via=act.via, state=note.state, **extra
            )

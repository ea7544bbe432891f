"""What the acts of a user do to the trials of a run: the shell of `fluidtune.steering.acts`.

Acts are carried out in Tune's loop, when its scheduler is asked for a trial. Each is kept with its trial before its
user gets an answer, where Tune saves it with all that it knows of the trial. So a restored run has every act that was
answered, once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ray.tune.experiment import Trial

from fluidtune.ray_compat.cloning import clone_of, hide_from_search, save_now
from fluidtune.ray_compat.controller import controller_behind
from fluidtune.steering import acts as a
from fluidtune.steering.steering_link import Request, SteeringLink

if TYPE_CHECKING:
    from fluidtune.tune.tuning_job import TuningJob

logger = logging.getLogger(__name__)

#: Under this name a trial's run metadata have its acts, each with its state. Tune saves all that is in there.
ACTS = "fluidtune_acts"


def names_in(config: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """The names of all parameters; one within another is "a/b", as Tune names it."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from names_in(value, f"{before}{name}/")
        else:
            yield f"{before}{name}"


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with other values of some parameters. What stays is shared with the given one."""
    changed = dict(config)
    for path, value in values.items():
        # A name may itself have a slash.
        name = next(name for name in changed if path == str(name) or path.startswith(f"{name}/"))
        rest = path[len(str(name)) + 1 :]
        changed[name] = with_values(changed[name], {rest: value}) if rest else value
    return changed


class SteeredRun:
    """The acts of one run. ``no_keep``: why the run's algorithm lets no trial go on; "" if it does.

    The scheduler that wraps the run's algorithm asks it what is to be done with each result.
    """

    def __init__(self, no_keep: str) -> None:
        self._no_keep = no_keep
        self._steering = a.Steering()
        self._trials: dict[str, Trial] = {}
        self._job: TuningJob | None = None
        self._link: SteeringLink | None = None

    def __reduce__(self) -> Any:
        return SteeredRun, (self._no_keep,)  # Tuner pickles its configuration, and what goes on is no part of it

    def begin(self, job: TuningJob, steer: bool) -> None:
        """The run has its event log now; a second call does nothing. ``steer``: users may steer it."""
        if self._job is job:
            return
        self._job = job
        if steer:
            try:
                self._link = SteeringLink(job.directory)
            except OSError as error:
                logger.warning("FluidTune: this run cannot be steered: %s", error)

    def add(self, controller: Any, trial: Trial) -> None:
        """Tune has the trial from now on, which may be one of an earlier driver. ``controller``: Tune's own."""
        self._trials[trial.trial_id] = trial
        for kept in getattr(trial.run_metadata, ACTS, ()):
            act = a.Act(**kept["act"])
            self._steering.on_event(a.Restored(act, kept["state"]))
            if act.clone == trial.trial_id:
                hide_from_search(controller, trial)

    # --- what the scheduler asks

    def ends(self, trial: Trial) -> bool:
        """Whether the trial ends at its new result."""
        return bool(self._steering.on_event(a.ResultCame(trial.trial_id)))

    def lets_go_on(self, trial: Trial) -> bool:
        """Whether the trial goes on though the algorithm wants to stop it. If so it has ended for the algorithm."""
        orders = self._steering.on_event(a.StopMeant(trial.trial_id))
        for order in orders:
            if isinstance(order, a.LetGoOn):
                self._keep_with(trial, order.act, "done")
            else:
                self._note(order)
        return bool(orders)

    def goes_on_alone(self, trial: Trial) -> bool:
        """Whether the trial has ended for the algorithm, and goes on."""
        return self._steering.goes_on_alone(trial.trial_id)

    def trial_ended(self, trial: Trial) -> None:
        for note in self._steering.on_event(a.TrialEnded(trial.trial_id)):
            self._note(note)

    def serve(self, handed: Any) -> None:
        """Carry out what users have asked for. ``handed``: the controller, as a scheduler is handed it."""
        if self._link is not None:
            for request in self._link.requests():
                self._serve(request, controller_behind(handed))

    def close(self) -> None:
        """The run is over: what is asked for from now on is refused."""
        self._steering.on_event(a.RunEnded())
        if self._link is not None:
            self._link.close()
            for request in self._link.requests():
                self._serve(request, None)
            self._link = None

    # --- carrying out

    def _serve(self, request: Request, controller: Any) -> None:
        act = request.act
        orders = self._steering.on_event(a.Asked(act, self._facts(act.trial)))
        for order in orders:
            if isinstance(order, a.CarryOut):
                orders.extend(self._steering.on_event(self._carry_out(order.act, controller)))
            elif isinstance(order, a.Answer):
                request.answer(order)
            else:
                self._note(order)

    def _facts(self, name: str) -> a.Facts | None:
        trial = self._trials.get(name)
        if trial is None:
            return None
        return a.Facts(trial.is_finished(), tuple(names_in(trial.config)), trial.has_checkpoint(), self._no_keep)

    def _carry_out(self, act: a.Act, controller: Any) -> a.Event:
        trial, clone = self._trials[act.trial], ""
        if act.kind == "clone":
            try:
                config = with_values(trial.config, act.parameters)
                new = clone_of(trial, config, act.parameters, act.from_checkpoint)
            except OSError as error:
                return a.Failed(act.id, f"the checkpoint of trial {act.trial} cannot be copied: {error}")
            trial, clone = new, new.trial_id
            act = a.Act(**{**asdict(act), "clone": clone})
        self._keep_with(trial, act, "done" if clone else "taken")
        if clone:
            controller.add_trial(trial)
        save_now(controller, trial)
        return a.Saved(act.id, clone)

    @staticmethod
    def _keep_with(trial: Trial, act: a.Act, state: a.State) -> None:
        others = [kept for kept in getattr(trial.run_metadata, ACTS, ()) if kept["act"]["id"] != act.id]
        setattr(trial.run_metadata, ACTS, [*others, {"act": asdict(act), "state": state}])

    def _note(self, note: a.Instruction) -> None:
        assert isinstance(note, a.Note), note
        act = note.act
        extra = {"clone": act.clone, "parameters": dict(act.parameters), "from_checkpoint": act.from_checkpoint}
        extra = {name: value for name, value in extra.items() if value} | ({"reason": note.why} if note.why else {})
        if self._job is not None:
            self._job.log.write(
                "steered", act=act.id, kind=act.kind, trial=act.trial, by=act.by, via=act.via, state=note.state, **extra
            )

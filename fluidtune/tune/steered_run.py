"""What the acts of a user do to the trials of a run: the shell of `fluidtune.steering.acts`.

Acts are carried out in Tune's loop, when its scheduler is asked for a trial. Each is kept with its trial before its
user gets an answer, where Tune saves it with all that it knows of the trial. So a restored run has every act that was
answered, once; where Tune could not save, the answer says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.tune.experiment import Trial

from fluidtune.ray_compat.cloning import add_clone, clone_of, hide_from_search, save_now
from fluidtune.ray_compat.controller import controller_behind
from fluidtune.report.trial_lookup import UnknownTrialError, trial_called
from fluidtune.steering import acts as a
from fluidtune.steering.json_values import cut, kind_of
from fluidtune.steering.steering_files import Answer, SteeringFiles

if TYPE_CHECKING:
    from fluidtune.tune.tuning_job import TuningJob

logger = logging.getLogger(__name__)

#: Under this name a trial's run metadata have its acts. Tune saves all that is in there.
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


def acts_of(trial: Trial) -> list[a.Act]:
    """The acts that are kept with the trial."""
    kept = getattr(trial.run_metadata, ACTS, ())
    # An earlier version kept the state beside the act.
    return [a.Act(**{**each.get("act", each), "state": each["state"]}) for each in kept]


def keep_acts(trial: Trial, without: str, *more: a.Act) -> None:
    """Of the trial's acts, keep all but the one with the id ``without``, and ``more``."""
    others = [each for each in acts_of(trial) if each.id != without]
    setattr(trial.run_metadata, ACTS, [asdict(each) for each in (*others, *more)])


class SteeredRun:
    """The acts of one run. ``no_keep``: why the run's algorithm lets no trial go on; "" if it does.

    The scheduler that wraps the run's algorithm asks it what is to be done with each result.
    """

    def __init__(self, no_keep: str) -> None:
        self._no_keep = no_keep
        self._steering = a.Steering()
        self._job: TuningJob | None = None
        self._files: SteeringFiles | None = None

    def begin(self, job: TuningJob, steer: bool) -> None:
        """The run has its event log now. ``steer``: users may steer it."""
        self._job = job
        if steer:
            try:
                self._files = SteeringFiles(job.folder.path)
            except OSError as error:
                logger.warning("FluidTune: this run cannot be steered: %s", error)

    def add(self, controller: Any, trial: Trial) -> None:
        """Tune has the trial from now on, which may be one of an earlier driver. ``controller``: Tune's own."""
        for act in acts_of(trial):
            self._steering.restored(act)
            if act.clone == trial.trial_id:
                hide_from_search(controller, trial)

    # --- what the scheduler asks

    def ends(self, trial: Trial) -> bool:
        """Whether the trial ends at its new result."""
        return trial.trial_id in self._steering.stops

    def lets_go_on(self, trial: Trial) -> bool:
        """Whether the trial goes on though the algorithm wants to stop it. If so it has ended for the algorithm."""
        kept = self._steering.stop_meant(trial.trial_id)
        if kept is not None:
            keep_acts(trial, kept.id, kept)
            self._note(kept)
        return kept is not None

    def goes_on_alone(self, trial: Trial) -> bool:
        """Whether the trial has ended for the algorithm, and goes on."""
        return self._steering.goes_on_alone(trial.trial_id)

    def trial_ended(self, trial: Trial) -> None:
        for act in self._steering.ended(trial.trial_id):
            keep_acts(trial, act.id)  # a run that is continued has it no more
            self._note(act)

    def serve(self, handed: Any) -> None:
        """Carry out what users have asked for. ``handed``: the controller, as a scheduler is handed it."""
        if self._files is not None:
            for act, answer in self._files.requests():
                self._serve(act, answer, controller_behind(handed))
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

    def _serve(self, act: a.Act, answer: Answer, controller: Any) -> None:
        trials = {trial.trial_id: trial for trial in controller.get_trials()}
        try:
            found = trial_called(act.trial, {name: str(trial) for name, trial in trials.items()})
        except UnknownTrialError as error:
            answer(True, str(error))
            return
        act, trial = replace(act, trial=found), trials[found]
        for each in self._steering.asked(act, self._facts(trial)):
            self._note(each)
        if self._steering.acts[act.id].state == "asked":
            self._note(self._carry_out(act, trial, controller))
        act = self._steering.acts[act.id]
        answer(act.state == "refused", act.words)

    def _facts(self, trial: Trial) -> a.Facts:
        kinds = {}
        for name, keys in parameters_of(trial.config).items():
            value = reduce(getitem, keys, trial.config)
            kinds[name] = kind_of(value.item() if isinstance(value, np.generic) else value)
        return a.Facts(trial.is_finished(), kinds, trial.has_checkpoint(), self._no_keep)

    def _carry_out(self, act: a.Act, trial: Trial, controller: Any) -> a.Act:
        clone = ""
        if act.kind == "clone":
            try:
                config = with_values(trial.config, act.parameters)
                trial = clone_of(trial, config, act.parameters, act.from_checkpoint)
                clone = trial.trial_id
                keep_acts(trial, act.id, replace(act, clone=clone, state="done"))
                add_clone(controller, trial)
            except Exception as error:  # of the file system, and of what the script gives Tune for its trials
                what = cut(f"{type(error).__name__}: {error}", 300)
                return self._steering.failed(act.id, f"trial {act.trial} cannot be cloned: {what}")
        else:
            keep_acts(trial, act.id, replace(act, state="taken"))
        unsaved = ""
        try:
            save_now(controller, trial)
        except Exception as error:  # of the file system. The act holds, and Tune tries to save it again.
            unsaved = cut(f"{type(error).__name__}: {error}", 300)
        return self._steering.carried_out(act.id, clone, unsaved)

    def _note(self, act: a.Act) -> None:
        extra = {"clone": act.clone, "parameters": dict(act.parameters), "from_checkpoint": act.from_checkpoint}
        extra = {name: value for name, value in (extra | {"reason": act.why}).items() if value}
        if self._job is not None:
            self._job.log.write(
                "steered", act=act.id, kind=act.kind, trial=act.trial, by=act.by, via=act.via, state=act.state, **extra
            )

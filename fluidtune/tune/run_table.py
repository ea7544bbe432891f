"""The trials that Tune wants to run, found by Tune's tracked actor or by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fluidtune.ray_compat.controller import TrackedActor
from fluidtune.tune.trial_run import TrialRun


class RunTable:
    """Every `TrialRun` from the moment Tune asks for its actor until Tune lets go of it, or it fails."""

    def __init__(self) -> None:
        self._by_tracked: dict[TrackedActor, TrialRun] = {}
        #: Trial id -> its newest run.
        self._by_trial: dict[str, TrialRun] = {}
        #: Runs that have had a place at least once: not many more than there are devices.
        self._begun: dict[TrackedActor, TrialRun] = {}
        #: Number of the other runs of which Tune has seen no iteration.
        self._untried = 0

    def __len__(self) -> int:
        return len(self._by_tracked)

    def __iter__(self) -> Iterator[TrialRun]:
        return iter(self._by_tracked.values())

    def __contains__(self, run: TrialRun) -> bool:
        return run.tracked in self._by_tracked

    def add_run(self, run: TrialRun) -> None:
        """Tune asks for the trial's actor."""
        self._by_tracked[run.tracked] = run
        self._by_trial[run.id] = run
        self._untried += not run.life.seen.delivered

    def begin_run(self, run: TrialRun) -> None:
        """The engine has given the trial devices."""
        if run.tracked not in self._begun:
            self._begun[run.tracked] = run
            self._untried -= not run.life.seen.delivered

    def drop_run(self, run: TrialRun) -> None:
        """Tune let go of the trial, or it failed."""
        dropped = self._by_tracked.pop(run.tracked, None)
        if self._begun.pop(run.tracked, None) is None and dropped is not None:
            self._untried -= not run.life.seen.delivered
        if self._by_trial.get(run.id) is run:
            del self._by_trial[run.id]

    def __getitem__(self, tracked: TrackedActor) -> TrialRun:
        """The run of a tracked actor. Raises KeyError when Tune has let go of it."""
        return self._by_tracked[tracked]

    def get(self, tracked: TrackedActor) -> TrialRun | None:
        """The run of a tracked actor; None when Tune has let go of it."""
        return self._by_tracked.get(tracked)

    def of_trial(self, trial: str) -> TrialRun:
        """The newest run of a trial. Raises KeyError when there is none."""
        return self._by_trial[trial]

    def find_trial(self, trial: str) -> TrialRun | None:
        """The newest run of a trial; None when there is none."""
        return self._by_trial.get(trial)

    def trials(self) -> Collection[str]:
        """The ids of all trials that Tune wants to run."""
        return self._by_trial.keys()

    def begun(self) -> Collection[TrialRun]:
        """Runs that have had a place at least once, in that order. Only these may be asked for anything."""
        return self._begun.values()

    def count_pending(self) -> int:
        """Runs of which Tune has seen no iteration and that are not live."""
        lives = (run.life for run in self._begun.values())
        return self._untried + sum(1 for life in lives if not life.seen.delivered and life.place != "live")

    def unknown_alike(self, run: TrialRun) -> list[TrialRun]:
        """Runs of the same trainable that wait for devices and whose kind nobody knows yet."""
        name = run.trial.trainable_name
        return [
            other
            for other in self
            if not other.life.has_place and other.life.kind == "plain" and other.trial.trainable_name == name
        ]

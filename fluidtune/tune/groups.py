"""How each tuning algorithm of Ray Tune is a sequence of TrialGroups.

An *adapter* answers, for one scheduler class, what an engine needs to know about a trial: its group, whether
the group is a batch whose makespan counts or a stream, how many iterations it may train until the next decision,
and which paused trials the algorithm has let go on. An algorithm without an adapter runs as one stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler, TrialScheduler


@dataclass(frozen=True)
class Membership:
    """``target``: the iteration at which the trial's current budget ends, None when nobody knows.

    ``tail``: iterations that the group's best trials will train after that.
    """

    group: str
    synchronous: bool
    target: float | None
    tail: float = 0.0


class Adapter:
    """Any scheduler: one stream, budget from the stop criterion."""

    synchronous = False

    def __init__(self, base: TrialScheduler):
        self._base: Any = base

    def membership(self, trial: Trial) -> Membership:
        return Membership("all", self.synchronous, stop_iteration(trial))

    def promoted(self) -> list[Trial]:
        """Paused trials that the algorithm lets go on, beyond the one that it returns when asked to choose."""
        return []


class FIFOAdapter(Adapter):
    """Grid and random search: one batch."""

    synchronous = True


class ASHAAdapter(Adapter):
    """ASHA: a stream; a trial's budget is the last rung's, because it may get there."""

    def membership(self, trial: Trial) -> Membership:
        limit = self._base._max_t if self._base._time_attr == "training_iteration" else None
        stop = stop_iteration(trial)
        known = [value for value in (limit, stop) if value is not None]
        return Membership("stream", False, min(known) if known else None)


class HyperBandAdapter(Adapter):
    """HyperBand: a batch for every rung of every bracket."""

    synchronous = True

    def membership(self, trial: Trial) -> Membership:
        for band, brackets in enumerate(self._base._hyperbands):
            for index, bracket in enumerate(brackets):
                if bracket is not None and trial in bracket._live_trials:
                    name = f"band{band}/bracket{index}/rung{bracket._halves}"
                    # Whatever time_attr counts, brackets are compared in it.
                    tail = max(0.0, self._base._max_t_attr - bracket._cumul_r)
                    target = bracket._cumul_r if self._base._time_attr == "training_iteration" else None
                    return Membership(name, True, target, tail)
        return super().membership(trial)

    def promoted(self) -> list[Trial]:
        # HyperBand chooses one trial at a time and keeps choosing it until it runs; the rest of the rung
        # would stay hidden from a planner that wants to see the whole group.
        return [
            trial
            for brackets in self._base._hyperbands
            for bracket in brackets
            if bracket is not None
            for trial in bracket.current_trials()
            if trial.status == Trial.PAUSED and trial in bracket.trials_to_unpause
        ]


def stop_iteration(trial: Trial) -> float | None:
    """The iteration at which the script's stop criterion ends the trial, if it is one of iterations."""
    criterion = trial.stopping_criterion
    if isinstance(criterion, dict):
        value = criterion.get("training_iteration")
        return float(value) if value is not None else None
    return None


def adapter_for(base: TrialScheduler) -> Adapter:
    """The adapter of a scheduler's own class (a subclass with other rules is not taken for its parent)."""
    exact: dict[type, type[Adapter]] = {
        FIFOScheduler: FIFOAdapter,
        HyperBandScheduler: HyperBandAdapter,
        ASHAScheduler: ASHAAdapter,
    }
    return exact.get(type(base), Adapter)(base)

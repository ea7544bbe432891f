"""What trials need of a device's memory, which of them fit together, and what part of a device each gets.

Answers for `State`, from what trials were measured to need and by the lane policy of their devices; it asks the pure
part of salus_share, whose lane service admits by the same rules. Decides neither when a trial starts nor how many
share a device by speed. All memory is a part of one device's: 1.0 is all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import median

from fluidtune.engine.trial import Trial
from salus_share import Need, choose_device, divide, fit_together, policy, shares
from salus_share.policies import Standing

#: A lane service has room for so many trials.
SEATS = 64
#: So many trials are remembered to say what the next one is likely to need.
REMEMBERED = 101


class Sharing:
    """The needs of one job's trials, and the policy under which they share devices."""

    def __init__(self, policy_name: str) -> None:
        self._policy = policy(policy_name)
        #: By trial, the one heard of longest ago first.
        self._needs: dict[str, Need] = {}
        #: By trial, what it needs at least.
        self.least: dict[str, Need] = {}
        #: Of the last of these, the typical one; None before anything was measured.
        self._typical: Need | None = None

    def found(self, trial: Trial, memory: float, ephemeral: float, compute: float | None) -> None:
        """``trial`` was measured; ``compute`` None: not this time."""
        before = self._needs.pop(trial.name, None)
        need = Need(memory - ephemeral, ephemeral, compute)
        if compute is None and before is not None:
            need = replace(need, compute=before.compute)
        self._needs[trial.name] = need.at_least(self.least.get(trial.name, need))
        last = sorted(list(self._needs.values())[-REMEMBERED:], key=lambda need: need.persistent + need.ephemeral)
        middle = last[(len(last) - 1) // 2]
        measured = [need.compute for need in last if need.compute is not None]
        self._typical = Need(middle.persistent, middle.ephemeral, median(measured) if measured else None)

    def lacked(self, trial: Trial, memory: float, ephemeral: float) -> None:
        """``trial`` had to go, or failed, with less than this; whatever it needs at the moment."""
        self.least[trial.name] = Need(memory - ephemeral, ephemeral)
        self.found(trial, memory, ephemeral, None)

    def need(self, trial: Trial) -> Need | None:
        """What it needs: measured, else what its like do, else the share that its script asked for, else unknown."""
        known = self._needs.get(trial.name, self._typical)
        if known is None and trial.asked_share < 1:
            return Need(Fraction(1, int(1 / trial.asked_share + 1e-9)), 0)
        return known

    def limit(self) -> int:
        """c by memory, for trials like those that were measured, taking turns if need be; the most there can be while
        none was: who joins before that is refused by `fit`, and then a device should be open to it."""
        if self._typical is None:
            return self._policy.max_jobs or SEATS
        persistent, ephemeral = float(self._typical.persistent), float(self._typical.ephemeral)
        count = SEATS if persistent <= 0 else int((1 - ephemeral) / persistent + 1e-9)
        return max(1, min(count, self._policy.max_jobs or SEATS, SEATS))

    def fit(self, trials: Sequence[Trial]) -> bool:
        """Whether these can be on one device together: in lanes of their own or, if need be, taking turns.

        Where nobody knows what one needs, it must be alone.
        """
        if self._policy.max_jobs is not None and len(trials) > self._policy.max_jobs:
            return False
        needs = [self.need(trial) for trial in trials]
        known = [need for need in needs if need is not None]
        return len(known) == len(needs) and fit_together(known, 1, own_lanes=False)

    def choose(self, trial: Trial, devices: Mapping[int, Sequence[Trial]]) -> int | None:
        """The device that ``trial`` should join, of those with their tenants; None: none has room.

        Where they do not stretch each other, the fullest first; where they do, as little as can be.
        """
        mine = self.need(trial)
        if mine is None:
            return None
        there = {
            device: [need for tenant in tenants if (need := self.need(tenant)) is not None]
            for device, tenants in devices.items()
            if self.fit([*tenants, trial])
        }
        for own_lanes in (True, False):
            device = choose_device(mine, there, 1, own_lanes=own_lanes)
            if device is not None:
                return device
        return None

    def width(self, trial: Trial, tenants: Sequence[tuple[Trial, float]]) -> float:
        """The share of one device that ``trial`` gets under the policy, with its tenants and their heights (s)."""
        needs = {other.name: need for other, _ in tenants if (need := self.need(other)) is not None}
        lanes = divide(needs, 1, max_lanes=self._policy.max_lanes) if len(needs) == len(tenants) else None
        if lanes is None:
            return 1 / len(tenants)
        standings = {other.name: Standing(other.number, remaining=height, rung=other.rung) for other, height in tenants}
        return shares(self._policy, [{name: standings[name] for name in lane} for lane in lanes])[trial.name]

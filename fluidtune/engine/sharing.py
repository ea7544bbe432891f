"""What trials need of a device's memory, which of them fit together, and what part of a device each gets.

Answers from what trials were measured to need and from the lane policy of their devices. It asks the pure part of
salus_share, whose lane service admits trials by the same rules. It decides neither when a trial starts nor how many
share a device by speed. All memory is given in parts of one device's: 1.0 is all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import median

from fluidtune.engine.speed import TRIALS_REMEMBERED
from fluidtune.engine.trial import ROUNDING, Trial
from salus_share import SEATS, Need, choose_device, divide, fit_together, policy, shares
from salus_share.policies import Standing


class Sharing:
    """The needs of one job's trials, and the policy under which they share devices."""

    def __init__(self, policy_name: str) -> None:
        """``policy_name``: a name of `salus_share.policies`. Raises SalusError for another one."""
        self._policy = policy(policy_name)
        #: Trials that a device may hold by the policy and the lane service, whatever they need.
        self._most_trials = min(self._policy.max_jobs or SEATS, SEATS)
        #: What each trial was measured to need, the one measured longest ago first.
        self._needs: dict[str, Need] = {}
        #: By trial, what it lacked before and needs at least.
        self.least: dict[str, Need] = {}
        #: The median need of the TRIALS_REMEMBERED trials measured last; None before anything was measured.
        self._typical: Need | None = None

    def record_need(self, trial: Trial, memory: float, ephemeral: float, compute: float | None) -> None:
        """``trial`` was measured to need ``memory``, ``ephemeral`` of it within an iteration only.

        ``compute``: the part of the device that it kept busy; None: not measured this time.
        """
        before = self._needs.pop(trial.name, None)
        need = Need(memory - ephemeral, ephemeral, compute)
        if compute is None and before is not None:
            need = replace(need, compute=before.compute)
        self._needs[trial.name] = need.at_least(self.least.get(trial.name, need))
        recent = list(self._needs.values())[-TRIALS_REMEMBERED:]
        recent.sort(key=lambda need: need.persistent + need.ephemeral)
        middle = recent[(len(recent) - 1) // 2]
        measured = [need.compute for need in recent if need.compute is not None]
        self._typical = Need(middle.persistent, middle.ephemeral, median(measured) if measured else None)

    def record_lack(self, trial: Trial, memory: float, ephemeral: float) -> None:
        """``trial`` failed or had to go because it had less than this; so it needs this at least from now on."""
        self.least[trial.name] = Need(memory - ephemeral, ephemeral)
        self.record_need(trial, memory, ephemeral, None)

    def need_of(self, trial: Trial) -> Need | None:
        """What it needs: measured, else as others of its job, else the share that its script asked for, else None."""
        known = self._needs.get(trial.name, self._typical)
        if known is None and trial.asked_share < 1:
            return Need(Fraction(1, trial.slots_by_share), 0)
        return known

    def memory_limit(self) -> int:
        """How many typical trials a device's memory holds, if need be taking turns in one lane.

        Before anything was measured it is the most that the policy allows, so that devices are open to share; a trial
        whose need is unknown is then refused by `fits_together`.
        """
        if self._typical is None:
            return self._most_trials
        persistent, ephemeral = float(self._typical.persistent), float(self._typical.ephemeral)
        count = SEATS if persistent <= 0 else int((1 - ephemeral) / persistent + ROUNDING)
        return max(1, min(count, self._most_trials))

    def fits_together(self, trials: Sequence[Trial]) -> bool:
        """Whether these trials can share one device: in lanes of their own or, if need be, taking turns.

        A trial whose need is unknown must be alone.
        """
        if self._policy.max_jobs is not None and len(trials) > self._policy.max_jobs:
            return False
        needs = [self.need_of(trial) for trial in trials]
        known = [need for need in needs if need is not None]
        return len(known) == len(needs) and fit_together(known, 1, own_lanes=False)

    def choose_device(self, trial: Trial, devices: Mapping[int, Sequence[Trial]]) -> int | None:
        """The device that ``trial`` should join, out of ``devices`` with their tenants; None: no device has room.

        Among the devices where it has a lane of its own, or else among all, the one whose tenants are least busy.
        """
        mine = self.need_of(trial)
        if mine is None:
            return None
        there = {
            device: [need for tenant in tenants if (need := self.need_of(tenant)) is not None]
            for device, tenants in devices.items()
            if self.fits_together([*tenants, trial])
        }
        for own_lanes in (True, False):
            device = choose_device(mine, there, 1, own_lanes=own_lanes)
            if device is not None:
                return device
        return None

    def share_of(self, trial: Trial, tenants: Sequence[tuple[Trial, float]]) -> float:
        """The part of its device that ``trial`` gets under the policy; ``tenants``: all trials there, heights in s."""
        needs = {other.name: need for other, _ in tenants if (need := self.need_of(other)) is not None}
        lanes = divide(needs, 1, max_lanes=self._policy.max_lanes) if len(needs) == len(tenants) else None
        if lanes is None:
            return 1 / len(tenants)
        standings = {other.name: Standing(other.number, remaining=height, rung=other.rung) for other, height in tenants}
        return shares(self._policy, [{name: standings[name] for name in lane} for lane in lanes])[trial.name]

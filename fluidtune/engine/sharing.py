"""What trials need of a device's memory, in which lane of it each is, and what part of a device each gets.

Decided here alone, by what trials were measured to need and by the lane policy of their devices, with the pure part of
salus_share. The processes of the trials carry it out: the shell tells each its lane and its promise before its next
iteration. It decides neither when a trial starts nor how many share a device by speed. All memory is given in parts of
one device's: 1.0 is all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from statistics import median

from fluidtune.engine.speed import TRIALS_REMEMBERED
from fluidtune.engine.trial import ROUNDING, Trial
from salus_share import SEATS, LaneTable, Need, choose_device, policy, shares
from salus_share.lanes import Place, outgrown, oversized
from salus_share.policies import Standing


class Sharing:
    """The needs of one job's trials, and the lanes in which they share devices under a policy."""

    def __init__(self, policy_name: str) -> None:
        """``policy_name``: a name of `salus_share.policies`. Raises SalusError for another one."""
        self._policy = policy(policy_name)
        #: Trials that a device may hold by the policy and its seat table, whatever they need.
        self._most_trials = min(self._policy.max_jobs or SEATS, SEATS)
        #: What each trial was measured to need, the one measured longest ago first.
        self._needs: dict[str, Need] = {}
        #: By trial, what it lacked before and needs at least.
        self._least: dict[str, Need] = {}
        #: The lanes of each device, as of the last `lanes_of`.
        self._lanes: dict[int, LaneTable] = {}
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
        self._needs[trial.name] = need.at_least(self._least.get(trial.name, need))
        recent = list(islice(reversed(self._needs.values()), TRIALS_REMEMBERED))
        recent.sort(key=lambda need: need.persistent + need.ephemeral)
        middle = recent[(len(recent) - 1) // 2]
        measured = [need.compute for need in recent if need.compute is not None]
        self._typical = Need(middle.persistent, middle.ephemeral, median(measured) if measured else None)

    def record_lack(self, trial: Trial, memory: float, ephemeral: float) -> None:
        """``trial`` failed or had to go because it had less than this; so it needs this at least from now on."""
        self._least[trial.name] = Need(memory - ephemeral, ephemeral)
        self.record_need(trial, memory, ephemeral, None)

    def need_of(self, trial: Trial) -> Need | None:
        """What it needs: measured, else as others of its job, else the share that its script asked for, else None."""
        known = self._needs.get(trial.name, self._typical)
        if known is None and trial.asked_share < 1:
            return Need(Fraction(1, trial.slots_by_share), 0)
        return known

    def memory_limit(self) -> int:
        """How many typical trials a device's memory holds by algorithm 2.1: as many in lanes of their own as fit, and
        as many beside these as there is persistent memory for.

        Before anything was measured it is the most that the policy allows, so that devices are open to share; a trial
        whose need is unknown is then refused by `choose_device`.
        """
        if self._typical is None:
            return self._most_trials
        persistent, whole = float(self._typical.persistent), float(self._typical.persistent + self._typical.ephemeral)
        lanes = min(self._policy.max_lanes or SEATS, SEATS if whole <= 0 else int(1 / whole + ROUNDING))
        if not lanes:
            return 1
        count = SEATS if persistent <= 0 else lanes + int((1 - lanes * whole) / persistent + ROUNDING)
        return max(1, min(count, self._most_trials))

    def lanes_of(self, device: int, tenants: Sequence[Trial]) -> LaneTable:
        """The lanes of a device with these tenants, in the order in which they came: who has left them is released.

        A newcomer gets the lane that `choose_device` has found for it; the first one on a device whatever it needs. A
        tenant that was measured to need more than it is promised is promised more, if there is room. While it is alone
        its promise is what it needs: its process has been told of none.
        """
        table = self._lanes.setdefault(device, LaneTable(1, self._policy.max_lanes))
        for gone in table.places.keys() - {trial.name for trial in tenants}:
            table.release(gone)
        for trial in tenants:
            name, need = trial.name, self.need_of(trial)
            if name not in table.places and (
                need is None or table.admit(name, need.persistent, need.ephemeral) is None
            ):
                alone = table.admit(name, 0, 1)
                assert alone is not None, f"{name} was put beside others without room: {table.places}"
            elif need is not None and len(tenants) == 1:
                if table.change(name, need.persistent, need.ephemeral) is None:
                    table.change(name, 0, 1)
            elif name in self._needs and outgrown(table.places[name], self._needs[name]):
                more = self._needs[name].at_least(table.places[name])
                table.change(name, more.persistent, more.ephemeral)
        return table

    def promise_anew(self, trial: Trial, tenants: Sequence[Trial]) -> None:
        """``trial``, which is one of a device's tenants and between two iterations, is promised what it needs now.

        Only now may that be less than before: within an iteration it may use what it was promised. What a trial alone
        is promised is looked for when another one comes.
        """
        if len(tenants) == 1:
            return
        table, need = self.lanes_of(trial.devices[0], tenants), self._needs[trial.name]
        if oversized(promised := table.places[trial.name], need) or outgrown(promised, need):
            table.change(trial.name, need.persistent, need.ephemeral)

    def place_of(self, trial: Trial, tenants: Sequence[Trial]) -> Place:
        """The lane of a trial among its device's tenants, and what it is promised there."""
        return self.lanes_of(trial.devices[0], tenants).places[trial.name]

    def choose_device(self, trial: Trial, devices: Mapping[int, Sequence[Trial]]) -> int | None:
        """The device that ``trial`` should join, out of ``devices`` with their tenants; None: no device has room.

        A trial whose need is unknown joins none.
        """
        mine, most = self.need_of(trial), self._most_trials
        if mine is None:
            return None
        there = {
            device: (self.lanes_of(device, tenants), [need for each in tenants if (need := self.need_of(each))])
            for device, tenants in devices.items()
            if len(tenants) < most
        }
        return choose_device(mine, there)

    def share_of(self, trial: Trial, device: int, tenants: Sequence[tuple[Trial, float]]) -> float:
        """The part of ``device`` that ``trial`` gets under the policy; ``tenants``: all trials there, heights in s."""
        lanes = self.lanes_of(device, [other for other, _ in tenants]).lanes.values()
        standings = {other.name: Standing(other.number, remaining=height, rung=other.rung) for other, height in tenants}
        return shares(self._policy, [{name: standings[name] for name in lane.jobs} for lane in lanes])[trial.name]

"""What devices have to do before a request that comes now could be answered. All times are seconds.

A request for which that takes too long will be refused in the end. To refuse it at once costs the least: its
input need not be read, and an overloaded machine has more time for the others. No answer is lost by it, because only
what is certain counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from symphony_serve.profiles import Profile


class Backlog:
    """Counts what waits for each model, and when each device will have run what was sent to it.

    budgets: by model, the seconds within which its batches must end at most. A model that is not in it counts nothing.
    """

    def __init__(self, profiles: Mapping[str, Profile], budgets: Mapping[str, float]):
        self._budgets: dict[str, float] = {}
        #: By model, how many requests wait.
        self.waiting: dict[str, int] = {}
        #: By model, the seconds of a request in the batches that take the fewest for each.
        self._each: dict[str, float] = {}
        #: By model, the fewest seconds of a batch of 1. Those of the first profile are always possible: the model is
        #: tried with them (`model_side.ModelSide`), and only the requests that come can bring that about.
        self.alone: dict[str, float] = {}
        self._first: dict[str, float] = {}
        #: By device, when it can start the next batch by the profile of the latest one.
        self._busy: dict[int, float] = {}
        for model, profile in profiles.items():
            self.add(model, profile, budgets[model])

    def add(self, model: str, profile: Profile, budget: float) -> None:
        """One more model. Nothing waits for it yet."""
        self._budgets[model], self.waiting[model], self._first[model] = budget, 0, profile.seconds(1)
        self.set_profile(model, profile)

    def remove(self, model: str) -> None:
        """Nothing waits for the model any more, and nothing will."""
        for known in (self._budgets, self.waiting, self._each, self.alone, self._first):
            del known[model]  # type: ignore[attr-defined]

    def set_profile(self, model: str, profile: Profile) -> None:
        """Batches of the model usually take other times from now on."""
        most = max(1, profile.largest(self._budgets[model]))
        self._each[model] = min([profile.seconds(size) * profile.part(size) / size for size in range(1, most + 1)])
        self.alone[model] = min(self._first[model], profile.seconds(1))

    def waits(self, model: str) -> None:
        if model in self.waiting:
            self.waiting[model] += 1

    def waits_no_more(self, model: str) -> None:
        """A request was sent for the first time, or refused or cancelled before that."""
        if model in self.waiting:
            self.waiting[model] -= 1

    def sent(self, device: int, end: float) -> None:
        """A batch was sent; by its profile the device can start the next one at ``end``."""
        self._busy[device] = end

    def done(self, device: int) -> None:
        """The device's batch has ended. (That of a device that was lost counts until it would have ended.)"""
        self._busy.pop(device, None)

    def seconds(self, model: str, devices: Iterable[int], now: float, count: int = 1) -> float:
        """At the least, from ``now`` until ``count`` more requests to ``model`` have been run by these devices.

        What waits for other models need not go first, and batches may be the fastest ones: so it can only be more.
        Infinite: there is no device.
        """
        given = list(devices)
        if not given:
            return math.inf
        busy = sum([max(0.0, self._busy.get(device, now) - now) for device in given])
        each = self._each[model]
        before = self.waiting[model] + count - 1
        return (busy + before * each + min(each, self.alone[model])) / len(given)

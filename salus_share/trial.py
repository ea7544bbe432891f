"""A trial that shares a device: a lane client that measures its memory, asks for it, and keeps to its share.

shared = SharedTrial(LaneClient(...), ResidentMeter(), capacity)
shared.admit()
while training:
    try:
        with shared.iteration():
            step()
    except StaleToken:              # nothing of this iteration ran: make room
        commit(); free()
        shared.yield_memory()
        load()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        free()                      # back to the last commit, with a bigger share
        shared.grow_after_failure()
        load()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from salus_share.client import LaneClient
from salus_share.errors import ServiceLost, StaleToken
from salus_share.memory import Meter, Profile, after_failure, ask_for
from salus_share.messages import Need


class SharedTrial:
    """One trial's side of a shared device of ``capacity`` bytes.

    ``profile``: what ``meter`` measured while the trial had the device alone, None if it had not. ``least``: what it
    asked for after an allocation had failed, None if none has failed. It is never promised less.
    """

    def __init__(
        self,
        client: LaneClient,
        meter: Meter,
        capacity: int,
        *,
        profile: Profile | None = None,
        least: Need | None = None,
    ) -> None:
        self._client = client
        self._meter = meter
        self._capacity = capacity
        #: What the service promised. None while the trial has the device alone because its need is not known.
        self.promised: Need | None = None
        #: What to ask for at the next boundary.
        self._asking: Need | None = None
        self._profile = profile or Profile(meter)
        self._least = least

    def admit(
        self,
        need: Need | None = None,
        *,
        remaining: float | None = None,
        rung: int = 0,
        timeout: float | None = None,
    ) -> None:
        """See `LaneClient.admit`, whose parameters these are."""
        # Memory that it cached while it was alone may be another trial's now.
        self._meter.give_back()
        self._client.admit(need, remaining=remaining, rung=rung, timeout=timeout)
        self._promise(need)

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """One iteration. Entering raises StaleToken, before anything ran, if the trial must leave the device."""
        if self._asking is not None:
            asked, self._asking = self._asking, None
            try:
                self._ask(asked)
            except ServiceLost:
                # It goes on with what it has, and asks again at the next boundary.
                self._asking = asked
        self._profile.begin()
        with self._client.iteration():
            yield
        measured = self._profile.end()
        if measured is not None and not (self._profile.first and self.promised is None):
            asking = ask_for(measured, self.promised)
            if asking is not None and self._least is not None:
                asking = asking.at_least(self._least)
            self._asking = None if asking == self.promised else asking

    def yield_memory(self, timeout: float | None = None) -> None:
        """After StaleToken, when the memory is free: wait until it may be loaded again."""
        self._meter.give_back()
        self._client.yield_memory(timeout)
        self._profile = Profile(self._meter)
        self._promise(self.promised)

    def grow_after_failure(self) -> None:
        """After an allocation failed, when the memory is free: get a bigger share, and wait if there is no room now.

        Raises Refused if the trial had the whole device.
        """
        whole = Need(0, self._capacity)
        bigger = self._least = after_failure(self.promised or whole, self._capacity)
        self._asking = None
        try:
            self._ask(bigger)
        except StaleToken:
            self.yield_memory()

    def leave(self) -> None:
        self._meter.lift()
        self._client.leave()

    def _ask(self, need: Need) -> None:
        # What is given back is promised to others at once.
        self._meter.give_back()
        before, self.promised = self.promised, need
        try:
            # If there is no room (StaleToken), it keeps this promise for when it comes back.
            self._client.need(need)
        except ServiceLost:
            self.promised = before
            raise
        self._promise(need)

    def _promise(self, need: Need | None) -> None:
        self.promised = need
        self._meter.limit(self._capacity if need is None else int(need.persistent) + int(need.ephemeral))

"""A trial that shares a device: a lane client that measures its memory, asks for it, and keeps to its share.

    shared = SharedTrial(LaneClient(...), ResidentMeter(), capacity)
    shared.admit()
    while training:
        with shared.iteration():        # StaleToken: nothing of this iteration ran; commit, free, leave, come again
            step()
    shared.leave()

A trial whose allocation failed goes back to its last commit and comes again with what `memory.after_failure` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from salus_share.client import LaneClient
from salus_share.errors import ServiceLost
from salus_share.memory import Meter, Profile, ask_for
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

    def leave(self) -> None:
        self._meter.lift()
        self._client.leave()

    def _ask(self, need: Need) -> None:
        # What is given back is promised to others at once.
        self._meter.give_back()
        before, self.promised = self.promised, need
        try:
            # Also if there is no room (StaleToken): it is what the trial needs when it comes again.
            self._client.need(need)
        except ServiceLost:
            self.promised = before
            raise
        self._promise(need)

    def _promise(self, need: Need | None) -> None:
        self.promised = need
        self._meter.limit(self._capacity if need is None else int(need.persistent) + int(need.ephemeral))

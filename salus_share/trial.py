"""A trial that shares a device: the lane client, with its memory measured, asked for and held to its share.

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
from salus_share.errors import StaleToken
from salus_share.memory import FIRST, GROUP, Meter, after_failure, ask_for
from salus_share.messages import Need


class SharedTrial:
    """One trial's side of a shared device of ``capacity`` bytes."""

    def __init__(self, client: LaneClient, meter: Meter, capacity: int) -> None:
        self._client = client
        self._meter = meter
        self._capacity = capacity
        #: What the service promised, None while the trial has the device alone because nobody knows.
        self.promised: Need | None = None
        #: What to ask for at the next boundary.
        self._asking: Need | None = None
        self._iterations = 0

    def admit(
        self,
        need: Need | None = None,
        *,
        remaining: float | None = None,
        rung: int = 0,
        timeout: float | None = None,
    ) -> None:
        """See `LaneClient.admit`."""
        self._client.admit(need, remaining=remaining, rung=rung, timeout=timeout)
        self._promise(need)

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """One iteration. Raises StaleToken, before anything ran, if the trial must leave the device."""
        if self._asking is not None:
            asked, self._asking = self._asking, None
            self._ask(asked)
        if self._iterations < FIRST or self._iterations % GROUP == 0:
            self._meter.reset()
        with self._client.iteration():
            yield
        self._iterations += 1
        if self._iterations <= FIRST or self._iterations % GROUP == 0:
            # The first iteration makes what stays (optimizer state), so what it says of E is too much.
            if self._iterations == 1 and self.promised is None:
                return
            self._asking = ask_for(self._meter.read(), self.promised)

    def yield_memory(self, timeout: float | None = None) -> None:
        """After StaleToken, with the memory free: wait until it may be loaded again."""
        self._client.yield_memory(timeout)
        self._iterations = 0
        self._promise(self.promised)

    def grow_after_failure(self) -> None:
        """After an allocation failed, with the memory free: a bigger share, waited for if there is no room now.

        Raises Refused if it had the whole device.
        """
        whole = Need(0, self._capacity)
        bigger = after_failure(self.promised or whole, self._capacity)
        self._asking = None
        try:
            self._ask(bigger)
        except StaleToken:
            self.yield_memory()

    def leave(self) -> None:
        """The trial is done with the device."""
        self._meter.lift()
        self._client.leave()

    def _ask(self, need: Need) -> None:
        # If there is no room it comes back with this promise.
        self.promised = need
        self._client.need(need)
        self._promise(need)

    def _promise(self, need: Need | None) -> None:
        self.promised = need
        self._meter.limit(self._capacity if need is None else int(need.persistent) + int(need.ephemeral))

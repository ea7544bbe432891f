"""Finds out that the workers of a group wait for each other in different collectives, which would never end.

It happens when a worker leaves out a step that the others do, as by a ``continue`` that depends on its own part of a
batch. Every worker counts its collectives. One that has waited for a while writes the number and the kind of its
collective into the leader's store, and reads what the others have written. Nothing is sent while no worker waits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress

from .signing import SignedStore

#: Seconds that a worker waits in a collective before it looks at the others, and between two looks.
LOOK_S = 1.0
#: Looks of another worker that waits in a collective of another number, after which it certainly waits there. The one
#: ahead may only have sent what is on its way to the other.
_SURE = 5

#: Number and kind of a collective, counted from 1 in each group.
Place = tuple[int, str]


class Lockstep:
    """One worker's view of a group of ``world`` workers, in which it is ``rank``."""

    def __init__(self, store: SignedStore, generation: float, rank: int, world: int) -> None:
        self._store = store
        self._prefix = f"{generation}/waits"
        self._rank, self._world = rank, world
        #: The number and the kind of the collective that this worker began last.
        self.place: Place = (0, "")
        #: Since this collective has begun: how often this worker has looked, and what it saw of each other at first.
        self._looks = 0
        self._first: dict[int, tuple[int, int]] = {}

    def begin(self, what: str) -> None:
        """This worker begins its next collective; ``what`` names its kind."""
        self.place = (self.place[0] + 1, what)
        self._looks = 0

    def look(self) -> str | None:
        """This worker has waited for another `LOOK_S` at `place`. Returns why the wait will not end, if it will not."""
        if self._looks == 0:
            self._first.clear()
        self._looks += 1
        number, what = self.place
        known = self._say(number, self._looks, what)
        if known is not None:
            return known
        for other, (its, looks, stands_at) in self._others():
            first = self._first.setdefault(other, (its, looks))
            waits = its == number or (its == first[0] and looks - first[1] >= _SURE)
            if (waits and stands_at != what) or (waits and its != number):
                return self.report(other, stands_at)
        return None

    def look_from_gpu(self, place: Place) -> str | None:
        """As `look`, for a collective that this worker's GPU has not done; its thread may be at a later place.

        Only a worker in a collective of the same number tells something: a GPU may also compute for long before its
        collective begins.
        """
        number, what = place
        known = self._say(number, 0, what)
        if known is not None:
            return known
        for other, (its, _, stands_at) in self._others():
            if its == number and stands_at != what:
                return self.report(other, stands_at, what)
        return None

    def _say(self, number: int, looks: int, what: str) -> str | None:
        """Let the others know where this worker waits. Returns what another one has found."""
        self._store.write(f"{self._prefix}/{self._rank}", json.dumps([number, looks, what]).encode())
        return self.found()

    def _others(self) -> Iterator[tuple[int, tuple[int, int, str]]]:
        """The others that have waited: rank, and number, looks and kind of the collective."""
        for other in range(self._world):
            said = None if other == self._rank else self._store.read(f"{self._prefix}/{other}")
            if said is not None:
                number, looks, what = json.loads(said)
                yield other, (number, looks, what)

    def report(self, other: int, what: str, own: str | None = None) -> str:
        """``other`` is in another collective, a ``what``: let all know, and return it in a line.

        ``own``: the kind of this worker's, by default that of `place`.
        """
        own = self.place[1] if own is None else own
        why = (
            f"worker {self._rank} stands at {own} and worker {other} at {what}: one of them left out a step, a "
            "batch or a call; let no `continue`, `break` or `if` depend on a worker's own part of a batch"
        )
        self.tell(why)
        return why

    def tell(self, why: str) -> None:
        """Let all workers know why the group cannot go on."""
        self._store.write(f"{self._prefix}/apart", why.encode())

    def found(self) -> str | None:
        """What a worker has reported, also after the group broke."""
        with suppress(RuntimeError, OSError):
            said = self._store.read(f"{self._prefix}/apart")
            return None if said is None else said.decode()
        return None

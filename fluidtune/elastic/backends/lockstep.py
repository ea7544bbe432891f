"""Finds out that the workers of a group wait for each other in different collectives, which would never end.

It happens when a worker leaves out a step that the others do, as by a ``continue`` that depends on its own part of a
batch. Every worker counts its collectives. One that has waited for a while writes the number and the kind of its
collective into the leader's store, and reads what the others have written. Nothing is sent while no worker waits.
"""

from __future__ import annotations

import json
from contextlib import suppress

from .signed_store import SignedStore

#: Seconds that a worker waits in a collective before it looks at the others, and between two looks.
#: Judgement: long against a collective, short for a person who waits.
LOOK_S = 1.0
#: Looks of another worker that waits in a collective of another number, after which it certainly waits there. The one
#: ahead may only have sent what is on its way to the other. Judgement: the network's buffers are empty by then.
_SURE = 5


class Lockstep:
    """One worker's view of a group of ``world`` workers, in which it is ``rank``."""

    def __init__(self, store: SignedStore, generation: float, rank: int, world: int) -> None:
        self._store = store
        self._prefix = f"{generation}/waits"
        self._rank, self._world = rank, world
        self._number = 0
        self._what = ""
        #: Since this collective has begun: how often this worker has looked, and what it saw of each other at first.
        self._looks = 0
        self._first: dict[int, tuple[int, int]] = {}

    def begin(self, what: str) -> None:
        """This worker begins its next collective; ``what`` names its kind."""
        self._number += 1
        self._what = what
        self._looks = 0

    def look(self) -> str | None:
        """This worker has waited for another `LOOK_S`. Returns why the wait will not end; None: it may."""
        if self._looks == 0:
            self._first.clear()
        self._looks += 1
        self._store.say(f"{self._prefix}/{self._rank}", json.dumps([self._number, self._looks, self._what]).encode())
        known = self.found()
        if known is not None:
            return known
        for other in range(self._world):
            said = None if other == self._rank else self._store.heard(f"{self._prefix}/{other}")
            if said is None:
                continue
            number, looks, what = json.loads(said)
            first = self._first.setdefault(other, (number, looks))
            waits = number == self._number or (number == first[0] and looks - first[1] >= _SURE)
            if (waits and what != self._what) or (waits and number != self._number):
                return self.report(other, what)
        return None

    def report(self, other: int, what: str) -> str:
        """``other`` is in another collective, a ``what``: let all know, and return it in a line."""
        why = (
            f"worker {self._rank} stands at {self._what} and worker {other} at {what}: one of them left out a step, a "
            "batch or a call; let no `continue`, `break` or `if` depend on a worker's own part of a batch"
        )
        self._store.say(f"{self._prefix}/apart", why.encode())
        return why

    def found(self) -> str | None:
        """What a worker has reported, also after the group broke; None: nothing, or the leader is gone."""
        with suppress(RuntimeError, OSError):
            said = self._store.heard(f"{self._prefix}/apart")
            return None if said is None else said.decode()
        return None

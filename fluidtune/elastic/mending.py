"""Who is left of a group that broke, so that they may go on without the others."""

from __future__ import annotations

import time

from .backends.base import Address, CollectiveBackend
from .errors import GroupLost

#: How long a leader waits for those of a broken group that live, seconds: who computes notices at the end of it.
MUSTER_S = 10.0
#: A mended group's generation is its predecessor's plus so much: below every one that the host will choose.
MENDED = 0.001


def muster(
    backend: CollectiveBackend, address: Address, members: tuple[str, ...], worker: str, generation: float
) -> tuple[str, ...]:
    """Those of ``members`` that go on as ``generation``; called by all of them, the leader (members[0]) decides.

    ``backend`` has dissolved the broken group, of which it remembers the generation. Raises GroupLost in a
    follower whose leader is gone, or goes on without it.
    """
    if worker == members[0]:
        left = _present(backend, members, generation)
        backend.call(generation, left)
        return left
    backend.announce(address, generation, members.index(worker))
    if not backend.called(address, generation, MUSTER_S + backend.form_timeout):
        raise GroupLost(f"the leader of generation {backend.generation} did not go on")
    left = backend.members(address, generation)
    if worker not in left:
        raise GroupLost(f"the leader of generation {backend.generation} went on without {worker}")
    return left


def _present(backend: CollectiveBackend, members: tuple[str, ...], generation: float) -> tuple[str, ...]:
    """Leader: itself, and those that say within `MUSTER_S` that they are there, or until the rest is dead."""
    others = dict(enumerate(members[1:], start=1))
    before = backend.generation
    deadline = time.monotonic() + MUSTER_S
    while True:
        here = [rank for rank in others if backend.announced(generation, [rank])]
        dead = [rank for rank in others if backend.alive(before, rank) is False and rank not in here]
        if len(here) + len(dead) == len(others) or time.monotonic() > deadline:
            return (members[0], *(others[rank] for rank in here))
        time.sleep(0.005)

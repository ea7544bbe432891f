"""Who is left of a group that broke, so that they may go on without the others."""

from __future__ import annotations

import time

from .backends.base import Address, CollectiveBackend
from .errors import GroupLost

#: How long a leader waits for those of a broken group that live, seconds: who computes notices at the end of it.
MUSTER_S = 10.0
#: How often one broken group is mended, in which others may die meanwhile; then the host must help.
MOST_MENDS = 8
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
        ranks = _present(backend, len(members), generation)
        backend.keep(generation, ranks)
        left = (worker, *(members[rank] for rank in ranks))
        backend.call(generation, left)
        return left
    backend.stay(address, generation, members.index(worker))
    if not backend.called(address, generation, MUSTER_S + backend.form_timeout):
        raise GroupLost(f"the leader of generation {backend.generation} did not go on")
    left = backend.members(address, generation)
    if worker not in left:
        raise GroupLost(f"the leader of generation {backend.generation} went on without {worker}")
    return left


def _present(backend: CollectiveBackend, world: int, generation: float) -> list[int]:
    """Leader: the others' ranks that say within `MUSTER_S` that they are there, or until the rest is dead."""
    deadline = time.monotonic() + MUSTER_S
    while True:
        stays = {rank: backend.staying(generation, rank) for rank in range(1, world)}
        if None not in stays.values() or time.monotonic() > deadline:
            return [rank for rank, there in stays.items() if there]
        time.sleep(0.005)

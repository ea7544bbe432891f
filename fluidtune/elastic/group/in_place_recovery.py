"""Which workers are left of a group that broke, so that they can go on without the others."""

from __future__ import annotations

import time

from ..errors import GroupLost
from ..transport.base import CollectiveBackend
from ..transport.membership import Address

#: Seconds that a leader waits for the survivors of a broken group: one that computes notices the loss at its next
#: collective.
SURVIVOR_WAIT_S = 10.0
#: Recoveries of one broken group, while further workers die, before the host must help.
MOST_RECOVERIES = 8
#: The generation of a recovered group is that of the broken one plus this. It stays below the next whole number, which
#: the host may choose, for 999 recoveries.
GENERATION_STEP = 0.001
#: Seconds between the leader's looks at who is there.
_LOOK_S = 0.005


def agree_on_survivors(
    backend: CollectiveBackend, address: Address, members: tuple[str, ...], worker: str, generation: float
) -> tuple[str, ...]:
    """The ``members`` that go on as ``generation``, in their old order. All survivors call it; the leader decides.

    ``worker``: the caller. ``address``: the leader's. ``backend`` has dissolved the broken group, and still has its
    generation.

    Raises:
        GroupLost: in a follower whose leader is gone, or goes on without it.
    """
    if worker == members[0]:
        ranks = _present(backend, len(members), generation)
        backend.keep_places(generation, ranks)
        left = (worker, *(members[rank] for rank in ranks))
        backend.call_generation(generation, left)
        return left
    backend.announce_survivor(address, generation, members.index(worker))
    called = backend.wait_for_call(address, generation, SURVIVOR_WAIT_S + backend.form_timeout)
    if called is None:
        raise GroupLost(f"the leader of generation {backend.generation} did not go on")
    if worker not in called:
        raise GroupLost(f"the leader of generation {backend.generation} went on without {worker}")
    return called


def _present(backend: CollectiveBackend, world: int, generation: float) -> list[int]:
    """Leader: the followers' ranks that say within `SURVIVOR_WAIT_S` that they are there, sooner if the rest died."""
    deadline = time.monotonic() + SURVIVOR_WAIT_S
    while True:
        stays = {rank: backend.survivor_announced(generation, rank) for rank in range(1, world)}
        if None not in stays.values() or time.monotonic() > deadline:
            return [rank for rank, there in stays.items() if there]
        time.sleep(_LOOK_S)

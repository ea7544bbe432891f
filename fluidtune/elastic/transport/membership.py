"""Which workers a trial's group is to have. A host tells this to a session."""

from __future__ import annotations

from dataclasses import dataclass

#: (host, port) of a leader.
Address = tuple[str, int]
#: The host of a leader whose followers are all on its node: no other machine reaches it.
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Reform:
    """The trial's workers from the next boundary on.

    ``generation`` grows with every reform of the trial. ``members`` are worker ids; members[0] is the leader, in every
    reform of the trial the same. ``address`` is the leader's `GroupFacts.address`. ValueError if ``members`` is
    empty or names a worker twice.
    """

    generation: int
    members: tuple[str, ...]
    address: Address

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"members must be one or more different workers, not {self.members}")

"""Where the leader of a trial's group is found."""

from __future__ import annotations

#: (host, port) of a leader.
Address = tuple[str, int]
#: The host of a leader whose followers are all on its node: no other machine reaches it.
LOOPBACK = "127.0.0.1"

"""Leases: which app holds which GPU until when, and the fencing tokens that tell an old holder from the present one.

A lease that is over is dropped at once, and the GPU may be leased again. Ray is asked for its next reservation when the
last one is gone (`shell.groups`). Every grant has a larger token than all grants before it. Which app gets a GPU is
decided in `policy`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from themis_bridge.locality import Gpu

#: First leases end in this many groups, one after the other. Were all to end at once, the few apps that bid would get
#: the whole cluster by turns.
END_GROUPS = 8


@dataclass
class Lease:
    """One lease. Its fields are part of the format of the arbiter's books. docs/arbiter.md draws its states."""

    gpu: str
    app: str
    token: int
    #: End on the arbiter's clock.
    expires: float
    #: The app that gets the GPU next; None if that is not decided.
    heir: str | None = None
    #: It will not be renewed: the holder has to leave.
    ending: bool = False
    #: Id of the placement group that Ray has made for it; "" before.
    group: str = ""
    #: Ray has no room for its reservation, which waits in Ray's queue. Nobody holds the GPU meanwhile.
    waits: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        """What its reservation is named after: app, GPU and token."""
        return self.app, self.gpu, self.token

    def on_offer(self, clock: float, notice_s: float) -> bool:
        """Whether the GPU is to be auctioned: the lease's notice has begun, and no heir is decided."""
        return not self.waits and not self.ending and self.expires - clock <= notice_s


def lease_phases(gpus: Iterable[Gpu], by_machine: bool = False) -> dict[str, float]:
    """GPU -> when its leases end, as a part of a lease's length, 0 <= phase < 1.

    The GPUs are divided into `END_GROUPS` groups that lie together (or machines, if those are smaller). Leases of one
    group end together, so that its GPUs can be won together; the groups' ends are spread over one length.

    ``by_machine``: the leases of all GPUs of a machine end together, since an app needs several of them at once.
    """
    places = sorted(gpus, key=lambda each: (each.machine, each.id))
    phases, start = dict[str, float](), 0
    for _, machine in itertools.groupby(places, key=lambda each: each.machine):
        own = list(machine)
        chunk = len(own) if by_machine else min(len(own), max(1, len(places) // END_GROUPS))
        phases.update({gpu.id: (start + i - i % chunk) / len(places) for i, gpu in enumerate(own)})
        start += len(own)
    return phases


def lease_length(phase: float, now: float, length: float) -> float:
    """Seconds of a GPU's lease from ``now`` on, between 0.5 and 1.5 times ``length``, so that it ends at its phase.

    ``phase``: as of `lease_phases`. ``length``: seconds of an ordinary lease; may be infinite.
    """
    if math.isinf(length):
        return length
    return (phase + math.ceil((now + length / 2) / length - phase)) * length - now


class LeaseTable:
    """All leases, at most one for each GPU."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        #: App -> its leases by GPU, those that wait among them.
        self._of: dict[str, dict[str, Lease]] = {}
        #: The largest token ever given.
        self.token = 0

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, gpu: str) -> Lease | None:
        return self._leases.get(gpu)

    def is_free(self, gpu: str) -> bool:
        """Whether nobody holds the GPU. A reservation may wait for it."""
        lease = self._leases.get(gpu)
        return lease is None or lease.waits

    def of(self, app: str) -> list[Lease]:
        """The leases that the app holds; those that wait are not among them."""
        return [lease for lease in self._of.get(app, {}).values() if not lease.waits]

    def current(self, gpu: str, token: int) -> Lease | None:
        """The lease of the GPU if it has that token, else None."""
        lease = self._leases.get(gpu)
        return lease if lease is not None and lease.token == token else None

    def grant(self, gpu: str, app: str, expires: float) -> Lease:
        """Add a lease of a free GPU, with a new token."""
        self.token += 1
        lease = Lease(gpu, app, self.token, expires)
        self.add(lease)
        return lease

    def add(self, lease: Lease) -> None:
        """Add a lease of a free GPU that has a token already."""
        self._leases[lease.gpu] = self._of.setdefault(lease.app, {})[lease.gpu] = lease

    def drop(self, lease: Lease) -> None:
        """Remove a lease."""
        del self._leases[lease.gpu]
        own = self._of[lease.app]
        del own[lease.gpu]
        if not own:
            del self._of[lease.app]

    def saved(self) -> dict[str, Any]:
        """Plain data that `loaded` reads."""
        return {"token": self.token, "leases": [asdict(lease) for lease in self._leases.values()]}

    @classmethod
    def loaded(cls, data: dict[str, Any], newest: int) -> LeaseTable:
        """The table of ``data``. The next token is larger than ``newest``, too."""
        table = cls()
        for each in data.get("leases", ()):
            table.add(Lease(**each))
        table.token = max(int(data.get("token", 0)), newest)
        return table

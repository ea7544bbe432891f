"""Leases: who holds which GPU until when, and the fencing tokens that tell an old holder from the present one.

A lease is *held*, then *closing* until what was reserved for it is known to be gone; only then can the GPU be
leased again. Every grant has a token greater than all before it. Who gets a GPU is decided in `arbiter`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu


@dataclass
class Lease:
    """``expires``: on the arbiter's clock. ``heir``: the app that gets the GPU next; the holder has to leave."""

    gpu: str
    app: str
    token: int
    expires: float
    closing: bool = False
    heir: str | None = None
    #: The lease ends with nobody waiting for it: the holder was not renewed.
    ending: bool = False
    #: It is auctioned before its end is near.
    recalled: bool = False
    #: It was a leftover and not won; the same of the heir's.
    leftover: bool = False
    heir_leftover: bool = False

    def on_offer(self, clock: float, notice_s: float) -> bool:
        """Whether it is to be auctioned: recalled, or about to end, and what follows is not settled."""
        return not self.closing and not self.ending and (self.recalled or self.expires - clock <= notice_s)


def first_length(gpu: str, gpus: Mapping[str, Gpu], now: float, length: float) -> float:
    """Seconds of a lease that begins at ``now``: about ``length``, half of it more or less; renewals take all of it.

    GPUs that lie together come free together, so that they can be won together, and eighths of the cluster (or
    machines, if those are smaller) one after the other: were all leases to end at once, the few apps that bid would
    get the whole cluster in turn.
    """
    if math.isinf(length):
        return length
    places = sorted(gpus.values(), key=lambda each: (each.machine, each.slot, each.id))
    machine = [each.id for each in places if each.machine == gpus[gpu].machine]
    chunk = min(len(machine), max(1, len(places) // 8))
    inside = machine.index(gpu) // chunk * chunk
    before = next(i for i, each in enumerate(places) if each.id == machine[inside])
    phase = before / len(places) * length
    return phase + math.ceil((now + length / 2 - phase) / length) * length - now


class LeaseTable:
    """All leases, one a GPU at most."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        #: The greatest token ever given.
        self.token = 0

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, gpu: str) -> Lease | None:
        return self._leases.get(gpu)

    def of(self, app: str) -> list[Lease]:
        """What the app holds, without what is closing."""
        return [lease for lease in self._leases.values() if lease.app == app and not lease.closing]

    def current(self, gpu: str, token: int) -> Lease | None:
        """The lease of the GPU, if that is its token."""
        lease = self._leases.get(gpu)
        return lease if lease is not None and lease.token == token else None

    def grant(self, gpu: str, app: str, expires: float, leftover: bool = False) -> Lease:
        """Raises ThemisError if somebody holds it."""
        if gpu in self._leases:
            raise ThemisError(f"GPU {gpu!r} is leased to {self._leases[gpu].app!r}; close that lease first")
        self.token += 1
        lease = self._leases[gpu] = Lease(gpu, app, self.token, expires, leftover=leftover)
        return lease

    def adopt(self, lease: Lease) -> None:
        """A lease found in the world and not in the books."""
        self._leases[lease.gpu] = lease
        self.token = max(self.token, lease.token)

    def drop(self, lease: Lease) -> None:
        """What was reserved for it is gone."""
        del self._leases[lease.gpu]

    def saved(self) -> dict[str, Any]:
        """Plain data; `load` reads it."""
        return {"token": self.token, "leases": [asdict(lease) for lease in self._leases.values()]}

    @classmethod
    def load(cls, data: dict[str, Any], seen: Iterable[int] = ()) -> LeaseTable:
        """``seen``: tokens that exist in the world; the next one is greater."""
        table = cls()
        table._leases = {each["gpu"]: Lease(**each) for each in data.get("leases", ())}
        table.token = max([int(data.get("token", 0)), *seen])
        return table


class Fence:
    """What everybody keeps who executes work on GPUs: the newest token seen of each. Older ones are refused."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def admit(self, gpu: str, token: int) -> bool:
        """Whether work under this token may run on the GPU."""
        if token < self._newest.get(gpu, 0):
            return False
        self._newest[gpu] = token
        return True

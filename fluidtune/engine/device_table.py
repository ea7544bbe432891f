"""Which trial is on which device, and which device to take next.

Decides only *which* device when the engine has decided *how much*; keeps the books so that a device is never
given out twice. A device is idle, or whole (one trial), or packed: up to ``packing`` trials with an equal
share each. One that is *leaving* keeps its tenants until they go and gets no others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from fluidtune.engine.trial import EngineError


class Devices:
    """The devices of one engine, their nodes and their tenants."""

    def __init__(self) -> None:
        #: Node of every device.
        self.node: dict[int, str] = {}
        #: Trials on each device, in the order they came; same keys as node. len <= packing.
        self.tenants: dict[int, list[str]] = {}
        #: How many trials may share the device; 1 when idle or whole. Same keys as node.
        self.packing: dict[int, int] = {}
        #: Devices that will be lost soon.
        self.leaving: set[int] = set()
        #: Devices without tenants, those that leave apart, ascending.
        self.idle: list[int] = []
        #: The same by node; no node without an entry while it has devices, lists may be empty.
        self.idle_on: dict[str, list[int]] = {}
        #: How many devices, idle or not, each node has, those that leave apart; no zeros.
        self.size: dict[str, int] = {}
        #: (tenants, device) of devices with 0 < tenants < packing, those that leave apart, ascending.
        self._open: list[tuple[int, int]] = []
        #: Devices whose worker died and that have not been taken since: a trial starts sooner elsewhere.
        self.cold: set[int] = set()

    def __len__(self) -> int:
        """How many there are to plan with."""
        return len(self.node) - len(self.leaving)

    def add(self, device: int, node: str) -> None:
        if device in self.node:
            raise EngineError(f"device {device} was gained twice; it is on {self.node[device]!r}")
        self.node[device] = node
        self.tenants[device] = []
        self.packing[device] = 1
        self.size[node] = self.size.get(node, 0) + 1
        self.idle_on.setdefault(node, [])
        self._set_idle(device)

    def remove(self, device: int) -> None:
        """Forgets a device, which must have no tenants."""
        if device not in self.leaving:
            self.fade(device)
        self.leaving.remove(device)
        del self.node[device], self.tenants[device], self.packing[device]
        self.cold.discard(device)

    def fade(self, device: int) -> None:
        """No trial comes to the device any more."""
        node = self.node[device]
        if self.tenants[device]:
            self._unset_open(device)
        else:
            self._unset_idle(device)
        self.leaving.add(device)
        self.size[node] -= 1
        if not self.size[node]:
            del self.size[node], self.idle_on[node]

    def take(self, device: int, trial: str, packing: int = 1) -> None:
        """``trial`` moves in: on an idle device as one of up to ``packing``, or into a packed one."""
        tenants = self.tenants[device]
        self.cold.discard(device)
        if not tenants:
            self._unset_idle(device)
            self.packing[device] = packing
        else:
            assert len(tenants) < self.packing[device], (device, tenants, trial)
            self._open.remove((len(tenants), device))
        tenants.append(trial)
        self._set_open(device)

    def leave(self, device: int, trial: str) -> None:
        """``trial`` moves out."""
        tenants = self.tenants[device]
        self._unset_open(device)
        tenants.remove(trial)
        if tenants:
            self._set_open(device)
        else:
            self.packing[device] = 1
            self._set_idle(device)

    def open(self, device: int, packing: int) -> None:
        """A device with tenants may hold ``packing`` of them from now on."""
        tenants = self.tenants[device]
        assert tenants and len(tenants) < packing, (device, tenants, packing)
        self._unset_open(device)
        self.packing[device] = packing
        self._set_open(device)

    def make_whole(self, device: int) -> None:
        """The only tenant of a packed device gets all of it, so that nobody joins any more."""
        assert len(self.tenants[device]) == 1, (device, self.tenants[device])
        self._unset_open(device)
        self.packing[device] = 1

    def pick_idle(
        self,
        forbid: str | None = None,
        avoid: str | None = None,
        roomiest: bool = False,
        homes: tuple[int, ...] = (),
    ) -> int | None:
        """An idle device, not on node ``forbid``, and not on ``avoid`` if it can be helped.

        The first of ``homes`` that is one, whatever else is wished. Else the lowest number, so that nodes fill up
        one by one; with ``roomiest`` the lowest on the node with the most idle devices. One that is not cold, if it
        can be helped.
        """
        for device in homes:
            if device in self.idle and self.node[device] != forbid:
                return device
        if roomiest and self.idle:
            nodes = [(-len(idle), self._first(idle)) for node, idle in self.idle_on.items() if idle and node != forbid]
            return min(nodes)[1] if nodes else None
        for banned in ({forbid, avoid}, {forbid}):
            for cold in (False, True):
                for device in self.idle:
                    if self.node[device] not in banned and (device in self.cold) is cold:
                        return device
        return None

    def _first(self, devices: list[int]) -> int:
        return next((device for device in devices if device not in self.cold), devices[0])

    def open_shares(self, limit: int, forbid: str | None = None) -> Iterator[int]:
        """Packed devices with a free share of 1/``limit`` or more: the least crowded first, then the lowest."""
        for _, device in self._open:
            if self.packing[device] <= limit and self.node[device] != forbid:
                yield device

    def pick_near(self, device: int, count: int, forbid: str | None = None) -> list[int]:
        """Up to ``count`` idle devices: those on ``device``'s node first, then by number."""
        home = self.node[device]
        near = [d for d in self.idle_on.get(home, ()) if d != device and home != forbid][:count]
        if len(near) < count:
            far = (d for d in self.idle if self.node[d] not in (home, forbid) and d != device)
            near += [d for d, _ in zip(far, range(count - len(near)), strict=False)]
        return near

    def pick_node(self, count: int, forbid: str | None = None) -> list[int] | None:
        """``count`` idle devices of one node, where the fewest then remain idle. None if no node has them."""
        nodes = [(len(idle), node) for node, idle in self.idle_on.items() if len(idle) >= count and node != forbid]
        return self.idle_on[min(nodes)[1]][:count] if nodes else None

    def node_to_hold(self, count: int) -> str | None:
        """The node to empty for a trial that needs ``count`` devices of one: that with the most idle now."""
        nodes = [(-len(self.idle_on[node]), node) for node, size in self.size.items() if size >= count]
        return min(nodes)[1] if nodes else None

    def has_open(self) -> bool:
        """Is a share of some packed device free?"""
        return bool(self._open)

    def validate(self) -> None:
        """Asserts what the attributes' comments say."""
        assert set(self.node) == set(self.tenants) == set(self.packing)
        for device, tenants in self.tenants.items():
            assert len(tenants) <= self.packing[device], f"device {device} over-committed: {tenants}"
            assert len(set(tenants)) == len(tenants), (device, tenants)
            assert tenants or self.packing[device] == 1, device
        assert self.leaving <= set(self.node)
        staying = {d: tenants for d, tenants in self.tenants.items() if d not in self.leaving}
        assert self.idle == sorted(d for d, tenants in staying.items() if not tenants)
        by_node: dict[str, list[int]] = {node: [] for node in self.size}
        for device in self.idle:
            by_node[self.node[device]].append(device)
        assert by_node == self.idle_on
        assert sum(self.size.values()) == len(self) and all(self.size.values())
        assert self.cold <= self.node.keys()
        assert self._open == sorted((len(t), d) for d, t in staying.items() if 0 < len(t) < self.packing[d])

    def _set_open(self, device: int) -> None:
        if device not in self.leaving and len(self.tenants[device]) < self.packing[device]:
            insort(self._open, (len(self.tenants[device]), device))

    def _unset_open(self, device: int) -> None:
        if device not in self.leaving and len(self.tenants[device]) < self.packing[device]:
            self._open.remove((len(self.tenants[device]), device))

    def _set_idle(self, device: int) -> None:
        if device in self.leaving:
            return
        insort(self.idle, device)
        insort(self.idle_on[self.node[device]], device)

    def _unset_idle(self, device: int) -> None:
        for devices in (self.idle, self.idle_on[self.node[device]]):
            index = bisect_left(devices, device)
            assert devices[index : index + 1] == [device], f"device {device} is not idle"
            del devices[index]

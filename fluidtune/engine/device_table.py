"""Which trial is on which device, and which device to use next.

Once the engine has decided *how many* devices or shares a trial gets, this module decides *which*. It keeps the table
of devices so that no device is given out twice. A device is in one of three states. *Idle*: no trial holds it. *Whole*:
one trial holds all of it. *Shared*: it is divided into equal *slots*, one per trial. A device that will be lost soon is
*leaving*: its tenants keep it until they go, and no other trial gets it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import merge
from typing import Any

from fluidtune.engine.trial import EngineError


class DeviceModels:
    """Of which model each device is, as far as workers have told.

    A *model* is a GPU's product name. It is not known before the first worker of a device has started. A job whose
    devices are all of one model, or of none that is known, is planned as if this class did not exist (`mixed`).
    """

    def __init__(self) -> None:
        #: The model of each device that is there and whose model is known.
        self.of: dict[int, str] = {}

    @property
    def mixed(self) -> bool:
        """Whether devices of several models are there."""
        return len(set(self.of.values())) > 1

    def note(self, device: int, model: str) -> bool:
        """``device`` is of this model. Returns whether that is news."""
        known, self.of[device] = self.of.get(device), model
        return known != model

    def forget(self, device: int) -> None:
        """``device`` is not there any more."""
        self.of.pop(device, None)

    def alike(self, device: int, other: int) -> bool:
        """Whether both are of one model, as far as is known: a device whose model is not known is like all others."""
        ours, theirs = self.of.get(device), self.of.get(other)
        return ours is None or theirs is None or ours == theirs

    def by_model(self, devices: Iterable[int]) -> list[list[int]]:
        """The devices by their models, in their order; those whose model is not known are one more part."""
        parts: dict[str | None, list[int]] = {}
        for device in devices:
            parts.setdefault(self.of.get(device), []).append(device)
        return list(parts.values())


class DeviceTable:
    """The devices of one engine, their nodes and their tenants (the trials that hold them).

    One thing: every change of tenants keeps the slots of their device.
    """

    def __init__(self) -> None:
        #: Node of every device.
        self.node: dict[int, str] = {}
        #: Trials on each device, in the order in which they came. Has the same keys as ``node``.
        self.tenants: dict[int, list[str]] = {}
        #: Equal shares that the device is divided into; 1 when it is idle or whole. Never fewer than its tenants.
        #: Has the same keys as ``node``.
        self.slots: dict[int, int] = {}
        #: Devices that will be lost soon.
        self.leaving: set[int] = set()
        #: Devices without tenants, ascending. Leaving devices are not among them.
        self.idle: list[int] = []
        #: The devices of ``idle`` by node. Has the same keys as ``size``; a list may be empty.
        self.idle_on: dict[str, list[int]] = {}
        #: Number of devices of each node, idle or not. Leaving devices do not count; no number is 0.
        self.size: dict[str, int] = {}
        #: (number of tenants, device) of every device that has tenants and a free slot and is not leaving, ascending.
        self._open: list[tuple[int, int]] = []
        #: The place of each device in the order in which devices were gained, and the last place that was given. A lost
        #: device that is gained again gets a new one.
        self._place: dict[int, int] = {}
        self._last_place = 0
        #: By number of tenants, at least 1: (place, device) of each such device that is not leaving,
        #: ascending.
        self._loaded: dict[int, list[tuple[int, int]]] = {}
        #: The models of devices that are there, as far as they are known.
        self.models = DeviceModels()

    def __len__(self) -> int:
        """Number of devices to plan with: all but those that leave."""
        return len(self.node) - len(self.leaving)

    # Devices

    def add_device(self, device: int, node: str) -> None:
        """``device`` can be used from now on. Raises EngineError if it is in the table already."""
        if device in self.node:
            raise EngineError(f"device {device} was gained twice; it is on {self.node[device]!r}")
        self.node[device] = node
        self.tenants[device] = []
        self.slots[device] = 1
        self._last_place += 1
        self._place[device] = self._last_place
        self.size[node] = self.size.get(node, 0) + 1
        self.idle_on.setdefault(node, [])
        self._index(device)

    def mark_leaving(self, device: int) -> None:
        """No trial gets ``device`` any more."""
        node = self.node[device]
        self._unindex(device)
        self.leaving.add(device)
        self.size[node] -= 1
        if not self.size[node]:
            del self.size[node], self.idle_on[node]

    def remove_device(self, device: int) -> None:
        """Forgets ``device``, which must have no tenants."""
        if device not in self.leaving:
            self.mark_leaving(device)
        self.leaving.remove(device)
        del self.node[device], self.tenants[device], self.slots[device], self._place[device]
        self.models.forget(device)

    # Tenants

    def add_tenant(self, device: int, trial: str, slots: int = 1) -> None:
        """``trial`` gets a slot of ``device``. An idle device is divided into ``slots`` first."""
        tenants = self.tenants[device]
        self._unindex(device)
        if not tenants:
            self.slots[device] = slots
        assert len(tenants) < self.slots[device], (device, tenants, trial)
        tenants.append(trial)
        self._index(device)

    def remove_tenant(self, device: int, trial: str) -> None:
        """``trial`` leaves ``device``, which is idle if no other trial holds it."""
        tenants = self.tenants[device]
        self._unindex(device)
        tenants.remove(trial)
        if not tenants:
            self.slots[device] = 1
        self._index(device)

    def divide_device(self, device: int, slots: int) -> None:
        """Divides a device that has tenants, no more of them than ``slots``, into ``slots``."""
        tenants = self.tenants[device]
        assert 0 < len(tenants) <= slots, (device, tenants, slots)
        self._unindex(device)
        self.slots[device] = slots
        self._index(device)

    # Choices

    def pick_idle(self, forbid: str | None = None, avoid: str | None = None, roomiest: bool = False) -> int | None:
        """An idle device for one worker; None if there is none.

        It is never on node ``forbid``. It is the lowest number, so that nodes fill up one by one, and on node ``avoid``
        only if no other node has one. With ``roomiest`` it is the lowest number on the node that has the most idle
        devices.
        """
        if roomiest and self.idle:
            nodes = [(-len(idle), idle[0]) for node, idle in self.idle_on.items() if idle and node != forbid]
            return min(nodes)[1] if nodes else None
        for banned in ({forbid, avoid}, {forbid}):
            for device in self.idle:
                if self.node[device] not in banned:
                    return device
        return None

    def pick_near(self, device: int, count: int, forbid: str | None = None) -> list[int]:
        """Up to ``count`` other idle devices: those on the node of ``device`` first, then by number.

        Those of the model of ``device`` go before all others: the workers of a trial wait for the slowest.
        """
        home = self.node[device]
        if self.models.mixed:
            others = [d for d in self.idle if self.node[d] != forbid and d != device]
            return sorted(others, key=lambda d: (not self.models.alike(device, d), self.node[d] != home))[:count]
        near = [d for d in self.idle_on.get(home, ()) if d != device and home != forbid][:count]
        if len(near) < count:
            far = (d for d in self.idle if self.node[d] not in (home, forbid) and d != device)
            near += [d for d, _ in zip(far, range(count - len(near)), strict=False)]
        return near

    def pick_on_one_node(self, count: int, forbid: str | None = None) -> list[int] | None:
        """``count`` idle devices of the node where the fewest then remain idle; None if no node has ``count``.

        They are of one model if any node has ``count`` of one.
        """
        wholes = [(len(idle), node, idle) for node, idle in self.idle_on.items() if node != forbid]
        parts = [(size, node, part) for size, node, idle in wholes for part in self.models.by_model(idle)]
        for among in (parts if self.models.mixed else [], wholes):
            if enough := [each for each in among if len(each[2]) >= count]:
                return min(enough)[2][:count]
        return None

    def node_to_empty(self, count: int) -> str | None:
        """The node with the most idle devices among those that have ``count`` devices at all; None if none has."""
        nodes = [(-len(self.idle_on[node]), node) for node, size in self.size.items() if size >= count]
        return min(nodes)[1] if nodes else None

    def open_devices(self, slots: int, forbid: str | None = None) -> Iterator[int]:
        """Devices with a free slot that have at most ``slots`` of them: the fewest tenants first, then by number."""
        for _, device in self._open:
            if self.slots[device] <= slots and self.node[device] != forbid:
                yield device

    def has_open(self) -> bool:
        """Whether a shared device has a free slot."""
        return bool(self._open)

    @property
    def held(self) -> int:
        """Number of devices that trials hold."""
        return len(self.node) - len(self.idle) - sum(not self.tenants[device] for device in self.leaving)

    def loaded_devices(self, least: int, most: int) -> Iterator[int]:
        """Devices with ``least`` to ``most`` tenants, at least 1, that do not leave; in the order they were gained."""
        loads = [self._loaded[count] for count in range(least, most + 1) if self._loaded.get(count)]
        for _, device in loads[0] if len(loads) == 1 else merge(*loads):
            yield device

    def first_gained(self, devices: Iterable[int]) -> list[int]:
        """The devices in the order in which they were gained, each once."""
        return sorted(set(devices), key=self._place.__getitem__)

    @property
    def any_shared(self) -> bool:
        """Whether any device has several tenants."""
        leaving = any(len(self.tenants[device]) > 1 for device in self.leaving)
        return leaving or any(count > 1 and devices for count, devices in self._loaded.items())

    # The indices: a device is out of them while it changes

    def _index(self, device: int) -> None:
        for index, entry in self._entries(device):
            insort(index, entry)

    def _unindex(self, device: int) -> None:
        for index, entry in self._entries(device):
            place = bisect_left(index, entry)
            assert index[place : place + 1] == [entry], f"{entry} is not there"
            del index[place]

    def _entries(self, device: int) -> Iterator[tuple[list[Any], Any]]:
        """The indices that a device is in, and its entry in each; none while it leaves."""
        count = len(self.tenants[device])
        if device in self.leaving:
            return
        if not count:
            yield self.idle, device
            yield self.idle_on[self.node[device]], device
            return
        yield self._loaded.setdefault(count, []), (self._place[device], device)
        if count < self.slots[device]:
            yield self._open, (count, device)

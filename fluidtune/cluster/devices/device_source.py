"""What holds a job's devices.

A job asks one `DeviceSource` which devices it has. `OnDemandDevices` holds devices of the job's own, while its trials
use them or for the whole run. `LeasedDevices` holds leases of the arbiter, which come and go.
`tests.contracts.device_sources` is this contract as tests: the test file of a new source is a fixture and an import.

A device whose hardware has failed is left out. Neither Ray nor an arbiter notices that a GPU fell off the bus. A device
that was given back would come again, to this job or to another one. So the job keeps it until it ends, and uses it no
more. A leased one goes back to the arbiter when that wants it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import ray

from fluidtune.cluster.devices.layout import Layout, devices_held


class DeviceSource(ABC):
    """The devices of one job. Only the driver's main thread calls it.

    Devices are numbered from 0; the same physical device has the same number each time that it comes. A device is
    *there* while the job may start workers on it.
    """

    #: A number stands for the same device when that was lost and comes again, as a lease of the same GPU does.
    numbered = False

    def __init__(self, plan: Layout) -> None:
        self._plan = plan
        #: The devices that are there, broken ones included.
        self._nodes: dict[int, str] = {}
        #: The devices that are not used any more, each with why; and those of which no `poll` has said so.
        self.broken: dict[int, str] = {}
        self._untold: list[int] = []
        #: Device -> why it counts as gone, of those that the last `poll` called gone because they are broken.
        self.reasons: dict[int, str] = {}

    @property
    def nodes(self) -> Mapping[int, str]:
        """The devices that are there, each with its node: Ray's node id, or a prefix of it that no other node has.

        Read at any time. It changes in `poll`, `give_up` and `close` only.
        """
        there = self._nodes
        return {device: there[device] for device in there if device not in self.broken} if self.broken else there

    def give_up(self, device: int, why: str) -> bool:
        """Use the device no more: the next `poll` says that it is gone. False: the job cannot do without it."""
        if device in self.broken:
            return True
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        could_have = min(self._plan.most or math.inf, sum(devices_held(self._plan.bundle, node) for node in nodes))
        if could_have - len(self.broken) - 1 < max(1, int(self._plan.share)):
            return False
        self.broken[device] = why
        if device in self._nodes:
            self._untold.append(device)
        return True

    @property
    def urgent(self) -> bool:
        """Whether a `poll` may find a device at this moment, so that it should not wait until half a second is over."""
        return False

    def poll(self, wait_s: float = 0.0) -> tuple[dict[int, str], list[int]]:
        """What changed since the last call: the devices that came, each with its node, and those that are gone.

        The driver calls it about twice a second, and when a worker has died. A device that was lost and came back in
        between is in both; the caller handles what is gone first. A device that came and was lost in between is in
        neither. It blocks for up to about ``wait_s`` seconds for a first device.

        Raises:
            FluidTuneError: the job cannot go on, because the lender of the devices has refused it.
        """
        came, gone = self._poll(wait_s)
        told, self._untold = self._untold, []
        self.reasons = {device: self.broken[device] for device in told}
        found = {device: node for device, node in came.items() if device not in self.broken}
        gone = [*(device for device in gone if device not in self.broken), *told]
        if not self.numbered:
            # The node of one that is lost is dead: what comes under this number is another device.
            lost = [device for device in self.broken if device not in self._nodes or device in came]
            found |= {device: came[device] for device in lost if device in came}
            for device in lost:
                del self.broken[device]
        return found, gone

    @abstractmethod
    def _poll(self, wait_s: float) -> tuple[dict[int, str], list[int]]:
        """What changed, broken devices included. For the rest see `poll`."""

    #: Of the devices that the last `poll` called gone: those that the source gave back because they were of no use. All
    #: others were lost.
    given_back: Collection[int] = frozenset()

    def leaving(self) -> list[int]:
        """The devices that will be lost soon, each named once; asked after every `poll`. Some may be broken.

        The job then empties them. A source that takes devices away without notice, or never, names none.
        """
        return []

    def revoked(self, device: int, group: Any) -> None:  # noqa: B027 (a source whose `poll` sees it does nothing)
        """The driver has learned from a worker that ``group``, in which the worker was started, is removed.

        The next `poll` says that the device is gone, if it is there with this group. If the device has come back with
        another group meanwhile, nothing changes. Any number is allowed.
        """

    def vacate(self, device: int) -> None:  # noqa: B027 (others keep it until its node dies)
        """The node of a device that is there will be lost soon: give it back as soon as nothing runs on it.

        The driver says so again and again, and empties it.
        """

    @abstractmethod
    def group(self, device: int) -> Any:
        """The placement group of a device that is there."""

    def bundle(self, device: int) -> int:
        """The index of the bundle in the device's placement group in which workers on the device start.

        It is 0, except where a trial asked for several devices of one node: these are bundles of one group.
        """
        return 0

    @abstractmethod
    def close(self) -> None:
        """Give all devices back. The job calls it once, at its end, when it has killed its workers."""

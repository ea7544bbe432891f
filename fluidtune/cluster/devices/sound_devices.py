"""A job's devices without those whose hardware has failed: `SoundDevices`, a `DeviceSource` around another one.

Neither Ray nor an arbiter notices that a GPU fell off the bus. A device that was given back would come again, to this
job or to another one. So the job keeps a broken device until it ends, and uses it no more. A leased one goes back to
the arbiter when that wants it; the GPU keeps its number, and is not used when it is leased again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluidtune.cluster.devices.device_source import DeviceSource


class SoundDevices(DeviceSource):
    """See the module.

    ``broken``: the numbers of the devices that are not used any more; the owner of ``source`` may read it.
    ``numbered``: a number always stands for the same GPU. ``could_have``: how many devices the job could have, broken
    ones included. ``needed``: how many a trial needs.
    """

    def __init__(
        self, source: DeviceSource, broken: set[int], numbered: bool, could_have: Callable[[], float], needed: int
    ) -> None:
        self._source, self._broken = source, broken
        self._numbered, self._could_have, self._needed = numbered, could_have, needed
        self.nodes = source.nodes
        #: Broken devices of which no `poll` has said that they are gone.
        self._untold: dict[int, None] = {}
        #: Device -> why it counts as gone, of those that the last `poll` called gone because they are broken.
        self.reasons: dict[int, str] = {}
        self._why: dict[int, str] = {}

    def give_up(self, device: int, why: str) -> bool:
        """Use the device no more: the next `poll` says that it is gone. False: the job cannot do without it."""
        if device in self._broken:
            return True
        if self._could_have() - len(self._broken) - 1 < self._needed:
            return False
        self._broken.add(device)
        self._why[device] = why
        if device in self._source.nodes:
            self._untold[device] = None
        self._leave_out_broken()
        return True

    def _leave_out_broken(self) -> None:
        self.nodes = self._source.nodes
        if self._broken:
            self.nodes = {device: node for device, node in self.nodes.items() if device not in self._broken}

    @property
    def complete(self) -> bool:
        return self._source.complete

    @property
    def urgent(self) -> bool:
        return self._source.urgent

    def poll(self, wait_s: float = 0.0) -> tuple[dict[int, str], list[int]]:
        came, gone = self._source.poll(wait_s)
        self.given_back = self._source.given_back
        self.reasons = {device: self._why[device] for device in self._untold}
        told = [device for device in self._untold if device not in gone]
        gone = [device for device in gone if device not in self._broken or device in self._untold] + told
        lost = [device for device in self._broken if device not in self._source.nodes or device in came]
        self._untold.clear()
        if not self._numbered:
            # Its node is dead: what comes under this number is another device.
            self._broken.difference_update(lost)
        self._leave_out_broken()
        return {device: node for device, node in came.items() if device not in self._broken}, gone

    def leaving(self) -> list[int]:
        return [device for device in self._source.leaving() if device not in self._broken]

    def revoked(self, device: int, group: Any) -> None:
        self._source.revoked(device, group)

    def vacate(self, device: int) -> None:
        self._source.vacate(device)

    def group(self, device: int) -> Any:
        return self._source.group(device)

    def bundle(self, device: int) -> int:
        return self._source.bundle(device)

    def close(self) -> None:
        self._source.close()
        self._leave_out_broken()

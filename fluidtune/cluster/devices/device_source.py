"""What holds a job's devices.

A job asks one `DeviceSource` which devices it has. `OnDemandDevices` holds devices of the job's own while its trials
use them, `Reservation` for the whole run. `LeasedDevices` holds leases of the arbiter, which come and go.
`SoundDevices` is around one of them and leaves broken devices out. `tests.contracts.device_sources` is this contract
as tests: the test file of a new source is a fixture and an import.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any


class DeviceSource(ABC):
    """The devices of one job. Only the driver's main thread calls it.

    Devices are numbered from 0; the same physical device has the same number each time that it comes. A device is
    *there* while the job may start workers on it.
    """

    #: The devices that are there, each with its node: Ray's node id, or a prefix of it that no other node has. Read at
    #: any time. It changes in `poll` and `close` only.
    nodes: Mapping[int, str]

    @property
    def complete(self) -> bool:
        """Whether no device can come until a worker dies; `poll`, which may cost calls to Ray, can wait until then."""
        return False

    @property
    def urgent(self) -> bool:
        """Whether a `poll` may find a device at this moment, so that it should not wait until half a second is over."""
        return False

    @abstractmethod
    def poll(self, wait_s: float = 0.0) -> tuple[dict[int, str], list[int]]:
        """What changed since the last call: the devices that came, each with its node, and those that are gone.

        The driver calls it about twice a second while the source is not `complete`, and when a worker has died. A
        device that was lost and came back in between is in both; the caller handles what is gone first. A device that
        came and was lost in between is in neither. It blocks for up to about ``wait_s`` seconds for a first device.

        Raises:
            FluidTuneError: the job cannot go on, because the lender of the devices has refused it.
        """

    #: Of the devices that the last `poll` called gone: those that the source gave back because they were of no use. All
    #: others were lost.
    given_back: Collection[int] = frozenset()

    def leaving(self) -> list[int]:
        """The devices that are there and will be lost soon, each named once; asked after every `poll`.

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

"""A tuning job on a shared cluster: its devices are leases of the Themis arbiter.

`LeasedDevices` is the job's `DeviceSource`: devices come and go as leases do. themis_bridge decides which job gets
which lease; the engine decides which trial leaves a device, and how.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fluidtune.cluster.devices.device_source import DeviceSource
from fluidtune.cluster.devices.holding import SPARE_S
from fluidtune.cluster.devices.layout import Layout
from fluidtune.device_kinds import KINDS
from fluidtune.errors import FluidTuneError
from themis_bridge import ThemisError
from themis_bridge.agent import Gained, Leave, Work
from themis_bridge.locality import Gpu, check_together, cut_in_gangs
from themis_bridge.shell.tenant import Tenant


class JobWork(Work, Protocol):
    """The work of the job: what the arbiter asks of it, and what the job's devices are told and ask."""

    def update(self, where: dict[int, Gpu], now: float) -> None:
        """Take over what is known now, in seconds of a clock. ``where``: each device's GPU."""

    @property
    def useful(self) -> int:
        """The most devices that the job's trials could use now."""
        ...


class LeasedDevices(DeviceSource):
    """Its devices are leases of the arbiter. A lease that is over counts as lost.

    ``in_use``: whether anything runs on a device. ``tenant``: a `Tenant` that has the job's name and user already.

    Raises:
        FluidTuneError: a device of this job is not one whole GPU (or core), a trial needs more at once than
            a gang has, or the arbiter refuses the job, for example because it has an app of that name.
    """

    numbered = True

    def __init__(self, plan: Layout, progress: JobWork, in_use: Callable[[int], bool], tenant: Callable[..., Tenant]):
        super().__init__(plan)
        unit = KINDS[plan.kind].resource
        if plan.bundle.get(unit) != 1.0:
            raise FluidTuneError(
                f"a trial asks for {plan.bundle.get(unit, 0):g} {unit}s for one device; the arbiter leases "
                f"single ones: ask for 1 {unit} per trial, or run without arbiter"
            )
        self._together = max(1, int(plan.share))
        try:
            check_together(self._together)
        except ThemisError as error:
            raise FluidTuneError(f"a trial asks for {error}, or run without arbiter") from error
        self._progress, self._in_use = progress, in_use
        try:
            self._tenant = tenant(work=progress, bundle=plan.bundle, unit=unit, together=self._together)
        except ThemisError as error:
            raise FluidTuneError(str(error)) from error
        #: Device -> its lease, of all that are there.
        self._leases: dict[int, Gained] = {}
        #: GPU -> its device number, which it keeps: the same GPU may come back under another lease.
        self._numbers: dict[str, int] = {}
        #: Devices whose leases end and are not renewed -> whether `leaving` has named them.
        self._ending: dict[int, bool] = {}
        #: Device -> the placement group of its lease, from the first time that `group` was asked for it.
        self._groups: dict[int, Any] = {}
        #: Devices whose placement group a worker found removed.
        self._revoked: set[int] = set()
        #: Device -> the time since which the job has had no use for it.
        self._spare: dict[int, float] = {}

    def group(self, device: int) -> Any:
        if device not in self._groups:
            self._groups[device] = self._tenant.group(self._leases[device])
        return self._groups[device]

    def leaving(self) -> list[int]:
        """The devices whose leases end soon, each once."""
        new = [device for device, named in self._ending.items() if not named]
        self._ending.update(dict.fromkeys(new, True))
        return new

    def revoked(self, device: int, group: Any) -> None:
        """The device's lease is over, even if the arbiter's message has not come yet."""
        if device in self._groups and self._groups[device] == group:
            self._revoked.add(device)

    def _poll(self, wait_s: float) -> tuple[dict[int, str], list[int]]:
        """A device whose lease is not renewed is gone as soon as nothing runs on it.

        Raises:
            FluidTuneError: the arbiter has refused this job.
        """
        deadline = time.monotonic() + wait_s
        came: dict[int, str] = {}
        gone: list[int] = []
        while True:
            self._take_notices(came, gone)
            now = time.monotonic()
            self._progress.update({device: lease.gpu for device, lease in self._leases.items()}, now)
            self._give_back(came, gone, now)
            if came or now >= deadline:
                return came, gone
            time.sleep(0.05)

    def _take_notices(self, came: dict[int, str], gone: list[int]) -> None:
        try:
            notices = self._tenant.poll()
        except ThemisError as error:
            raise FluidTuneError(str(error)) from error
        for notice in notices:
            if isinstance(notice, Gained):
                device = self._numbers.setdefault(notice.gpu.id, len(self._numbers))
                self._leases[device] = notice
                self._groups.pop(device, None)
                self._revoked.discard(device)
                came[device] = self._nodes[device] = notice.gpu.machine
                continue
            device = self._numbers.get(notice.gpu.id, -1)  # type: ignore[attr-defined]
            lease = self._leases.get(device)
            if lease is None or lease.token != notice.token:  # type: ignore[attr-defined]
                continue
            if isinstance(notice, Leave):
                self._ending.setdefault(device, False)
            else:
                self._drop(device, came, gone)
        for device in sorted(self._revoked):
            self._leave(device, came, gone)

    def _give_back(self, came: dict[int, str], gone: list[int], now: float) -> None:
        """Give back devices that end and are empty, and devices that the job has had no use for."""
        idle = [device for device in self._leases if device not in came and not self._in_use(device)]
        loose = self._loose(idle)
        surplus = max(0, len(self._leases) - len(loose) - max(1, self._progress.useful))
        surplus -= surplus % self._together
        self._spare = {device: self._spare.get(device, now) for device in idle if surplus or device in loose}
        # A gang lies on one node, and what is left of it would be of no use.
        nodes = self._nodes if self._together > 1 else {}
        for device in sorted(idle, key=lambda device: (device not in loose, nodes.get(device, ""), -device)):
            useless = surplus > 0 or device in loose
            over = useless and now - self._spare.get(device, now) >= SPARE_S
            if over or self._ending.get(device):
                self._leave(device, came, gone)
                surplus -= device not in loose

    def _loose(self, idle: Sequence[int]) -> set[int]:
        """Of these idle devices, those that are part of no whole gang, if the rest of it is not on its way."""
        if self._together == 1 or self._tenant.expects:
            return set()
        # Those in use come first, and so make the gangs.
        order = [*(device for device in self._nodes if device not in idle), *idle]
        _, torn = cut_in_gangs({device: self._nodes[device] for device in order}, self._together)
        return set(torn) & set(idle)

    def _leave(self, device: int, came: dict[int, str], gone: list[int]) -> None:
        lease = self._leases[device]
        self._tenant.vacated(lease.gpu.id, lease.token)
        self._drop(device, came, gone)

    def _drop(self, device: int, came: dict[int, str], gone: list[int]) -> None:
        if came.pop(device, None) is None:
            gone.append(device)
        self._ending.pop(device, None)
        self._groups.pop(device, None)
        self._revoked.discard(device)
        del self._leases[device], self._nodes[device]

    def close(self) -> None:
        self._nodes.clear()
        self._leases.clear()
        self._groups.clear()
        self._tenant.close()

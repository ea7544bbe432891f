"""Devices that a service leases from the Themis arbiter, as a `service_devices.Source`.

`watching` says how many the load wants, and themis_bridge which app gets a lease. All times are seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from fluidtune.serving.service_devices import Came, Gone, Leaves, Notice, SourceLost
from symphony_serve.errors import ServeError
from themis_bridge import ThemisError
from themis_bridge.agent import Gained, Leave
from themis_bridge.messages import Report
from themis_bridge.shell.tenant import Tenant


@dataclass(frozen=True)
class Leasing:
    """How a service leases devices.

    app: its name at the arbiter. user: whose it is; "": it is the only app of its user. unit: "GPU" or "CPU".
    most: how many devices it may hold; None: any number.
    """

    app: str
    user: str
    unit: str
    most: int | None


class ModelLeases:
    """The leases of a service, which are named by GPU and token. It is the agent's `themis_bridge.agent.Work`, too.

    tell: is called with an event and its fields when a lease comes or goes. tenant: another one in tests.

    Raises ServeError if the arbiter refuses the service, for example because another app has its name.
    """

    least = 1

    def __init__(self, leasing: Leasing, tell: Callable[..., None], tenant: Callable[..., Tenant] = Tenant):
        self._leasing, self.tell, self._wants = leasing, tell, 1
        self.waits = f"waiting for a lease of a {leasing.unit}"
        try:
            self._tenant = tenant(leasing.app, self, {leasing.unit: 1.0}, leasing.unit, leasing.user)
        except ThemisError as error:
            raise ServeError(str(error)) from error

    def report(self) -> Report:
        """What the agent asks, in its own thread."""
        return Report(endless=self._wants)

    def wanted(self, load: int) -> int:
        self._wants = max(1, load if self._leasing.most is None else min(load, self._leasing.most))
        return self._wants

    async def poll(self) -> Sequence[Notice]:
        try:
            notices = self._tenant.poll()
        except ThemisError as error:
            raise SourceLost(str(error)) from error
        found: list[Notice] = []
        for one in notices:
            lease = one.gpu.id, one.token
            if isinstance(one, Gained):
                found.append(Came(lease, self._tenant.group(one), one.gpu.machine))
            else:
                found.append(Leaves(lease, one.within) if isinstance(one, Leave) else Gone(lease))
        return found

    def vacated(self, device: Hashable) -> None:
        self._tenant.vacated(*device)  # type: ignore[misc]

    async def close(self) -> None:
        """Give all leases back and leave the arbiter."""
        await asyncio.to_thread(self._tenant.close)

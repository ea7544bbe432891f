"""A job's own devices keep the contract of a device source, on a stand-in for Ray's placement groups."""

from __future__ import annotations

from typing import Any

import pytest

from fluidtune.cluster.devices import reservation
from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.devices.reservation import Reservation
from tests.contracts.device_sources import DeviceSourceCase, DeviceSourceContract


class Group:
    """A placement group: Ray's state of it and its node."""

    def __init__(self) -> None:
        self.state, self.node = "PENDING", ""

    def wait(self, timeout_seconds: float) -> bool:
        return self.state == "CREATED"


class ReservationCase(DeviceSourceCase):
    """Two devices. ``_groups``: every group that was made, in the order of the devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._groups: list[Group] = []
        self._nodes: list[dict[str, Any]] = []
        for name, stand_in in {
            "placement_group": self._make,
            "placement_group_table": self._table,
            "remove_placement_group": self._remove,
        }.items():
            monkeypatch.setattr(reservation, name, stand_in)
        monkeypatch.setattr(reservation.ray, "nodes", lambda: self._nodes)
        self.source = Reservation("job", Layout("cpu", 2, {"CPU": 1.0}, 1.0, 1, {"CPU": 1.0}))

    def _make(self, bundles: Any, strategy: str, name: str) -> Group:
        self._groups.append(Group())
        return self._groups[-1]

    def _table(self, group: Group) -> dict[str, Any]:
        return {"state": group.state, "bundles_to_node_id": {0: group.node} if group.node else {}}

    def _remove(self, group: Group) -> None:
        group.state, group.node = "REMOVED", ""

    def bring(self, device: int) -> None:
        node = f"node-{len(self._nodes)}"
        self._nodes.append({"NodeID": node, "Alive": True})
        self._groups[device].state, self._groups[device].node = "CREATED", node

    def take_away(self, device: int) -> None:
        # Ray says that a node is dead before it reschedules what was on it.
        next(node for node in self._nodes if node["NodeID"] == self._groups[device].node)["Alive"] = False

    def remove_group(self, device: int) -> None:
        self._remove(self._groups[device])

    def held(self) -> int:
        return sum(group.state != "REMOVED" for group in self._groups)


class TestReservation(DeviceSourceContract):
    @pytest.fixture
    def case(self, monkeypatch: pytest.MonkeyPatch) -> ReservationCase:
        return ReservationCase(monkeypatch)

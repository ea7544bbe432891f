"""A job's own devices, held for the whole run, each by a placement group: `Reservation`, a `DeviceSource`."""

from __future__ import annotations

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from fluidtune.cluster.devices.device_source import DeviceSource
from fluidtune.cluster.devices.layout import Layout

#: Seconds that a job's start waits for each further device once the first is there.
OTHER_GROUPS_WAIT_S = 0.1


class Reservation(DeviceSource):
    """It reserves every device with a placement group for the whole run. ``plan.most`` must be known.

    A device is there when its group has been created on a living node.
    """

    def __init__(self, job: str, plan: Layout):
        assert plan.most is not None, "a job that reserves its devices knows how many they are"
        #: Every device's placement group, whether the device is there or not.
        self._groups: dict[int, PlacementGroup] = {
            device: placement_group([dict(plan.bundle)], strategy="PACK", name=f"fluidtune-{job}-{device}")
            for device in range(plan.most)
        }
        self.nodes: dict[int, str] = {}

    def group(self, device: int) -> PlacementGroup:
        return self._groups[device]

    @property
    def complete(self) -> bool:
        return len(self.nodes) == len(self._groups)

    def poll(self, wait_s: float = 0.0) -> tuple[dict[int, str], list[int]]:
        if wait_s:
            self._wait(wait_s)
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        came, gone = {}, []
        for device, group in self._groups.items():
            table = placement_group_table(group)
            node = next(iter(table.get("bundles_to_node_id", {}).values()), "")
            there = table.get("state") == "CREATED" and node in alive
            known = self.nodes.get(device)
            if known is not None and (not there or node != known):
                gone.append(device)
                del self.nodes[device]
                known = None
            if there and known is None:
                came[device] = self.nodes[device] = node
        return came, gone

    def _wait(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` seconds for the first group; Ray mostly creates the others at the same moment."""
        for group in self._groups.values():
            if not group.wait(wait_s):
                break
            wait_s = OTHER_GROUPS_WAIT_S

    def close(self) -> None:
        # Ray kills what still runs inside a group.
        groups, self._groups = self._groups, {}
        self.nodes.clear()
        for group in groups.values():
            remove_placement_group(group)

"""A job's own devices, held while its trials use them or wait for them: `OnDemandDevices`, a `DeviceSource`.

Each unit of devices (`holding`) is one placement group, with a bundle for each device. What to ask for and what to give
back is decided there. This module asks Ray. A job that reserves its devices has use for all of them all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from fluidtune.cluster.devices.device_source import DeviceSource
from fluidtune.cluster.devices.holding import Holding, Orders, Unit
from fluidtune.cluster.devices.layout import Layout, devices_held
from fluidtune.engine import DeviceDemand
from fluidtune.ray_compat.cluster_state import ClusterState, cluster_state

#: Seconds between two looks after groups that were asked for a moment ago, and how long a moment is. Ray makes a group
#: in some milliseconds where there is room.
SOON_S, MOMENT_S = 0.05, 1.0
#: Seconds that a poll waits for all groups that it has just asked for. Ray makes one in 1 to 5 ms.
JUST_ASKED_WAIT_S = 0.02
#: Seconds that it waits where the cluster says that it has room for them. Otherwise trials that may share a device
#: would share the first one that comes.
ROOM_WAIT_S = 0.5
#: After a wait in vain, no poll waits for new groups for this multiple of its seconds. The driver then stands still for
#: at most 4 % of its time.
IN_VAIN = 25.0
#: Seconds that the idle workers of a device that is given back may take to end.
END_S = 10.0
#: The most groups that one poll asks Ray about, in turn. Each costs about 0.4 ms.
LOOKS = 32


@dataclass(frozen=True)
class Uses:
    """What the job does with its devices.

    ``demand``: what its trials could use; it is called with the number of further devices for which growth is worth a
    thought. ``waiting``: how many trials wait. ``in_use``: whether something of the job runs on a device.
    ``known``: whether the job has been told of a device. ``has_workers``: whether processes of the job live on a device
    of which the job was told that it is gone.
    """

    demand: Callable[[int], DeviceDemand]
    waiting: Callable[[], int]
    in_use: Callable[[int], bool]
    known: Callable[[int], bool]
    has_workers: Callable[[int], bool]


class OnDemandDevices(DeviceSource):
    """See the module. ``job``: the job's name. ``most_asked``: see `Holding`."""

    def __init__(self, job: str, plan: Layout, uses: Uses, most_asked: int):
        super().__init__(plan)
        self._job, self._bundle, self._uses = job, dict(plan.bundle), uses
        self._holding = Holding(plan.most, most_asked)
        self._groups: dict[Unit, PlacementGroup] = {}
        self._unit_of: dict[int, Unit] = {}
        #: How many groups were asked for so far. It is part of the next one's name, because Ray wants names to differ.
        self._asked = 0
        #: Devices that will be given back and that `leaving` has not named.
        self._leave: list[int] = []
        #: Units that were given back and whose workers are ending -> when their groups are removed in any case.
        self._ending: dict[Unit, float] = {}
        #: Units whose groups a worker found removed.
        self._revoked: set[Unit] = set()
        #: The fewest trials that waited at a time since the last poll.
        self._waited = 0
        #: When devices were polled last, and from when on a poll waits for new groups.
        self._polled = self._patient_from = float("-inf")
        #: Since when the oldest group that has not been made is asked for; infinity: there is none.
        self._oldest = float("inf")
        #: Among the groups that are asked for, the first one to ask Ray about at the next poll.
        self._next_look = 0

    @property
    def urgent(self) -> bool:
        """Whether further trials wait, or a group that was just asked for may have been made.

        While a group waits for longer than a moment, the cluster has no room, and nothing is urgent.
        """
        now, waiting = time.monotonic(), self._uses.waiting()
        self._waited, more = min(waiting, self._waited), waiting > self._waited
        if self._oldest <= now - MOMENT_S:
            return False
        return more or (self._oldest <= now and now - self._polled >= SOON_S)

    def group(self, device: int) -> PlacementGroup:
        return self._groups[self._unit_of[device]]

    def bundle(self, device: int) -> int:
        return self._unit_of[device].devices.index(device)

    def leaving(self) -> list[int]:
        leave, self._leave = [device for device in self._leave if device in self._nodes], []
        return leave

    def revoked(self, device: int, group: PlacementGroup) -> None:
        unit = self._unit_of.get(device)
        if unit is not None and unit not in self._ending and self._groups[unit] == group:
            self._revoked.add(unit)

    def vacate(self, device: int) -> None:
        self._holding.vacate(self._unit_of[device])

    def _poll(self, wait_s: float) -> tuple[dict[int, str], list[int]]:
        came: dict[int, str] = {}
        gone: list[int] = []
        returned: set[int] = set()
        began = time.monotonic()
        self._look(came, gone)
        orders = self._decide(began, came)
        self._carry_out(orders, came, gone, returned)
        asked = self._holding.asked()
        made = bool(asked) and not came and wait_s > 0 and self._groups[asked[0]].wait(wait_s)
        if self._await_just_asked(orders.ask) or made:
            self._look(came, gone)
        self._polled, self._waited = time.monotonic(), self._uses.waiting()
        self._oldest = min((unit.asked for unit in self._holding.asked()), default=float("inf"))
        self.given_back = frozenset(returned)
        return came, gone

    def _decide(self, now: float, came: Mapping[int, str]) -> Orders:
        def in_use(device: int) -> bool:
            # A device that the job has yet to hear of is there for a trial that waits.
            return device not in came and self._uses.known(device) and self._uses.in_use(device)

        demand = self._uses.demand(1)
        state = None
        if demand.growing or demand.grown:
            # Only growth depends on the state of the cluster, and Ray takes a millisecond to tell it.
            state = cluster_state([group.id.hex() for group in self._groups.values()])
        room = self._room(state)
        if demand.growing:
            demand = self._uses.demand(room + sum(1 for device in self._nodes if not in_use(device)))
        return self._holding.decide(now, demand, in_use, room, self._others(state))

    # --- what Ray says

    def _look(self, came: dict[int, str], gone: list[int]) -> None:
        """Note which groups have been made, and which are gone."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for unit in self._holding.units:
            if unit.there and self._nodes[unit.devices[0]] not in alive:
                self._leave_node(unit, came, gone)
                self._holding.lost(unit, time.monotonic())
        asked = self._holding.asked()
        first = self._next_look if self._next_look < len(asked) else 0
        self._next_look = first + LOOKS
        revoked = [unit for unit in self._revoked if unit.there]
        self._revoked.clear()
        for unit in (*revoked, *asked[first : self._next_look]):
            self._look_at(unit, alive, came, gone)

    def _look_at(self, unit: Unit, alive: set[str], came: dict[int, str], gone: list[int]) -> None:
        table = placement_group_table(self._groups[unit])
        node = next(iter(table.get("bundles_to_node_id", {}).values()), "")
        if table.get("state") == "REMOVED":
            if unit.there:
                self._leave_node(unit, came, gone)
            self._holding.forget(unit)
            self._remove(unit)
        elif table.get("state") == "CREATED" and node in alive and not unit.there:
            self._holding.came(unit)
            for device in unit.devices:
                came[device] = self._nodes[device] = node

    def _leave_node(self, unit: Unit, came: dict[int, str], gone: list[int]) -> None:
        """The devices of the unit are not there any more."""
        for device in unit.devices:
            del self._nodes[device]
            if came.pop(device, None) is None:
                gone.append(device)

    def _room(self, state: ClusterState | None) -> int:
        """How many further devices the cluster has free."""
        return 0 if state is None else sum(devices_held(self._bundle, free) for _, free in state.nodes)

    def _others(self, state: ClusterState | None) -> int:
        """How many requests of others wait that a node could serve and that need something of what a device holds."""
        if state is None:
            return 0
        waiting = [{name: amount for name, amount in request.items() if amount} for request in state.waiting]
        similar = [request for request in waiting if not self._bundle.keys().isdisjoint(request)]
        return sum(1 for request in similar if any(devices_held(request, total) for total, _ in state.nodes))

    # --- what Ray is asked

    def _carry_out(self, orders: Orders, came: dict[int, str], gone: list[int], returned: set[int]) -> None:
        for unit in orders.drop:
            if unit.there:
                returned.update(unit.devices)
                self._leave_node(unit, came, gone)
                overdue = any(map(self._uses.in_use, unit.devices)) and unit.leaving_since is not None
                self._ending[unit] = time.monotonic() + (0.0 if overdue else END_S)
            else:
                self._remove(unit)
        self._remove_ended()
        for unit in orders.ask:
            self._asked += 1
            self._groups[unit] = placement_group(
                [dict(self._bundle) for _ in unit.devices],
                strategy="PACK" if len(unit.devices) == 1 else "STRICT_PACK",
                name=f"fluidtune-{self._job}-{self._asked}",
            )
            self._unit_of.update(dict.fromkeys(unit.devices, unit))
        self._leave += orders.leave

    def _remove_ended(self) -> None:
        """Remove the groups of units that were given back and in which no worker lives any more.

        Ray kills what still lives in a group that is removed, and a process that is killed runs no exit handlers.
        """
        for unit, deadline in list(self._ending.items()):
            if time.monotonic() >= deadline or not any(map(self._uses.has_workers, unit.devices)):
                del self._ending[unit]
                self._holding.ended(unit)
                self._remove(unit)

    def _remove(self, unit: Unit) -> None:
        remove_placement_group(self._groups.pop(unit))
        for device in unit.devices:
            if self._unit_of.get(device) is unit:
                del self._unit_of[device]

    def _await_just_asked(self, asked: list[Unit]) -> bool:
        """Wait a moment for groups that were just asked for. Returns whether it is worth to look after them."""
        began = time.monotonic()
        if not asked or began < self._patient_from:
            return False
        for made, unit in enumerate(asked):
            if self._await_group(unit, began + JUST_ASKED_WAIT_S):
                continue
            if not self._has_room_for(unit, asked[:made]) or not self._await_group(unit, began + ROOM_WAIT_S):
                ended = time.monotonic()
                self._patient_from = ended + IN_VAIN * (ended - began)
                break
        return True

    def _await_group(self, unit: Unit, until: float) -> bool:
        made: bool = self._groups[unit].wait(max(0.001, until - time.monotonic()))
        return made

    def _has_room_for(self, unit: Unit, made: list[Unit]) -> bool:
        """Whether the cluster says that it has. ``made``: new units that it may not have counted as taken yet."""
        state = cluster_state([group.id.hex() for group in self._groups.values()])
        if state is None:
            return False
        taken = len(self._nodes) + sum(len(other.devices) for other in (*made, *self._holding.ending))
        total = sum(devices_held(self._bundle, has) for has, _ in state.nodes)
        free = max((devices_held(self._bundle, free) for _, free in state.nodes), default=0)
        return min(total - taken, free) >= len(unit.devices)

    def close(self) -> None:
        # Ray kills what still runs inside a group.
        groups, self._groups = self._groups, {}
        self._nodes.clear()
        self._unit_of.clear()
        self._ending.clear()
        self._holding.units.clear()
        for group in groups.values():
            remove_placement_group(group)

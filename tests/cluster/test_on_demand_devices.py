"""Devices on demand keep the contract of a device source, and are asked of Ray and given back as `holding` decides."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.devices import on_demand_devices
from fluidtune.cluster.devices.holding import LEAVE_S, SPARE_S, YIELD_AFTER_S
from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.devices.on_demand_devices import OnDemandDevices, Uses
from fluidtune.engine import DeviceDemand
from fluidtune.ray_compat.cluster_state import ClusterState
from tests.contracts.device_sources import DeviceSourceCase, DeviceSourceContract

PLAN = Layout("cpu", None, {"CPU": 1.0}, 1.0, 1, {"CPU": 1.0})


class Group:
    """A placement group: its bundles, and on which node Ray has made it, "" while it is asked for."""

    def __init__(self, bundles: list[dict[str, float]], strategy: str, name: str, wait: Any) -> None:
        self.bundles, self.strategy, self.name = bundles, strategy, name
        self._wait = wait
        self.node, self.removed = "", False
        self.id = SimpleNamespace(hex=lambda: name)

    def wait(self, timeout_seconds: float) -> bool:
        if not self.node:
            self._wait(timeout_seconds)
        return bool(self.node) and not self.removed


class Cluster:
    """A stand-in for Ray.

    ``free``: names of nodes on which the next groups are made, one each. ``slow``: when they are made, if not at once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[Group] = []
        self.free: list[str] = []
        self.nodes: dict[str, bool] = {}
        self.now = 0.0
        self.state = ClusterState([], [])
        self.slow = 0.0
        for name, stand_in in {
            "placement_group": self._make,
            "placement_group_table": self._table,
            "remove_placement_group": self._remove,
            "cluster_state": lambda but: self.state,
            "time": SimpleNamespace(monotonic=lambda: self.now),
        }.items():
            monkeypatch.setattr(on_demand_devices, name, stand_in)
        monkeypatch.setattr(
            on_demand_devices.ray,
            "nodes",
            lambda: [{"NodeID": node, "Alive": alive, "Resources": {"CPU": 1}} for node, alive in self.nodes.items()],
        )

    def _make(self, bundles: Any, strategy: str, name: str) -> Group:
        assert name not in [group.name for group in self.groups], "Ray wants a name of its own for each group"
        self.groups.append(Group(bundles, strategy, name, self._wait))
        if not self.slow:
            self.place()
        return self.groups[-1]

    def _wait(self, seconds: float) -> None:
        if self.slow:
            self.now = min(self.now + seconds, max(self.now, self.slow) if self.free else float("inf"))
            if self.now >= self.slow:
                self.place()

    def place(self) -> None:
        """Make the groups that there are free nodes for."""
        for group in self.asked():
            if self.free:
                group.node = self.free.pop(0)
                self.nodes[group.node] = True

    def _table(self, group: Group) -> dict[str, Any]:
        state = "REMOVED" if group.removed else "CREATED" if group.node else "PENDING"
        return {"state": state, "bundles_to_node_id": {0: group.node} if group.node else {}}

    def _remove(self, group: Group) -> None:
        group.removed = True

    def asked(self) -> list[Group]:
        return [group for group in self.groups if not group.node and not group.removed]

    def held(self) -> list[Group]:
        return [group for group in self.groups if not group.removed]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


class Job:
    """What a job would do with its devices: ``waiting`` trials, and the devices in ``used``."""

    def __init__(self, plan: Layout = PLAN, most_asked: int = 100) -> None:
        self.demand = DeviceDemand()
        self.waiting = 0
        self.used: set[int] = set()
        self.heard: set[int] = set()
        self.workers: set[int] = set()
        uses = Uses(
            lambda room: self.demand,
            lambda: self.waiting,
            self.used.__contains__,
            self.heard.__contains__,
            self.workers.__contains__,
        )
        self.source = OnDemandDevices("job", plan, uses, most_asked)

    def poll(self) -> tuple[dict[int, str], list[int]]:
        came, gone = self.source.poll()
        self.heard -= set(gone)
        self.heard |= set(came)
        return came, gone

    def wait(self, trials: int, size: int = 1) -> None:
        self.waiting = trials
        self.demand = DeviceDemand({size: trials} if trials else {})


class OnDemandCase(DeviceSourceCase):
    """Two trials wait all the time. Device 0 is the first group's, and so on. ``share``: see `Layout`."""

    def __init__(self, cluster: Cluster, share: float = 1.0) -> None:
        self._cluster, self._brought = cluster, 0
        self._job = Job(replace(PLAN, share=share))
        self._job.wait(2)
        self.source = self._job.source

    def bring(self, device: int) -> None:
        self._brought += 1
        node = f"node-{self._brought}"
        groups = self._cluster.held()
        self._cluster.nodes[node] = True
        if device < len(groups):
            groups[device].node = node
        else:
            self._cluster.free.append(node)

    def take_away(self, device: int) -> None:
        groups = self._cluster.held()
        node = groups[device].node if device < len(groups) else self._cluster.free[device]
        self._cluster.nodes[node] = False
        self._cluster.place = lambda: self._dead(node)  # type: ignore[method-assign]

    def _dead(self, node: str) -> None:
        """Ray has made the group just before the node died."""
        for group in self._cluster.asked():
            group.node = node

    def remove_group(self, device: int) -> None:
        self._cluster.held()[device].removed = True

    def held(self) -> int:
        return len(self._cluster.held())


class TestOnDemandDevices(DeviceSourceContract):
    @pytest.fixture
    def case(self, cluster: Cluster) -> OnDemandCase:
        return OnDemandCase(cluster)


def test_the_group_of_a_device_that_is_given_back_stays_until_its_worker_has_ended_or_its_time_is_over(
    cluster: Cluster,
) -> None:
    cluster.free = ["n", "m"]
    job = Job()
    for trials in (1, 0):
        job.wait(trials)
        job.poll()
        job.workers.add(0)
    cluster.now += SPARE_S
    assert job.poll() == ({}, [0]) and len(cluster.held()) == 1
    job.wait(1)
    assert job.poll() == ({1: "m"}, []), "the number is not free before"
    cluster.now += on_demand_devices.END_S - 0.1
    job.poll()
    assert len(cluster.held()) == 2
    cluster.now += 0.1
    job.poll()
    assert [group.node for group in cluster.held()] == ["m"], "a worker that does not end is killed with its group"
    job.workers.add(1)
    job.wait(0)
    job.poll()
    cluster.now += SPARE_S
    assert job.poll() == ({}, [1]) and len(cluster.held()) == 1
    job.workers.clear()
    job.poll()
    assert cluster.held() == []


@pytest.mark.parametrize("free, came", [(2.0, {0: "n", 1: "n"}), (0.0, {})])
def test_a_poll_waits_for_groups_that_ray_makes_late_if_the_cluster_has_room(
    cluster: Cluster, free: float, came: dict[int, str]
) -> None:
    cluster.free, cluster.slow = ["n"] * 2, 0.2
    cluster.state = ClusterState([({"CPU": 2.0}, {"CPU": free})], [])
    job = Job()
    job.wait(2)
    assert job.poll() == (came, [])
    assert cluster.now <= (0.2 if came else on_demand_devices.JUST_ASKED_WAIT_S)


def test_a_poll_does_not_wait_for_what_the_jobs_new_devices_leave_no_room_for(cluster: Cluster) -> None:
    # Ray still says that a core is free which it has just given.
    cluster.free, cluster.slow = ["n"] * 2, 0.01
    cluster.state = ClusterState([({"CPU": 2.0}, {"CPU": 1.0})], [])
    job = Job()
    job.wait(3)
    assert job.poll() == ({0: "n", 1: "n"}, []) and cluster.now == on_demand_devices.JUST_ASKED_WAIT_S
    waited, cluster.free = cluster.now, ["n"]
    job.wait(4)
    assert job.poll() == ({}, []) and cluster.now == waited, "a wait in vain is not repeated at once"


def test_a_trial_of_several_devices_gets_them_on_one_node(cluster: Cluster) -> None:
    cluster.free = ["n"]
    job = Job(Layout("gpu", None, {"GPU": 1.0}, 2.0, 1, {"GPU": 1.0}))
    job.wait(1, size=2)
    assert job.poll() == ({0: "n", 1: "n"}, [])
    assert cluster.groups[0].strategy == "STRICT_PACK" and len(cluster.groups[0].bundles) == 2
    assert [job.source.bundle(device) for device in (0, 1)] == [0, 1]
    job.wait(0)
    job.poll()
    cluster.now += SPARE_S
    assert job.poll() == ({}, [0, 1]) and cluster.held() == []


def test_a_poll_is_urgent_when_further_trials_wait_and_while_a_new_group_may_come(cluster: Cluster) -> None:
    job = Job()
    job.poll()
    assert not job.source.urgent
    job.wait(1)
    assert job.source.urgent
    job.poll()
    assert not job.source.urgent, "Ray has just been asked"
    cluster.now += on_demand_devices.SOON_S
    assert job.source.urgent
    cluster.now += on_demand_devices.MOMENT_S
    assert not job.source.urgent, "there is no room for the group now"
    job.wait(2)
    assert not job.source.urgent, "nor for another one"
    cluster.free = ["n"] * 2
    cluster.place()
    job.poll()
    job.poll()
    job.wait(3)
    assert job.source.urgent


@pytest.mark.parametrize(
    "request_, held",
    [({"CPU": 1.0}, 0), ({"CPU": 0.5, "GPU": 0.0}, 0), ({"GPU": 1.0}, 2), ({"CPU": 64.0}, 2), ({}, 2)],
)
def test_nothing_grows_while_others_wait_for_what_it_would_take(
    cluster: Cluster, request_: dict[str, float], held: int
) -> None:
    job = Job()
    job.demand = DeviceDemand({}, growing=2)
    cluster.free = ["n"] * 2
    cluster.state = ClusterState([({"CPU": 4.0}, {"CPU": 2.0})], [request_])
    job.poll()
    assert len(cluster.held()) == held


def test_a_trial_that_does_not_shrink_for_others_loses_the_device_after_a_while(cluster: Cluster) -> None:
    cluster.free = ["n"] * 2
    job = Job()
    job.wait(2)
    job.poll()
    job.used |= {0, 1}
    job.waiting, job.demand = 0, DeviceDemand({}, grown=(1,))
    cluster.state = ClusterState([({"CPU": 2.0}, {})], [{"CPU": 1.0}])
    job.poll()
    cluster.now += YIELD_AFTER_S
    job.poll()
    assert job.source.leaving() == [1]
    cluster.now += LEAVE_S - 0.1
    assert job.poll() == ({}, [])
    cluster.now += 0.1
    assert job.poll() == ({}, [1])


def test_a_job_whose_ray_cannot_be_asked_does_not_grow(cluster: Cluster) -> None:
    cluster.free = ["n"]
    cluster.state = None  # type: ignore[assignment]
    job = Job()
    job.demand = DeviceDemand({}, growing=2)
    job.poll()
    assert cluster.groups == []


def two_devices(cluster: Cluster, share: float = 1.0) -> OnDemandCase:
    """They are there."""
    case = OnDemandCase(cluster, share)
    case.bring(0)
    case.bring(1)
    case.source.poll()
    return case


def test_a_broken_device_is_gone_once_for_its_reason_and_stays_reserved(cluster: Cluster) -> None:
    case = two_devices(cluster)
    assert case.source.give_up(0, "fell off the bus") and case.source.give_up(0, "said again")
    assert set(case.source.nodes) == {1}
    assert case.source.poll() == ({}, [0]) and case.source.reasons == {0: "fell off the bus"}
    assert case.source.poll() == ({}, []) and case.source.reasons == {}
    assert case.held() == 2, "nobody else gets it either"


@pytest.mark.parametrize(("share", "left"), [(1.0, {0}), (2.0, {0, 1})])
def test_a_broken_device_that_each_trial_needs_is_not_given_up(cluster: Cluster, share: float, left: set[int]) -> None:
    case = two_devices(cluster, share)
    assert [case.source.give_up(device, "broken") for device in (1, 0)] == [share == 1.0, False]
    assert set(case.source.nodes) == left


@pytest.mark.parametrize("numbered", [True, False], ids=["leased", "own"])
def test_a_broken_device_that_comes_again_is_another_one_unless_numbers_stay(cluster: Cluster, numbered: bool) -> None:
    case = two_devices(cluster)
    case.source.numbered = numbered
    case.source.give_up(0, "broken")
    case.source.poll()
    case.take_away(0)
    assert case.source.poll() == ({}, []), "that it is gone was said before"
    case.bring(0)
    came, gone = case.source.poll()
    assert (set(came), gone, set(case.source.nodes)) == ((set(), [], {1}) if numbered else ({0}, [], {0, 1}))

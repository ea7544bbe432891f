"""A kind of devices is one entry: a toy kind, which Ray knows as a custom resource, needs no other change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.devices.layout import DeviceSpec, layout
from fluidtune.cluster.hosting.messages import AttachSpec, LoadSpec
from fluidtune.cluster.hosting.worker import Worker
from fluidtune.cluster.new_processes import NewProcesses
from fluidtune.device_kinds import KINDS, DeviceKind
from fluidtune.errors import FluidTuneError
from tests.cluster.test_pool import Ray
from tests.cluster.test_worker import Counting, _worker
from tests.contracts.processes import peer_processes
from tests.elastic.divided.grown import SECRET

REQUEST = {"CPU": 1.0, "TOY": 0.5}


def know_toys() -> None:
    KINDS["toy"] = DeviceKind("TOY", "toy")


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "toy", KINDS["cpu"])  # so that it is taken out again
    know_toys()


@pytest.mark.parametrize("devices", ["toy:4", None])
def test_a_process_has_its_part_of_a_toy(devices: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = layout(DeviceSpec.parse(devices), REQUEST, {"CPU": 8.0, "TOY": 4.0}, max_packing=1)
    assert (plan.kind, plan.most, plan.packing, plan.bundle) == ("toy", 4, 2, {"CPU": 2.0, "TOY": 1.0})
    assert plan.share_of(REQUEST) == plan.share == 0.5 and plan.share_of({"TOY": 2.0}) == 2.0
    ray, there = Ray(monkeypatch), SimpleNamespace(group=lambda device: "g", nodes={}, bundle=lambda device: 0)
    new: Any = NewProcesses(plan, there, "job")  # type: ignore[arg-type]
    new.start(0, None)
    ((_, environment, _, kind), options) = ray.args[0], ray.options[0]
    assert (options["num_cpus"], options["num_gpus"], options["resources"], kind) == (1.0, 0, {"TOY": 0.5}, "toy")
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_what_no_toy_can_be_is_refused_in_its_words() -> None:
    for asked, said in (({"TOY": 1.5}, "asks for 1.5 toys"), ({"TOY": 3.0}, "asks for 3 toys, and the job may have 2")):
        with pytest.raises(FluidTuneError, match=said):
            layout(None, asked, {"CPU": 4.0, "TOY": 2.0}, max_packing=1)
    with pytest.raises(FluidTuneError, match='"toy:N"'):
        DeviceSpec.parse("tyo:2")


def leads() -> Any:
    know_toys()
    _worker[:] = [Worker("w", {}, None, "toy")]
    facts: Any = _worker[0].load(Counting, LoadSpec("trial", {"config": {}}, device="toy", secret=SECRET))
    return facts.address


def follows(address: Any) -> str | None:
    know_toys()
    return Worker("f", {}, None, "toy").attach(AttachSpec("trial", address, SECRET, "toy"))


def steps() -> float:
    return float(_worker[0].train().result["steps"])


def test_workers_host_a_trial_on_two_toys() -> None:
    with peer_processes(2) as (leader, follower):
        address = leader.call(leads)
        assert follower.call(follows, address) is None and leader.call(steps) == 1.0

"""A kind of devices is one entry: a toy kind, which Ray knows as a custom resource, needs no other change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune

from fluidtune import FluidExecutor
from fluidtune.cluster.devices.layout import DeviceSpec, layout
from fluidtune.cluster.new_processes import NewProcesses
from fluidtune.device_kinds import KINDS, DeviceKind
from fluidtune.errors import FluidTuneError
from tests.cluster.test_pool import Ray
from tests.faults import jobs
from tests.tune.running import events_of, fit

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
    for asked, said in (({"TOY": 1.5}, "asks for 1.5 TOYs"), ({"TOY": 3.0}, "asks for 3 TOYs, the job has 2")):
        with pytest.raises(FluidTuneError, match=said):
            layout(None, asked, {"CPU": 4.0, "TOY": 2.0}, max_packing=1)
    with pytest.raises(FluidTuneError, match='"toy:N"'):
        DeviceSpec.parse("tyo:2")


@pytest.mark.ray
@pytest.mark.newest
def test_a_trial_grows_onto_a_second_toy(one_ray: Any, tmp_path: Path) -> None:
    one_ray.use(num_cpus=2, resources={"TOY": 2}, runtime_env={"worker_process_setup_hook": know_toys})
    (tmp_path / "notes").mkdir()
    space = {"x": 3.0, "iterations": 2000, "step": 0.05, "notes": str(tmp_path / "notes")}
    run = {"stop": lambda trial, result: any(len(each["devices"]) == 2 for each in events_of(tmp_path, "resized"))}
    on_toys = tune.with_resources(jobs.elastic, {"cpu": 1, "TOY": 1})
    results = fit("fluid", on_toys, space, tmp_path, executor=FluidExecutor(), metric="value", mode="min", run=run)
    assert not results.errors and results[0].metrics["training_iteration"] < 2000
    assert [each["kind"] for each in events_of(tmp_path, "run_started")] == ["toy"]

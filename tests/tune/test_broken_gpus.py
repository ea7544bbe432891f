"""A GPU whose hardware fails while a job runs: its trial goes on elsewhere, and no trial gets that GPU again.

The first tests play the driver without Ray. The last one runs a job on two GPUs that NVML's stand-in brings, on cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fluidtune.cluster.devices import device_source
from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.cluster.sharing.lanes import Eviction
from fluidtune.errors import FluidTuneError
from tests.tune.trainables import began_at, report_saved
from tests.tune.tried_manager import Tried, growing

BUS = "NVML says of GPU 0: GPU is lost"


def has_cores(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    """The cluster has so many cores, of which a device is one."""
    monkeypatch.setattr(device_source.ray, "nodes", lambda: [{"Resources": {"CPU": number}, "Alive": True}])


@pytest.mark.parametrize("loaded", [False, True])
def test_the_only_gpu_is_not_given_up_and_its_trial_fails_in_a_line(
    loaded: bool, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_cores(monkeypatch, 1.0)
    run, lack = tried.placed(1.0, loaded=loaded), Eviction(BUS, broken=0)
    if loaded:
        tried.manager.schedule_actor_task(run.tracked, "train", on_error=lambda *args: tried.told.append(args[-1]))
        tried.answered(run, IterationReply({}, "plain", 0.0, lack=lack))
    else:
        tried.loaded(run, lack)
    while not (errors := [one for one in tried.told if one != "started"]):
        tried.manager.next(0.0)
    (error,) = errors
    assert isinstance(error, FluidTuneError) and str(error).startswith(f"{BUS}; the job has no other GPU")
    assert "\n" not in str(error) and tried.logged("device_lost") == []


def test_a_follower_whose_gpu_breaks_is_no_error_of_its_loop(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    has_cores(monkeypatch, 2.0)
    run, follower = growing(tried)
    tried.attached(run, follower, None)
    tried.trains(run, 2, width=2)
    assert run.life.crew.followers == {1: follower}
    tried.follower_ended(run, follower, Eviction(BUS, broken=0))
    tried.manager._advance()
    assert not run.life.crew.failed_growths and run.life.crew.devices == (0,) and run.life.crew.leader is not None
    assert [event["device"] for event in tried.logged("device_lost")] == [follower.device]


def loses_its_gpu(config: dict[str, Any]) -> None:
    """Saves every step; in the second step the first trial's GPU falls off the bus."""
    lost = Path(os.environ["NVML_STANDIN_LOST"])
    for step in range(began_at(), 3):
        if (config["x"], step) == (1, 1) and not lost.exists():
            lost.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
            raise RuntimeError("CUDA error: unspecified launch failure")
        report_saved(step + 1, {"step": step, "gpu": os.environ["CUDA_VISIBLE_DEVICES"]})


@pytest.mark.ray
@pytest.mark.newest
@pytest.mark.timeout(300)
def test_a_job_goes_on_without_a_gpu_that_falls_off_the_bus(
    tmp_path: Path, no_ray: None, one_ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import tune

    import fluidtune
    from tests.tune.running import Recorder, events_of, fit

    standin = Path(__file__).parents[1] / "salus" / "standin"
    monkeypatch.setenv("NVML_STANDIN", "GPU-a,GPU-b")
    monkeypatch.setenv("NVML_STANDIN_LOST", str(tmp_path / "lost"))
    monkeypatch.setenv("PYTHONPATH", f"{standin}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    one_ray.use(num_cpus=2, num_gpus=2)
    heard = Recorder()
    trainable = tune.with_resources(loses_its_gpu, {"cpu": 1, "gpu": 1})
    results = fit(
        "fluid",
        trainable,
        {"x": tune.grid_search([1, 2, 3, 4])},
        tmp_path / "run",
        run={"callbacks": [heard]},
        executor=fluidtune.FluidExecutor(devices="gpu:2", max_packing=1),
        metric="step",
    )
    assert heard.iterations() == {x: [1, 2, 3] for x in (1, 2, 3, 4)}, "nothing lost, nothing twice"
    broken = (tmp_path / "lost").read_text()
    assert results[0].metrics["gpu"] != broken
    events = events_of(tmp_path / "run")
    (gone,) = [event for event in events if event["event"] == "device_lost"]
    assert gone["reason"] == f"NVML says of GPU {broken}: GPU is lost"
    later = [event for event in events if event["event"] == "trial_started" and event["t"] >= gone["t"]]
    assert later and all(gone["device"] not in event["devices"] for event in later)

"""Workers of one GPU as clients of its MPS daemon: by stand-ins for NVIDIA's program and library, without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.hosting.messages import WorkerInfo
from fluidtune.cluster.new_processes import NewProcesses, PooledWorker
from fluidtune.cluster.pool import WorkerPool
from fluidtune.cluster.sharing.mps import MpsFound, MpsSettings, enter, failed, verify
from salus_share import mps
from salus_share.seat_table import home
from salus_share.telemetry import DeviceSample
from tests.contracts.processes import until
from tests.salus.processes import mps_server

STANDIN = Path(__file__).parents[1] / "salus" / "standin"


class Node:
    """A node of two GPUs, as NVML has it, and what its MPS daemons were told."""

    def __init__(self, log: Path) -> None:
        self.uuids = [f"GPU-{uuid.uuid4().hex[:8]}" for _ in range(2)]
        self.samples = [DeviceSample(i, each, "A GPU", 0.0, 0, 1 << 34, False) for i, each in enumerate(self.uuids)]
        self._log = log

    def sample(self) -> list[DeviceSample]:
        return self.samples

    def close(self) -> None:
        """As `Telemetry`."""

    def home(self, gpu: int) -> Path:
        return home(f"mps-{self.uuids[gpu]}")

    def told(self, command: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self._log.read_text().splitlines())
        return [environment for what, environment in lines if what == command]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    log = tmp_path / "calls"
    log.touch()
    before = dict(os.environ)
    monkeypatch.setenv("MPS_STANDIN_LOG", str(log))
    monkeypatch.setenv("PATH", f"{STANDIN}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_DEVICE_ORDER", "NCCL_P2P_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    made = Node(log)
    yield made
    os.environ.clear()
    os.environ.update(before)
    for gpu in range(2):
        # A guard goes with its directory.
        shutil.rmtree(made.home(gpu), ignore_errors=True)


@pytest.mark.parametrize(
    ("gpus", "changed", "why"),
    [
        ([], {}, "0 GPUs"),
        (["0", "1"], {}, "2 GPUs"),
        (["2"], {}, "does not know a GPU 2"),
        (["0"], {"name": "Another"}, "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        (["0"], {"mig": True}, "divided by MIG"),
    ],
)
def test_where_nobody_can_tell_the_gpu_trials_take_time_slices(node: Node, gpus, changed, why) -> None:
    node.samples[0] = DeviceSample(**{**node.samples[0].as_fields(), **changed})
    before = dict(os.environ)
    found = enter(MpsSettings(None), gpus, node)  # type: ignore[arg-type]
    assert found.client is None and why in found.why
    assert dict(os.environ) == before and not node.told("-d")


def test_a_daemon_that_cannot_be_had_is_no_trouble(node: Node) -> None:
    node.home(0).touch()  # where its directory would be
    assert "File exists" in enter(MpsSettings(None), ["0"], node).why  # type: ignore[arg-type]
    node.home(0).unlink()


def ends(call: Callable[..., None], *args: Any) -> bool:
    """Whether the call ends the process that makes it."""
    child = os.fork()
    if child == 0:
        try:
            call(*args)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_worker_whose_cuda_does_not_start_under_mps_ends_and_the_next_one_goes_without(node: Node) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: MPS client failed to connect")

    torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=SimpleNamespace(synchronize=lambda: None))
    found = enter(MpsSettings(None), ["0"], node)  # type: ignore[arg-type]
    verify(found, torch)
    torch.cuda.synchronize = fail
    verify(MpsFound(None), torch)
    assert ends(verify, found, torch)
    os.environ.pop("CUDA_MPS_PIPE_DIRECTORY")
    assert "failed to connect" in enter(MpsSettings(None), ["0"], node).why  # type: ignore[arg-type]


def test_a_fault_that_hits_all_clients_costs_them_what_followed_their_last_commits(node: Node) -> None:
    found = enter(MpsSettings(None), ["0"], node)  # type: ignore[arg-type]
    fault = RuntimeError("the training function failed")
    fault.__cause__ = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with...")
    for its_own in (ValueError("CUDA error"), RuntimeError("CUDA out of memory"), RuntimeError("shapes differ")):
        failed(found, its_own)
    failed(MpsFound(None), fault)
    failed(None, fault)
    assert ends(failed, found, fault)
    os.environ.pop("CUDA_MPS_PIPE_DIRECTORY")
    # The one that made it fails alone from here on.
    assert "a fault hit all" in enter(MpsSettings(None), ["0"], node).why  # type: ignore[arg-type]


def test_an_error_after_which_cuda_still_works_is_the_trials_own(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, synchronize=lambda: None)
    found = enter(MpsSettings(None), ["0"], node)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    failed(found, RuntimeError("CUDA error: invalid configuration argument"))
    cuda.synchronize = fail
    assert ends(failed, found, RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))


def holds_its_gpu(config: dict[str, Any]) -> None:
    """Says what CUDA would find in the environment, when the trial's code runs.

    The second trial has a fault that hits all clients of its GPU, as long as there is MPS.
    """
    from ray import tune

    names = ["CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "NCCL_P2P_DISABLE"]
    found = {name: os.environ.get(name) for name in names}
    for at in range(3):
        if at == 1 and config["x"] == 2 and Path(found["CUDA_MPS_PIPE_DIRECTORY"] or "").exists():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        tune.report({"score": config["x"], "pid": os.getpid(), **found})


@pytest.mark.ray
@pytest.mark.timeout(150)
def test_a_job_on_gpus_with_lanes_runs_under_mps_outlives_its_faults_and_leaves_no_daemon(
    tmp_path: Path, node: Node, no_ray: None, one_ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import tune

    import fluidtune
    from tests.tune.running import events_of, fit

    # Ray's workers find the stand-ins where this process does.
    monkeypatch.setenv("NVML_STANDIN", ",".join(node.uuids))
    monkeypatch.setenv("PYTHONPATH", f"{STANDIN}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    one_ray.use(num_cpus=2, num_gpus=2)
    executor = fluidtune.FluidExecutor(devices="gpu:1", max_packing=2, lanes="HPT", device_memory=4 << 30)
    trainable = tune.with_resources(holds_its_gpu, {"cpu": 0.5, "gpu": 0.5})
    results = fit("fluid", trainable, {"x": tune.grid_search([1, 2])}, tmp_path, executor=executor)
    client, faulty = (result.metrics for result in results)
    (began,) = node.told("-d")
    gpu = node.uuids.index(began["CUDA_VISIBLE_DEVICES"])
    assert client["CUDA_VISIBLE_DEVICES"] == node.uuids[gpu]
    assert client["CUDA_MPS_PIPE_DIRECTORY"] == str(node.home(gpu) / "pipe")
    assert (client["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], client["NCCL_P2P_DISABLE"]) == ("0=4096M", "1")
    # It went on in another process, which shares the GPU by time slices.
    assert faulty["training_iteration"] == 3
    assert faulty["CUDA_MPS_PIPE_DIRECTORY"] == str(node.home(gpu) / "none")
    events = events_of(tmp_path)
    under = [event["mps"] for event in events if event["event"] == "worker_started"]
    assert under[:2] == [True, True] and not under[-1]
    assert [event["event"] for event in events].count("worker_lost") == 1, "it was tried again under MPS"
    # Ray killed the workers; the guard has seen it.
    until(lambda: node.told("quit"))


class Client:
    """An actor that is a client of MPS, as a `Worker` is, and does not answer any more."""

    def __init__(self, uuid: str) -> None:
        assert mps.Mps(uuid, home(f"mps-{uuid}")).acquire()

    def pid(self) -> int:
        return os.getpid()

    def end(self, within: float) -> None:
        time.sleep(600)


@pytest.mark.ray
@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("how", ["overdue", "at the end"])
def test_a_client_s_daemon_hears_of_its_end_before_it_is_killed(
    node: Node, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with mps_server(tmp_path) as server:
        monkeypatch.setenv("MPS_STANDIN_SERVER", str(server))
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        here = ray.get_runtime_context().get_node_id()
        plan, devices = Layout("gpu", 1, {"GPU": 1.0}, 1.0, 1, {"GPU": 1.0}), SimpleNamespace(nodes={0: here})
        pool = WorkerPool(plan, devices, NewProcesses(plan, devices, "job"))
        actor = ray.remote(Client).remote(node.uuids[0])
        pid = ray.get(actor.pid.remote())
        worker = PooledWorker("w", 0, actor, 0.0, starting=False, info=WorkerInfo(pid, mps=True))
        pool._add_worker(worker)
        if how == "overdue":
            pool.kill_worker(worker)
            until(lambda: not psutil.pid_exists(pid))
        else:
            pool.close()
            until(lambda: not psutil.pid_exists(pid))
    assert len(node.told(f"terminate_client {server} {pid}")) == 1
    # The daemon saw the client alive.
    assert (tmp_path / "calls.ended").read_text() == f"{pid} True\n"

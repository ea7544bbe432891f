"""What the driver does beside the engine, with many trials and devices; for `benchmarks.driver`. No Ray runs.

The job, its manager, its pool and its log are real. Stand-ins take the place of what Ray would answer: the controller,
the placement groups and the worker processes. Each pass returns milliseconds of CPU time, of the longest of its calls.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ray.tune import PlacementGroupFactory
from ray.tune.trainable import FunctionTrainable

from benchmarks.many_trials import PER_NODE, Case, Job
from benchmarks.stand_in_tune import layout, standing_alone
from fluidtune.cluster.hosting.messages import WorkerInfo
from fluidtune.cluster.new_processes import NewProcesses
from fluidtune.cluster.pool import PooledWorker, WorkerPool
from fluidtune.ray_compat.trainable import TRIAL_INFO
from fluidtune.tune.arbiter_progress import JobProgress
from fluidtune.tune.job_log import JobLog
from fluidtune.tune.manager import FluidActorManager
from fluidtune.tune.worker_dispatch import WorkerDispatch, WorkerRequest
from themis_bridge.app_record import valued
from themis_bridge.locality import Gpu


def _timed(call: Callable[[], Any]) -> float:
    """Milliseconds of CPU time."""
    began = time.process_time()
    call()
    return (time.process_time() - began) * 1e3


class _Future:
    """The answer to a call of ``method``, which is there at once."""

    def __init__(self, method: str) -> None:
        self.value = WorkerInfo(pid=1) if method == "info" else None


class _Actor:
    """A worker process that does nothing."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: _Future(method))


class _Devices:
    """Devices that are all there, `PER_NODE` on each node."""

    urgent = False

    def __init__(self, count: int) -> None:
        self.nodes = {device: f"node{device // PER_NODE}" for device in range(count)}
        self._came = dict(self.nodes)

    def poll(self, wait_s: float = 0.0) -> tuple[dict[int, str], list[int]]:
        came, self._came = self._came, {}
        return came, []

    def leaving(self) -> list[int]:
        return []

    def group(self, device: int) -> Any:
        return None

    def bundle(self, device: int) -> int:
        return 0


@contextmanager
def _pool(devices: _Devices, starts: int) -> Iterator[WorkerPool]:
    """A pool whose processes are stand-ins. ``starts``: how many processes of a node may start at a time."""
    remote = SimpleNamespace(options=lambda **how: SimpleNamespace(remote=lambda *args: _Actor()))
    nodes = [{"NodeID": node, "Resources": {"CPU": float(starts)}} for node in set(devices.nodes.values())]
    strategy = "fluidtune.cluster.new_processes.PlacementGroupSchedulingStrategy"
    with (
        patch("ray.remote", lambda cls: remote),
        patch("ray.nodes", lambda: nodes),
        patch(strategy, lambda *args, **named: None),
        patch.object(NewProcesses, "_needed_before_start", lambda pool: {}),
    ):
        plan = layout(len(devices.nodes))
        yield WorkerPool(plan, devices, NewProcesses(plan, devices, "job"))


def _busy_engine(trials: int, devices: int) -> Any:
    """An engine of which all devices are in use and most trials wait, some seconds after its start."""
    job = Job(Case("driver", trials, devices, "elastic", True))
    job.arrive(1_000)
    job.run(2 * devices, 1e9)
    return job


def told(trials: int, devices: int) -> dict[str, float]:
    """What is written down after each batch of events. ``first_ms``: after the first, of every trial why it waits."""
    job = _busy_engine(trials, devices)
    with tempfile.TemporaryDirectory() as directory:
        log = JobLog("job", Path(directory), job.engine)
        first, *others = [_timed(lambda: log.instructions_given([])) for _ in range(21)]
        return {"first_ms": first, "instructions_given_ms": max(others)}


def requests(trials: int, devices: int) -> dict[str, float]:
    """As many requests for a worker as devices: at first none can be served, then all can.

    A node starts as few processes at a time as possible, and the other requests wait.
    """
    there = _Devices(devices)
    with _pool(there, 1) as pool:
        job: Any = SimpleNamespace(pool=pool, devices=there, log=SimpleNamespace(worker_started=lambda *args: None))
        got: list[PooledWorker] = []
        calls: Any = SimpleNamespace(track_call=lambda *args: None)
        dispatch = WorkerDispatch(job, calls, lambda event: None)

        def request_all() -> None:
            for device in range(devices):
                dispatch.request_worker(WorkerRequest(device, (), got.append, lambda: True))

        first = _timed(request_all)
        nothing = max(_timed(dispatch.serve_requests) for _ in range(5))
        for worker in pool.workers.values():
            worker.starting = False
        some = _timed(dispatch.serve_requests)
        while len(got) < devices:
            for worker in pool.workers.values():
                worker.starting = False
            some = max(some, _timed(dispatch.serve_requests))
        busy = _timed(lambda: [pool.has_busy_worker(device) for device in range(devices)])
    return {"request_ms": first, "serve_none_ms": nothing, "serve_some_ms": some, "in_use_ms": busy}


def progress(trials: int, devices: int) -> dict[str, float]:
    """The figures for the arbiter, and what the agent asks of them."""
    job = _busy_engine(trials, devices)
    where = {device: Gpu(f"gpu{device}", f"node{device // PER_NODE}") for device in range(devices)}
    told = JobProgress(job.engine, lambda group: (), None)
    updates = []
    for second in range(5):
        updates.append(_timed(lambda now=float(second): told.update(where, now)))
        job.run(len(job.calls) + devices // 2, 1e9)
    gpus = list(where.values())
    asked = max(_timed(lambda held=held: valued(told.report(), 1.0, 1.0, 1).rho(held)) for held in ([], gpus[:1], gpus))
    assert valued(told.report(), 1.0, 1.0, 1).useful == told.useful
    return {"first_update_ms": updates[0], "update_ms": max(updates[1:]), "valuation_ms": asked}


@contextmanager
def _manager(devices: int) -> Iterator[FluidActorManager]:
    """A manager with its job, on as many devices."""
    there = _Devices(devices)
    with (
        tempfile.TemporaryDirectory() as directory,
        _pool(there, PER_NODE) as pool,
        standing_alone(Path(directory), there, lambda *args, **named: pool) as manager,
        patch("ray.wait", lambda futures, num_returns, timeout: (futures[:1], futures[1:])),
        patch("ray.get", lambda future: future.value),
    ):
        yield manager


def start(trials: int, devices: int) -> dict[str, float]:
    """As many trials as devices come at once, are loaded, and report for the first time.

    ``add_ms``: all calls with which Tune adds them. ``pass_ms``: the longest pass of the manager in which they start.
    ``more_ms``: the longest pass in which 1,000 further trials come, which wait. ``idle_pass_ms``: a pass in which
    nothing happens while they do. ``counts_ms``: what Tune asks for before each of its steps.
    """
    with _manager(devices) as manager:
        added = _timed(lambda: [_add(manager, f"trial{number}") for number in range(devices)])
        passes = []
        while manager.num_live_actors < devices or manager.num_pending_actors:
            passes.append(_timed(lambda: manager.step(0.0)))
        more = []
        for first in range(devices, trials, 1_000):
            for number in range(first, min(first + 1_000, trials)):
                _add(manager, f"trial{number}")
            more.append(_timed(lambda: manager.step(0.0)))
        while manager.step(0.0):
            pass
        idle = max(_timed(lambda: manager.step(0.0)) for _ in range(5))
        counts = max(_timed(lambda: (manager.num_pending_actors, manager.num_actor_tasks)) for _ in range(5))
    return {
        "add_ms": added,
        "pass_ms": max(passes),
        "passes": len(passes),
        "passes_per_second": 1e3 * len(passes) / sum(passes),
        "more_ms": max(more),
        "idle_pass_ms": idle,
        "counts_ms": counts,
    }


def _add(manager: FluidActorManager, name: str) -> None:
    """Tune makes a trial and asks for its actor."""
    request = PlacementGroupFactory([{"GPU": 1.0}])
    trial: Any = SimpleNamespace(
        trial_id=name,
        last_result={},
        status="PENDING",
        placement_group_factory=request,
        evaluated_params={"lr": hash(name)},
        config={"lr": hash(name)},
        trainable_name="t",
        get_trainable_cls=lambda: FunctionTrainable,
        run_metadata=SimpleNamespace(),
        checkpoint=None,
        latest_checkpoint_result=None,
        num_failures=0,
        checkpoint_freq=0,
        set_ray_actor=lambda actor: None,
    )
    manager.note_trial(trial)
    manager.add_actor(None, {"config": {TRIAL_INFO: trial}}, None)


#: By name: a function of the numbers of trials and devices, which returns its figures.
PASSES: dict[str, Callable[[int, int], dict[str, float]]] = {
    "told": told,
    "requests": requests,
    "progress": progress,
    "start": start,
}

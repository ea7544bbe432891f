"""Which process serves a trial next. No process is started here."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from fluidtune.cluster import new_processes
from fluidtune.cluster import pool as pool_module
from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.hosting.messages import WorkerInfo
from fluidtune.cluster.new_processes import NewProcesses, Use
from fluidtune.cluster.pool import PooledWorker, WorkerPool
from fluidtune.cluster.sharing.mps import MpsSettings


class Leaving:
    """The future of an actor's end."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor


class Actor:
    """Told to end, it leaves Ray at once, unless it ``hangs``."""

    def __init__(self, ended: list[Any], hangs: bool = False) -> None:
        self.end = SimpleNamespace(remote=self._end)
        self.hangs = hangs
        self._ended = ended

    def _end(self, within: float) -> Any:
        self._ended.append(self)
        return Leaving(self)


class Processes(NewProcesses):
    """Stand-ins for processes: ``ended``, those that were told to end; ``seen``, the GPUs that each was to see."""

    def __init__(self, plan: Layout, devices: Any) -> None:
        super().__init__(plan, devices, "job")
        self.ended: list[Any] = []
        self.seen: list[list[str] | None] = []

    def start(self, device: int, visible: list[str] | None, spare: bool = False, several: bool = False) -> PooledWorker:
        self.seen.append(visible)
        name, actor = f"w{len(self.seen)}", Actor(self.ended)
        if spare:
            return PooledWorker(name, device, actor, 0.0, started_for="spare", use=Use.IDLE)
        return PooledWorker(name, device, actor, 0.0, started_for="trial" if visible is None else "several")

    def can_spare(self, device: int) -> bool:
        return True


class Ray:
    """Stands for Ray, which would start a cluster. It starts nothing and notes everything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.classes: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.args: list[tuple[Any, ...]] = []
        self.killed: list[Any] = []
        self.cores = {"one-node": 3.0, "other": 0.0}
        #: The node of this process.
        self.here = "another"
        self.kill = self.killed.append
        for name in ("get_runtime_context", "nodes", "wait", "remote", "kill"):
            monkeypatch.setattr(ray, name, getattr(self, name))
        monkeypatch.setattr(pool_module, "end_made_by", lambda actor: None)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(runtime_env={}, get_node_id=lambda: self.here)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": each, "Alive": True, "Resources": {"CPU": cores}} for each, cores in self.cores.items()]

    def wait(self, futures: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [future for future in futures if not future.actor.hangs]
        if not ready:
            time.sleep(timeout)
        return ready[:num_returns], [future for future in futures if future not in ready[:num_returns]]

    def remote(self, cls: Any) -> Any:
        self.classes.append(cls)
        actor = SimpleNamespace(options=lambda **options: self.options.append(options) or actor)
        actor.remote = lambda *args: self.args.append(args)
        return actor


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(monkeypatch)


CORES = Layout("cpu", 9, {"CPU": 1.0}, 1.0, 1, {"CPU": 1.0})


def pool_of(plan: Layout, ray: Ray, **how: bool) -> Any:
    """A pool of stand-ins for processes, on five devices of one node and three of another."""
    there: Any = SimpleNamespace(nodes=dict.fromkeys(range(5), "one") | dict.fromkeys(range(5, 8), "other"))
    there.group = lambda device: f"group-{device}"
    new = Processes(plan, there)
    made: Any = WorkerPool(plan, there, new, **how)
    made.killed, made.ended, made.seen, made.devices = ray.killed, new.ended, new.seen, there
    return made


@pytest.fixture
def pool(asked: Ray) -> Any:
    return pool_of(CORES, asked, spares=True)


def taken(pool: WorkerPool, device: int, others: tuple[int, ...] = ()) -> PooledWorker:
    """A worker as a trial gets it: an idle one if there is one."""
    return pool.take_idle_worker(device, others) or pool.start_worker(device, others)


def test_a_device_whose_worker_unloads_its_trial_has_no_room_for_another(pool):
    # Seen: a second process there waited for the first one's place for ever.
    worker = taken(pool, 0)
    assert not pool.can_serve(0)
    assert pool.can_serve(1)
    pool.return_worker(worker)
    assert pool.can_serve(0)
    assert taken(pool, 0) is worker
    pool.discard_worker(worker)
    pool.return_worker(worker)
    assert pool.take_idle_worker(0) is None, "it was discarded while it unloaded"


def test_a_spare_is_idle_until_a_trial_takes_it(pool, asked):
    first = taken(pool, 0)
    assert pool.start_spares() == [], "the process of the trial is starting itself"
    first.starting = False
    (spare,) = pool.start_spares()
    assert spare.use is Use.IDLE and pool.start_spares() == []
    first.unload()
    assert taken(pool, 0) is spare and spare.use is Use.SERVING
    again = pool_of(CORES, asked)  # it uses its processes again
    taken(again, 0).starting = False
    assert again.start_spares() == []


def test_a_worker_that_is_ready_is_taken_before_a_spare_that_still_starts(pool):
    first = taken(pool, 0)
    first.starting = False
    (spare,) = pool.start_spares()
    pool.return_worker(first)
    assert [taken(pool, 0), taken(pool, 0)] == [first, spare]


def test_where_memory_is_divided_no_trial_gets_a_process_while_another_is_unloaded(asked):
    # It holds what the next one was promised.
    divided = pool_of(CORES, asked, spares=True, divided=True)
    first = taken(divided, 0)
    first.starting = False
    (spare,) = divided.start_spares()
    assert divided.can_serve(0)
    first.unload()
    first.told -= 60
    assert not divided.can_serve(0)
    divided.discard_worker(first)
    assert divided.can_serve(0) and taken(divided, 0) is spare


def test_a_worker_over_several_gpus_gets_an_empty_device_and_is_not_kept(asked):
    pool = pool_of(Layout("gpu", 9, {"GPU": 1.0}, 1.0, 1, {"GPU": 1.0}), asked, spares=True)
    assert pool.unknown_gpus(0, (1,)) == [0, 1] and pool.unknown_gpus(0, ()) == []
    idle, other = taken(pool, 0), taken(pool, 1)
    assert pool.start_probe(1) is None, "its worker is starting, and will say"
    for worker, gpu in ((idle, "7"), (other, "8")):
        worker.info, worker.group = WorkerInfo(1, [gpu]), f"group-{worker.device}"
        pool.note_gpu(worker)
    assert pool.unknown_gpus(0, (1, 2)) == [2]
    assert not pool.can_serve(0, others=(1,))
    pool.return_worker(idle)
    assert pool.can_serve(0, others=(1,))
    wide = taken(pool, 0, others=(1,))
    assert wide is not idle and wide.started_for == "several" and pool.ended == [idle.actor]
    assert pool.seen == [None, None, ["7", "8"]]
    pool.return_worker(wide)
    assert pool.take_idle_worker(0) is None and pool.ended == [idle.actor, wide.actor] and not pool.killed
    pool.devices.group = lambda device: f"later-group-{device}"
    assert pool.unknown_gpus(0, (1,)) == [0, 1], "another lease of the device may be another GPU"
    probe = pool.start_probe(0)
    assert probe is not None and pool.seen[-1] is None and probe.started_for == "trial"


def test_processes_end_in_order_and_only_one_that_does_not_is_killed(pool, monkeypatch):
    # Seen: the 10 s for workers and those for exit handlers added up to 20 s.
    monkeypatch.setattr(pool_module, "CLOSE_S", 0.05)
    (idle, stuck, unborn), waited = (taken(pool, device) for device in range(3)), []
    monkeypatch.setattr(psutil, "wait_procs", lambda processes, timeout: waited.append(timeout))
    for worker in (idle, stuck):
        worker.starting = False
    pool.return_worker(idle)
    stuck.actor.hangs = True
    stuck.unload()
    pool.close()
    assert pool.ended == [idle.actor, stuck.actor]
    assert pool.killed == [unborn.actor, stuck.actor] and not pool.workers
    assert waited == [pytest.approx(0.0, abs=0.05)]


@pytest.mark.parametrize("serves", [True, False])
def test_only_a_process_whose_exit_handlers_may_still_run_is_waited_for(pool, asked, monkeypatch, serves):
    # Seen: the end of each run waited 0.3 s for a process in which nothing was left to do.
    last, waited, asked.here = taken(pool, 0), [], "one-node"
    last.starting, last.info = False, WorkerInfo(os.getpid())
    if not serves:
        pool.return_worker(last)
    monkeypatch.setattr(psutil, "wait_procs", lambda processes, timeout: waited.extend(processes))
    pool.close()
    assert pool.ended == [last.actor] and [each.pid for each in waited] == [os.getpid()] * serves


def test_no_more_processes_of_a_node_start_at_a_time_than_it_has_cores(pool):
    begun = [taken(pool, device) for device in range(3)]
    assert not pool.can_serve(3) and not pool.can_serve(3, others=(4,))
    assert pool.can_serve(8)  # its node is gone: the process that is started there fails, and its trial hears so
    begun += [taken(pool, device) for device in (5, 6)]
    assert not pool.can_serve(7)  # two at least, whatever the node says
    begun[0].starting = False
    assert pool.can_serve(3) and not pool.can_serve(7)
    pool.discard_worker(begun[3])
    assert pool.can_serve(7)
    pool.return_worker(begun[0])
    taken(pool, 3)
    assert not pool.can_serve(4) and pool.can_serve(0)  # an idle one waits for nobody


def test_workers_get_the_environment_that_stock_tune_gives(monkeypatch):
    given = {"AWS_SESSION_TOKEN": "a", "RAY_CHDIR_TO_TRIAL_DIR": "0", "TUNE_FUNCTION_THREAD_TIMEOUT_S": "3"}
    for name, value in {**given, "HOME_GROWN": "x"}.items():
        monkeypatch.setenv(name, value)
    environment = NewProcesses(CORES, SimpleNamespace(), "job").environment
    assert given.items() <= environment.items() and "HOME_GROWN" not in environment


def test_what_a_process_is_started_with(asked: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several on a device has as many threads as its trial has cores. One of several GPUs is without MPS."""
    # Found by reading: Ray sets it in a driver that `ray job submit` starts, and it was taken for the user's.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    devices: Any = SimpleNamespace(group=lambda device: "g", nodes={}, bundle=lambda device: device)
    for device, threads, mps in ((1, 4, MpsSettings(1 << 30)), (0, None, None)):
        layout = Layout("gpu", 2, {"CPU": 4.0, "GPU": 1.0}, 1.0, 4, {"CPU": 1.0, "GPU": 0.25}, threads)
        new = NewProcesses(layout, devices, "job", mps)
        new.start(device, None)
        new.start(device, ["1", "0"], several=True)
    assert [args[1].get("OMP_NUM_THREADS") for args in asked.args[::2]] == ["4", "1"]
    assert [args[2] for args in asked.args] == [MpsSettings(1 << 30), None, None, None]
    assert asked.args[1][1]["CUDA_VISIBLE_DEVICES"] == "1,0"
    placed = [options["scheduling_strategy"] for options in asked.options[::2]]
    assert [(each.placement_group, each.placement_group_bundle_index) for each in placed] == [("g", 1), ("g", 0)]


def test_workers_of_a_node_that_comes_later_hash_strings_as_those_of_the_first_one(
    asked: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seen: a vocabulary that is made from a set had other ids in workers of a second node.
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    needed = {"env_vars": {"RAY_TRAIN_V2_ENABLED": "0", "PYTHONHASHSEED": "7"}}

    def runtime_env(nodes: int, job: dict[str, Any], rays: dict[str, str]) -> dict[str, Any] | None:
        """This process has started the first node only."""
        return {"env_vars": {**rays, "PYTHONHASHSEED": "7"}} if nodes > 1 else None

    monkeypatch.setattr(new_processes.hash_seed, "runtime_env", runtime_env)
    there = {"group": lambda device: "g", "bundle": lambda device: device}
    devices, asked.cores = SimpleNamespace(nodes={0: "first"}, **there), {"first": 1.0}
    pool = WorkerPool(CORES, devices, NewProcesses(CORES, devices, "job"))
    pool.start_worker(0)
    asked.cores["second"] = 1.0
    devices.nodes[1] = "second"
    pool.start_worker(1)
    assert [options["runtime_env"] for options in asked.options] == [None, needed]


def test_a_worker_that_ends_after_a_trial_keeps_its_device_in_use(pool) -> None:
    worker = pool.start_worker(1)
    worker.actor.hangs = True
    assert pool.has_busy_worker(1) and pool.has_worker(1) and not pool.has_worker(0)
    pool.discard_worker(worker)
    assert pool.has_busy_worker(1), "its exit handlers may still run"
    worker.actor.hangs = False
    assert not pool.has_worker(1) and not pool.has_busy_worker(1)


def test_idle_workers_of_all_devices_end_when_their_memory_is_needed(pool):
    busy, *idle = (pool.start_worker(device) for device in (0, 0, 1))
    for worker in idle:
        pool.return_worker(worker)
    pool.discard_all_idle_workers()
    assert pool.ended == [worker.actor for worker in idle] and list(pool.workers.values()) == [busy]
    assert pool.take_idle_worker(1) is None

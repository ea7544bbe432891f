"""Which process serves next, without starting any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fluidtune.cluster import pool as pool_module
from fluidtune.cluster.devices import Layout
from fluidtune.cluster.pool import PooledWorker, WorkerPool


@pytest.fixture
def pool(monkeypatch):
    def start(self, device, now, visible):
        self._count += 1
        worker = PooledWorker(f"w{self._count}", device, object(), now, exclusive=visible is not None)
        self.workers[worker.name] = worker
        return worker

    killed = []
    monkeypatch.setattr(WorkerPool, "_start", start)
    monkeypatch.setattr(pool_module.ray, "kill", killed.append)
    nodes = [{"NodeID": "one-node", "Resources": {"CPU": 3.0}}, {"NodeID": "other", "Resources": {}}]
    monkeypatch.setattr(pool_module.ray, "nodes", lambda: nodes)
    there = SimpleNamespace(nodes=dict.fromkeys(range(5), "one") | dict.fromkeys(range(5, 8), "other"))
    made = WorkerPool(Layout("cpu", 9, {"CPU": 1.0}, 1.0, 1, {"CPU": 1.0}), there, "job")
    made.killed = killed
    return made


def test_a_device_whose_worker_is_cleaning_has_no_room_for_another(pool):
    # docs/bugs.md, 2: a second process there would wait for the first one's place for ever.
    worker = pool.take(0, now=0.0)
    assert not pool.ready(0)
    assert pool.ready(1)
    pool.give_back(worker)
    assert pool.ready(0)
    assert pool.take(0, now=1.0) is worker


def test_a_worker_that_died_makes_room(pool):
    worker = pool.take(0, now=0.0)
    pool.discard(worker)
    assert pool.ready(0)
    assert pool.take(0, now=1.0) is not worker


def test_a_worker_that_was_discarded_while_cleaning_does_not_come_back(pool):
    worker = pool.take(0, now=0.0)
    pool.discard(worker)
    pool.give_back(worker)
    assert not pool.idle(0)


def test_a_worker_over_several_gpus_gets_an_empty_device_and_is_not_kept(pool):
    idle = pool.take(0, now=0.0)
    assert not pool.ready(0, alone=True)
    pool.give_back(idle)
    assert pool.ready(0, alone=True)
    wide = pool.take(0, now=1.0, visible=["0", "1"])
    assert wide is not idle and pool.killed == [idle.actor]
    pool.give_back(wide)
    assert not pool.idle(0) and pool.killed == [idle.actor, wide.actor]


def test_packing_gives_room_for_several(pool):
    pool._layout = Layout("gpu", 2, {"GPU": 1.0}, 0.5, 2, {"GPU": 0.5})
    first, second = pool.take(0, now=0.0), pool.take(0, now=0.0)
    assert first is not second and not pool.ready(0)


def test_no_more_processes_of_a_node_start_at_a_time_than_it_has_cores(pool):
    begun = [pool.take(device, now=0.0) for device in range(3)]
    assert not pool.ready(3) and not pool.ready(3, alone=True)
    assert pool.ready(8)  # its node is gone: who is started there hears so
    begun += [pool.take(device, now=0.0) for device in (5, 6)]
    assert not pool.ready(7)  # two at least, whatever the node says
    begun[0].starting = False
    assert pool.ready(3) and not pool.ready(7)
    pool.discard(begun[3])
    assert pool.ready(7)
    pool.give_back(begun[0])
    pool.take(3, now=1.0)
    assert not pool.ready(4) and pool.ready(0)  # a warm one waits for nobody


def test_workers_get_the_environment_that_stock_tune_gives(monkeypatch):
    given = {"AWS_SESSION_TOKEN": "a", "RAY_CHDIR_TO_TRIAL_DIR": "0", "TUNE_FUNCTION_THREAD_TIMEOUT_S": "3"}
    for name, value in {**given, "HOME_GROWN": "x"}.items():
        monkeypatch.setenv(name, value)
    environment = WorkerPool(Layout("cpu", 2, {"CPU": 1.0}, 1.0, 1, {"CPU": 1.0}), None, "job")._environment
    assert given.items() <= environment.items() and "HOME_GROWN" not in environment

"""What the manager does when workers and devices go, with a job of stand-ins and a real engine. No Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from fluidtune.cluster.pool import PooledWorker
from fluidtune.engine import Engine
from fluidtune.engine import messages as m
from fluidtune.ray_compat.trainable import TRIAL_INFO
from fluidtune.tune.manager import FluidActorManager
from fluidtune.tune.trial_run import Run


class Actor:
    """Remembers what it was called for; nothing is ever answered."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> object:
            self.called.append(method)
            return object()

        return SimpleNamespace(remote=remote)


class Workers:
    """A worker is there whenever one is wanted."""

    patience = 600.0

    def __init__(self) -> None:
        self.watched: list[str] = []
        self._count = 0

    def ready(self, device: int, others: tuple[int, ...]) -> bool:
        return True

    def take(self, device: int, others: tuple[int, ...]) -> tuple[PooledWorker, bool]:
        self._count += 1
        return PooledWorker(f"w{self._count}", device, Actor(), 0.0), False

    def alive(self, worker: PooledWorker) -> bool:
        return True

    def watch(self, worker: PooledWorker, within: float) -> None:
        self.watched.append(worker.name)

    def lost(self, worker: PooledWorker, reason: str) -> None:
        pass


class Job:
    """Two devices of one node."""

    backend, torch_device, emulation = "torch", "cpu", None

    def __init__(self) -> None:
        self.engine = Engine()
        self.workers = Workers()
        self.reservation = SimpleNamespace(complete=True, nodes={0: "n", 1: "n"})
        #: What the next look at the devices finds.
        self.news: list[m.Event] = []

    def devices_there(self, wait_s: float) -> list[tuple[int, str]]:
        return list(self.reservation.nodes.items())

    def poll_devices(self) -> list[m.Event]:
        news, self.news = self.news, []
        return news

    def decide(self, events: list[m.Event]) -> list[m.Instruction]:
        return self.engine.handle(*events, now=0.0)

    def arrival(self, trial: Any) -> list[m.Event]:
        return [m.GroupAnnounced("g"), m.TrialAdded(trial.trial_id, "g", "plain", 10, trial.share)]

    def share_of(self, trial: Any) -> float:
        return float(trial.share)

    def kind_of(self, trial: Any) -> m.Kind:
        return "plain"

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None  # what is written down, and settings that there are none of


@pytest.fixture
def manager() -> FluidActorManager:
    return FluidActorManager(Job())  # type: ignore[arg-type]


def placed(manager: FluidActorManager, share: float) -> Run:
    """A trial of this share, loaded into a worker."""
    trial: Any = SimpleNamespace(trial_id="a", last_result={}, status="RUNNING", share=share)
    manager.note_trial(trial)
    tracked = manager.add_actor(None, {"config": {TRIAL_INFO: trial}}, None)
    manager._advance()
    run = manager._runs[tracked]
    manager._loaded(run, run.leader, None)  # type: ignore[arg-type]
    assert run.live
    return run


def test_a_dismissed_worker_is_not_watched_when_its_last_trial_loses_its_leader(manager: FluidActorManager) -> None:
    run = placed(manager, 1.0)
    dismissed = PooledWorker("dismissed", 1, Actor(), 0.0)
    run.devices, run.wanted, run.followers, run.width = (0, 1), (0,), {1: dismissed}, 2
    manager._resizer._follower_ended(run, dismissed, None)
    assert dismissed.actor.called == ["unload"]
    watched = manager._job.workers.watched  # type: ignore[attr-defined]
    watched.clear()  # it has cleaned up, and serves another trial
    manager._worker_died(run, run.leader, RayActorError())
    assert watched == []


def test_a_group_that_mends_itself_while_it_shrinks_has_not_who_left_before(manager: FluidActorManager) -> None:
    run = placed(manager, 1.0)
    dismissed, dead = (PooledWorker(name, device, Actor(), 0.0) for device, name in ((1, "dismissed"), (2, "dead")))
    run.devices, run.wanted, run.followers, run.width = (0, 1, 2), (0, 2), {1: dismissed, 2: dead}, 3
    run.mends = run.reforming = True
    manager._resizer._follower_ended(run, dismissed, None)
    manager._resizer._follower_ended(run, dead, RayActorError())
    assert run.devices == run.wanted == (0,) and run.width == 1
    assert manager._crew.events[-1] == m.WorkerLost("a", (0,), 2)


def test_a_trial_leaves_its_devices_when_one_of_them_is_lost(manager: FluidActorManager) -> None:
    run = placed(manager, 2.0)
    assert run.devices == (0, 1)
    leader: Any = run.leader
    manager._job.news = [m.DeviceLost(1)]  # type: ignore[attr-defined]
    manager._crew.poll(force=True)
    manager._advance()
    assert run.leader is None and not run.live
    assert leader.actor.called == ["load", "unload"]
    manager._job.news = [m.DeviceGained(1, "n")]  # type: ignore[attr-defined]
    manager._crew.poll(force=True)
    manager._advance()
    assert run.leader is not None and run.leader is not leader

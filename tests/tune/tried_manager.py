"""A manager to try, without Ray: what `standing_alone` makes, with devices and workers that tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune import PlacementGroupFactory
from ray.tune.trainable import FunctionTrainable

from benchmarks.stand_in_tune import standing_alone
from fluidtune.cluster.devices.device_source import DeviceSource
from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.cluster.pool import PooledWorker
from fluidtune.group_facts import GroupFacts
from fluidtune.ray_compat.trainable import TRIAL_INFO
from fluidtune.report import EVENT_LOG_NAME, read_events
from fluidtune.trials import messages as life
from fluidtune.tune.manager import FluidActorManager
from fluidtune.tune.trial_run import PROGRESS, TrialRun

#: What a leader knows of its trial when it is loaded.
LOADED = GroupFacts(address=("127.0.0.1", 4321), one_node=True)


class Actor:
    """Remembers what it was called for; the test answers for it."""

    def __init__(self) -> None:
        self.called: list[str] = []
        #: The arguments of each call.
        self.args: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> object:
            self.called.append(method)
            self.args.append(args)
            return object()

        return SimpleNamespace(remote=remote)


class Pool:
    """A worker is there whenever one is wanted."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.workers: dict[str, PooledWorker] = {}

    def start_spares(self) -> list[PooledWorker]:
        return []

    def stop_forking(self, why: str) -> None:
        pass

    def can_serve(self, device: int, others: tuple[int, ...]) -> bool:
        return True

    def unknown_gpus(self, device: int, others: tuple[int, ...]) -> list[int]:
        return []

    def note_gpu(self, worker: PooledWorker) -> None:
        pass

    def take_idle_worker(self, device: int, others: tuple[int, ...]) -> PooledWorker | None:
        return self.add_worker(f"w{len(self.workers) + 1}", device)

    def add_worker(self, name: str, device: int) -> PooledWorker:
        worker = self.workers[name] = PooledWorker(name, device, Actor(), 0.0)
        return worker

    def is_alive(self, worker: PooledWorker) -> bool:
        return worker.name in self.workers

    def return_worker(self, worker: PooledWorker) -> None:
        pass

    def forget_worker(self, worker: PooledWorker) -> None:
        del self.workers[worker.name]

    def discard_worker(self, worker: PooledWorker) -> None:
        self.forget_worker(worker)

    def kill_worker(self, worker: PooledWorker) -> None:
        self.discard_worker(worker)

    def discard_idle_workers(self, device: int) -> None:
        pass

    def close(self) -> None:
        pass


class Devices(DeviceSource):
    """Two devices of one node, unless others are given."""

    def __init__(self, nodes: dict[int, str] | None = None) -> None:
        super().__init__(Layout("cpu", 2, {"CPU": 1.0}, 1.0, 1, {"CPU": 1.0}))
        self._nodes = nodes or {0: "n", 1: "n"}
        #: What the next look at the devices finds.
        self.came: dict[int, str] = dict(self._nodes)
        self.gone: list[int] = []

    def _poll(self, wait_s: float) -> tuple[dict[int, str], list[int]]:
        (came, self.came), (gone, self.gone) = (self.came, {}), (self.gone, [])
        return came, gone

    def lose(self, device: int) -> None:
        """The device is gone; if it has come since the last look, nothing is heard of it."""
        if self.came.pop(device, None) is None:
            self.gone.append(device)
        del self._nodes[device]

    def group(self, device: int) -> str:
        assert device in self.nodes
        return f"group{device}"

    def close(self) -> None:
        pass


class TunesTrial(SimpleNamespace):
    """Tune's object of a trial, by its name."""

    def __str__(self) -> str:
        return str(self.trial_id)


def tunes_trial(name: str = "a", *bundles: dict[str, float], **more: Any) -> Any:
    """A trial that has not begun, and asks for these bundles; for one GPU. ``more``: what else it has."""
    fields = dict(
        trial_id=name,
        placement_group_factory=PlacementGroupFactory([*bundles] or [{"GPU": 1.0}]),
        run_metadata=SimpleNamespace(last_result={}),
        config={},
        evaluated_params={},
        last_result={},
        status="PENDING",
        max_failures=0,
        num_failures=0,
        trainable_name="t",
        checkpoint=None,
        checkpoint_freq=0,
        latest_checkpoint_result=None,
        set_ray_actor=lambda actor: None,
    )
    return TunesTrial(**{**fields, **more})


class Tried:
    """A manager, and what the tests look at."""

    def __init__(self, manager: FluidActorManager, directory: Path):
        self.manager = manager
        self.job = manager.job
        self.devices: Any = self.job.devices
        self.pool: Any = self.job.pool
        self._directory = directory
        #: What Tune was told.
        self.told: list[Any] = []

    def written(self) -> list[str]:
        """The names of the events in the event log, but for its first one."""
        return [event["event"] for event in self.logged()[1:]]

    def logged(self, name: str | None = None) -> list[dict[str, Any]]:
        """The events in the event log: all, or those of this name."""
        return [each for each in read_events(self._directory / EVENT_LOG_NAME) if name in (None, each["event"])]

    def placed(
        self,
        share: float,
        trainable: type = FunctionTrainable,
        loaded: bool = True,
        name: str = "a",
        params: dict[str, Any] | None = None,
        progress: dict[str, Any] | None = None,
    ) -> TrialRun:
        """A trial of this share, loaded into a worker; or that worker loads it. ``params``: its hyperparameters.

        ``progress``: what the driver before has kept with it.
        """
        kept = {} if progress is None else {PROGRESS: progress}
        trial = tunes_trial(
            name,
            {"GPU": share},
            status="RUNNING",
            evaluated_params=params or {},
            config=params or {},
            get_trainable_cls=lambda: trainable,
            run_metadata=SimpleNamespace(last_result={}, **kept),
        )
        self.manager.note_trial(trial)
        tracked = self.manager.add_actor(
            None,
            {"config": {TRIAL_INFO: trial}},
            None,
            on_start=lambda tracked: self.told.append("started"),
            on_error=lambda tracked, error: self.told.append(error),
        )
        self.manager._advance()
        run = self.manager._runs[tracked]
        assert run.life.place == "loading"
        if loaded:
            self.loaded(run, LOADED)
            assert run.life.place == "live"
        return run

    def tell(self, run: TrialRun, event: life.Event) -> None:
        """Something happened to the trial."""
        self.manager._shell.tell(run, event)

    def loaded(self, run: TrialRun, value: Any) -> None:
        """The leader has answered ``load``."""
        self.manager._shell.leader_answered(run, leader_of(run), leader_of(run), value)

    def answer_newest(self, value: Any) -> None:
        """The newest call of a worker is answered."""
        _, handler = self.manager._calls._handlers.popitem()
        handler(value)

    def answered(self, run: TrialRun, value: Any) -> None:
        """The leader has answered the oldest call."""
        self.manager._shell.leader_answered(run, leader_of(run), run.life.calls[0], value)

    def attached(self, run: TrialRun, worker: PooledWorker, value: Any) -> None:
        """A new worker has answered ``attach``."""
        self.manager._shell._attached(run, worker, value)

    def follower_ended(self, run: TrialRun, worker: PooledWorker, value: Any) -> None:
        """A follower has answered ``follow``."""
        self.manager._shell._followed(run, worker, value)

    def trains(self, run: TrialRun, iteration: int, **facts: Any) -> None:
        """Tune asks for an iteration, and the leader of the elastic trial does it. ``facts``: of `GroupFacts`."""
        self.manager.schedule_actor_task(run.tracked, "train")
        known = replace(LOADED, **{"calls_modules": True, **facts})
        self.answered(run, IterationReply({"training_iteration": iteration}, "elastic", 1.0, iteration, known))
        self.manager._advance()


def leader_of(run: TrialRun) -> PooledWorker:
    """The trial's leader."""
    leader = run.life.crew.leader
    assert isinstance(leader, PooledWorker)
    return leader


@pytest.fixture
def tried(tmp_path: Path) -> Iterator[Tried]:
    with standing_alone(tmp_path, Devices(), Pool) as manager:
        yield Tried(manager, tmp_path)


def growing(tried: Tried) -> tuple[TrialRun, PooledWorker]:
    """An elastic trial with one worker, and a second one that was told to attach itself."""
    run = tried.placed(1.0)
    tried.trains(run, 1)
    assert run.life.crew.change == "attaching"
    return run, tried.pool.workers["w2"]

"""A request for a worker is served, waits, or hears of a death. No Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from fluidtune.cluster.hosting.messages import WorkerInfo
from fluidtune.cluster.pool import PooledWorker
from fluidtune.engine import messages as m
from fluidtune.trials import messages as life
from fluidtune.tune import worker_answers
from fluidtune.tune.ray_calls import DeviceRevoked, RayCalls
from fluidtune.tune.worker_dispatch import WorkerDispatch, WorkerRequest
from tests.tune.tried_manager import Pool

JOINER, DIED = PooledWorker("w1", 1, None, 0.0), RayActorError()


class WaitingPool(Pool):
    """Every device has an idle worker, or starts one, or has neither yet."""

    def __init__(self) -> None:
        super().__init__()
        self.serves = False
        self.warm: PooledWorker | None = None
        self.unknown: list[int] = []
        self.plain = ""

    def stop_forking(self, why: str) -> None:
        self.plain = why

    def unknown_gpus(self, device: int, others: tuple[int, ...]) -> list[int]:
        return [each for each in self.unknown if each in others]

    def note_gpu(self, worker: PooledWorker) -> None:
        self.unknown = [device for device in self.unknown if device != worker.device]

    def start_probe(self, device: int) -> PooledWorker | None:
        starting = any(worker.starting for worker in self.workers.values() if worker.device == device)
        return None if starting else self.start_worker(device, ())

    def discard_worker(self, worker: PooledWorker) -> None:
        del self.workers[worker.name]

    def can_serve(self, device: int, others: tuple[int, ...]) -> bool:
        return self.serves

    def take_idle_worker(self, device: int, others: tuple[int, ...]) -> PooledWorker | None:
        return self.warm

    def start_worker(self, device: int, others: tuple[int, ...]) -> PooledWorker:
        actor = SimpleNamespace(info=SimpleNamespace(remote=lambda: f"info-{device}"))
        worker = PooledWorker(f"new-{device}", device, actor, 0.0)
        self.workers[worker.name] = worker
        return worker

    forget_worker = discard_worker


class Log:
    """Remembers what was written down."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, event: str, **fields: Any) -> None:
        self.lines.append(event)

    def worker_started(self, worker: PooledWorker, info: WorkerInfo) -> None:
        self.lines.append(f"worker_started {worker.name} {info.pid}")

    def worker_lost(self, worker: PooledWorker, reason: str) -> None:
        self.lines.append(f"worker_lost {worker.name} {reason}")


class Calls(RayCalls):
    """Calls are answered by the test."""

    def answer(self, future: Any, value: Any) -> None:
        self._handlers.pop(future)(value)


class Desk:
    """A dispatch with what it works on; ``got`` is what the requests were told."""

    def __init__(self) -> None:
        self.pool, self.log, self.calls = WaitingPool(), Log(), Calls()
        self.news: tuple[dict[int, str], list[int]] = ({}, [])
        self.revoked: list[tuple[int, Any]] = []
        devices = SimpleNamespace(
            urgent=False,
            given_back=set(),
            poll=lambda: self.news,
            leaving=lambda: [],
            revoked=lambda *device_and_group: self.revoked.append(device_and_group),
            nodes={},
            reasons={},
        )
        setup = SimpleNamespace(shown_nodes=lambda came: came)
        telemetry = SimpleNamespace(note_kind=lambda device, model: None)
        job: Any = SimpleNamespace(pool=self.pool, devices=devices, setup=setup, log=self.log, gpu_telemetry=telemetry)
        self.events: list[m.Event] = []
        self.got: list[str] = []
        self.dispatch = WorkerDispatch(job, self.calls, self.events.append)

    def request(self, device: int, others: tuple[int, ...] = (), name: str = "", **how: Any) -> None:
        how.setdefault("still_wanted", lambda: True)
        self.dispatch.request_worker(
            WorkerRequest(device, others, lambda worker: self.got.append(f"{name}{worker.name}"), **how)
        )


@pytest.fixture
def desk() -> Desk:
    return Desk()


def info() -> WorkerInfo:
    return WorkerInfo(pid=1, gpus=["7"])


def test_a_device_that_is_taken_away_while_it_is_asked_which_gpu_it_is(desk: Desk) -> None:
    # Seen: the search ended with Ray's exception, and its driver stood still meanwhile.
    desk.pool.serves, desk.pool.unknown = True, [1]
    desk.request(0, others=(1,))
    desk.news = ({}, [1])
    desk.calls.answer("info-1", DeviceRevoked())
    assert desk.revoked and m.DeviceLost(1) in desk.events and not desk.pool.workers
    desk.dispatch.serve_requests()
    assert not desk.got, "the engine gives the trial other devices"


def unloaded(desk: Desk, answer: object) -> None:
    """The only worker answers this when it is to unload its trial."""
    actor = SimpleNamespace(unload=SimpleNamespace(remote=lambda keep: "unload"))
    desk.pool.workers["old"] = worker = PooledWorker("old", 1, actor, 0.0)
    desk.dispatch.unload_trial(worker, 30.0, then=lambda: desk.got.append("unloaded"))
    desk.calls.answer("unload", answer)


def test_after_a_process_whose_trial_cannot_end_in_a_fork_no_more_are_forked(desk: Desk) -> None:
    # Seen: with Ray 2.44 a trial whose `stop` imported torch ended its process without a word of why.
    named = "fluidtune.cluster.forks.plain_process.NeedsPlainProcess"
    unloaded(desk, RuntimeError(f"{named}: torch was imported\nof it, the rest"))
    assert desk.pool.plain == "torch was imported" and not desk.pool.workers and not desk.log.lines


def test_a_worker_that_is_dead_when_it_is_to_unload_its_trial_is_lost_and_not_replaced(desk: Desk) -> None:
    # The followers of a killed leader say first that their group broke. Seen: `worker_lost` was not logged.
    unloaded(desk, RayActorError(error_msg="killed"))
    assert desk.log.lines == ["worker_lost old killed"] and desk.got == ["unloaded"] and not desk.pool.workers


@pytest.mark.parametrize(
    ("value", "event"),
    [
        (None, life.Attached(JOINER)),
        (DIED, life.NotAttached(JOINER, "died", str(DIED))),
        ("another trial's", life.NotAttached(JOINER, "refused", "another trial's")),
        (
            RayTaskError("attach", "Traceback", ValueError("no")),
            life.NotAttached(JOINER, "refused", "ValueError('no')"),
        ),
    ],
)
def test_what_a_worker_answers_that_is_to_follow(value: Any, event: life.Event) -> None:
    assert worker_answers.attached(JOINER, value, there=True) == event
    assert worker_answers.attached(JOINER, DIED, there=False) == life.NotAttached(JOINER, "over", str(DIED))

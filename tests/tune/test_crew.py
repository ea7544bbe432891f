"""Who waits for a worker gets one, or is told that it died. No Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.pool import PooledWorker
from fluidtune.tune.crew import Crew


class Job:
    """Its devices have a worker at once, or not yet."""

    def __init__(self) -> None:
        self.there = False
        self.lost: list[str] = []
        self.reservation = SimpleNamespace(complete=True)

    def ready(self, device: int, others: tuple[int, ...]) -> bool:
        return self.there

    def take(self, device: int, others: tuple[int, ...]) -> tuple[PooledWorker, bool]:
        return PooledWorker(f"new-{device}", device, None, 0.0), False

    def worker_lost(self, worker: PooledWorker, reason: str) -> None:
        self.lost.append(worker.name)

    def poll_devices(self) -> list[Any]:
        return []


@pytest.fixture
def job() -> Job:
    return Job()


def test_who_waits_for_a_worker_that_dies_may_go_elsewhere(job: Job) -> None:
    crew, got = Crew(job), []  # type: ignore[arg-type, var-annotated]
    for device in (1, 2):
        crew.take(device, (), lambda worker: got.append(worker.name), lambda d=device: got.append(f"died-{d}"))
    crew.take(1, (), lambda worker: got.append(f"patient-{worker.name}"))
    crew.lost(PooledWorker("old", 1, None, 0.0), RuntimeError("killed"))
    assert got == ["died-1"] and job.lost == ["old"]
    crew.serve()
    assert got == ["died-1"]
    job.there = True
    crew.serve()
    assert got == ["died-1", "new-2", "patient-new-1"]

"""Who waits for a worker gets one, or is told that it died. No Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace

from fluidtune.cluster.pool import PooledWorker
from fluidtune.tune.crew import Crew


class Workers:
    """Its devices have a worker at once, or not yet."""

    def __init__(self) -> None:
        self.there = False
        self.dead: list[str] = []

    def ready(self, device: int, others: tuple[int, ...]) -> bool:
        return self.there

    def take(self, device: int, others: tuple[int, ...]) -> tuple[PooledWorker, bool]:
        return PooledWorker(f"new-{device}", device, None, 0.0), False

    def lost(self, worker: PooledWorker, reason: str) -> None:
        self.dead.append(worker.name)


def test_who_waits_for_a_worker_that_dies_may_go_elsewhere() -> None:
    workers, got = Workers(), []  # type: ignore[var-annotated]
    job = SimpleNamespace(workers=workers, reservation=SimpleNamespace(complete=True), poll_devices=list)
    crew = Crew(job)  # type: ignore[arg-type]
    for device in (1, 2):
        crew.take(device, (), lambda worker: got.append(worker.name), lambda d=device: got.append(f"died-{d}"))
    crew.take(1, (), lambda worker: got.append(f"patient-{worker.name}"))
    crew.lost(PooledWorker("old", 1, None, 0.0), RuntimeError("killed"))
    assert got == ["died-1"] and workers.dead == ["old"]
    crew.serve()
    assert got == ["died-1"]
    workers.there = True
    crew.serve()
    assert got == ["died-1", "new-2", "patient-new-1"]

"""Who waits for a worker gets one, or is told that it died. No Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace

from fluidtune.cluster.pool import PooledWorker
from fluidtune.engine import messages as m
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


def always() -> bool:
    return True


def test_who_waits_for_a_worker_that_dies_may_go_elsewhere() -> None:
    workers, got = Workers(), []  # type: ignore[var-annotated]
    job = SimpleNamespace(workers=workers, reservation=SimpleNamespace(complete=True), poll_devices=list)
    crew = Crew(job)  # type: ignore[arg-type]
    for device in (1, 2):
        crew.take(device, (), lambda worker: got.append(worker.name), always, lambda d=device: got.append(f"died-{d}"))
    crew.take(1, (), lambda worker: got.append(f"patient-{worker.name}"), always)
    crew.take(1, (), lambda worker: got.append(f"gone-{worker.name}"), lambda: workers.there is False)
    crew.lost(PooledWorker("old", 1, None, 0.0), RuntimeError("killed"))
    assert got == ["died-1"] and workers.dead == ["old"]
    crew.serve()
    assert got == ["died-1"]
    workers.there = True
    crew.serve()
    assert got == ["died-1", "new-2", "patient-new-1"]


def test_nobody_waits_for_a_worker_of_a_device_that_is_gone() -> None:
    workers, got = Workers(), []  # type: ignore[var-annotated]
    news = [m.DeviceLost(1)]
    job = SimpleNamespace(workers=workers, reservation=SimpleNamespace(complete=False), poll_devices=lambda: news)
    crew = Crew(job)  # type: ignore[arg-type]
    for device, others in ((0, ()), (1, ()), (0, (1,)), (2, ())):
        crew.take(device, others, lambda worker: got.append(worker.name), always)
    crew.poll()
    assert crew.events == news
    workers.there = True
    crew.serve()
    assert got == ["new-0", "new-2"]

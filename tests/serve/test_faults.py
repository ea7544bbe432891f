"""Seeded faults over the scheduler, and that their checks can fail. `tests.serve.fault_schedules` runs more."""

from __future__ import annotations

import itertools
import math

import pytest

from symphony_serve.gpu_table import GpuTable
from symphony_serve.matching import Matching
from symphony_serve.model_side import ModelSide
from symphony_serve.scheduler import Scheduler
from tests.serve.fault_schedules import Violation, World


def test_a_few_schedules():
    told = [World(seed).run() for seed in range(3)]
    assert all(told)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_seeded_faults(first):
    outcomes = set()
    for seed in range(first, first + 50):
        outcomes.update(World(seed).run().values())
    assert outcomes >= {"answered", "LATE", "CANCELLED"}


def test_a_seed_is_a_schedule():
    logs = []
    for _ in range(2):
        lines: list[str] = []
        World(5, lines.append).run()
        logs.append(lines)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 20


def _forget(monkeypatch):
    """Requests of a lost GPU are not taken back."""
    monkeypatch.setattr(Scheduler, "_take_back", lambda self, batches, now, out: None)


def _keep_open(monkeypatch):
    """A request that is refused stays in the books."""
    monkeypatch.setattr(Scheduler, "_refuse", lambda self, refuse, out: out.append(refuse))


def _trust(monkeypatch):
    """A GPU that never answers is waited for."""
    monkeypatch.setattr(GpuTable, "suspects", lambda self, now: [])
    monkeypatch.setattr(GpuTable, "watch_at", lambda self: math.inf)


def _old_token(monkeypatch):
    """A GPU that comes back keeps its former token."""
    join = GpuTable.join
    monkeypatch.setattr(GpuTable, "join", lambda self, gpu, token, *given: join(self, gpu, max(1, token - 1), *given))


def _late(monkeypatch):
    """Batches start a little after they should."""
    take = ModelSide.take

    def late(self, now, gpu):
        batch = take(self, now, gpu)
        return batch and (batch[0], batch[1] + 2.0, batch[2])

    monkeypatch.setattr(ModelSide, "take", late)


def wait_on(monkeypatch, seconds):
    """Offers that wait for a GPU expire later than they should."""
    push = Matching._push_ready

    def pushed(self, model, offer, standing):
        standing.offer = offer._replace(latest=offer.latest + seconds)
        push(self, model, standing.offer, standing)

    monkeypatch.setattr(Matching, "_push_ready", pushed)


def _wait(monkeypatch):
    wait_on(monkeypatch, 30.0)


def _wait_a_little(monkeypatch):
    """A batch of 1 takes 6 s: so long before its deadline a request is refused."""
    wait_on(monkeypatch, 6.5)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        *((fault, "seed") for fault in (_forget, _keep_open, _old_token, _late, _trust)),
        (_wait, "refused too late"),
        (_wait_a_little, "refused too late"),
    ],
)
def test_the_checks_can_fail(monkeypatch, fault, said):
    fault(monkeypatch)
    with pytest.raises(Violation, match=said):
        for seed in itertools.islice(itertools.count(), 60):
            World(seed).run()

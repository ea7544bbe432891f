"""A loop that keeps samples of one turn for the next is told from one whose variables only still hold them."""

from __future__ import annotations

from typing import Any

import torch

from fluidtune.elastic.data import kept_samples
from fluidtune.elastic.data.kept_samples import KeptSamples


class Loop:
    """Turns of ten batches. ``rest``: what its variables hold at their end."""

    def __init__(self) -> None:
        self.kept = KeptSamples()
        self.rest: list[Any] = []

    def turn(self, keep: Any = lambda batch: [], step: bool = True) -> None:
        now: list[Any] = []
        for number in range(10):
            batch = [torch.ones(4, 2), torch.ones(4)]
            self.kept.note(0, batch)
            now += keep(batch)
            if number == 0:
                self.rest = now
            if step:
                self.kept.stepped()
            self.last = batch
        self.kept.next_turn()

    def obstacles(self) -> tuple[bool, bool]:
        return self.kept.obstacle(lasting=False) is not None, self.kept.obstacle(lasting=True) is not None


def test_the_last_batch_is_what_a_loops_variables_hold():
    loop = Loop()
    for _ in range(3):
        loop.turn()
        assert loop.obstacles() == (False, False)


def test_what_is_collected_in_a_turn_and_dropped_before_the_next_step_delays_a_growth_once():
    loop = Loop()
    loop.turn(lambda batch: [batch[1]])
    assert loop.obstacles() == (True, False)
    loop.turn(lambda batch: [batch[1]])
    assert loop.obstacles() == (False, False)


def test_rows_of_batches_that_are_kept_until_the_next_step_end_a_growth():
    loop = Loop()
    hard: list[Any] = []
    for last in (False, True):
        loop.turn(lambda batch: hard.append(batch[0][1]) or [])
        assert loop.obstacles() == (True, last)
    assert loop.kept.keeps


def test_a_turn_without_a_step_decides_nothing():
    loop = Loop()
    loop.turn(lambda batch: [batch[0]])
    loop.turn(lambda batch: [batch[0]], step=False)
    assert loop.obstacles() == (True, False)


def test_a_long_turn_remembers_no_tensor_that_the_loop_let_go(monkeypatch):
    monkeypatch.setattr(kept_samples, "_MANY", 8)
    loop = Loop()
    loop.kept = KeptSamples()
    for _ in range(100):
        loop.kept.note(0, [torch.ones(1)])
    assert len(loop.kept._now) <= 9

"""A loop that keeps samples of one turn for the next is told from one whose variables only still hold them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fluidtune.elastic.data import kept_samples
from fluidtune.elastic.data.kept_samples import KeptSamples


class Loop:
    """Turns of ten batches. ``rest``: what its variables hold at their end."""

    def __init__(self, accumulates: int = 1, ahead: int = 0) -> None:
        self.kept = KeptSamples()
        self.accumulates, self.ahead = accumulates, ahead
        self.rest: list[Any] = []

    def turn(self, keep: Callable[[list[torch.Tensor]], list[Any]] = lambda batch: [], step: bool = True) -> None:
        now: list[Any] = []
        held: deque[Any] = deque(maxlen=self.accumulates + self.ahead)
        for number in range(10 + self.ahead):
            if number < 10:
                held.append([torch.ones(4, 2), torch.ones(4)])
                self.kept.note(held[-1])
                now += keep(held[-1])
            done = number + 1 - self.ahead
            if done > 0 and done % self.accumulates == 0:
                self.rest = [now, held]  # from the last turn's on, it has those of this one
                if step:
                    self.kept.stepped()
        self.kept.next_turn()

    def obstacles(self) -> tuple[bool, bool]:
        return self.kept.obstacle(lasting=False) is not None, self.kept.obstacle(lasting=True) is not None


@pytest.mark.parametrize(("accumulates", "ahead"), [(1, 0), (2, 0), (5, 0), (1, 1), (2, 2)])
def test_the_batches_of_the_last_steps_are_what_a_loops_variables_hold(accumulates, ahead):
    loop = Loop(accumulates, ahead)
    for _ in range(3):
        loop.turn()
        assert loop.obstacles() == (False, False)


def test_what_is_collected_in_a_turn_and_dropped_before_the_next_step_delays_a_growth_once():
    loop = Loop()
    loop.turn(lambda batch: [batch[0]])
    assert loop.obstacles() == (True, False)
    loop.turn(lambda batch: [batch[0]])
    assert loop.obstacles() == (False, False)


def test_rows_of_batches_that_are_kept_until_the_next_step_end_a_growth():
    loop = Loop()
    hard: list[Any] = []
    for last in (False, True):
        loop.turn(lambda batch: hard.append(batch[0][1]) or [])
        assert loop.obstacles() == (True, last)
    assert loop.kept.keeps


def test_targets_that_are_kept_for_a_metric_are_no_samples():
    loop = Loop()
    targets: list[Any] = []
    for _ in range(2):
        loop.turn(lambda batch: targets.append(batch[1]) or [])
        assert loop.obstacles() == (False, False)


def test_a_turn_without_a_step_decides_nothing():
    loop = Loop()
    hard: list[Any] = []
    loop.turn(lambda batch: hard.append(batch[0]) or [])
    loop.turn(step=False)
    assert loop.obstacles() == (True, False)
    hard.clear()
    loop.turn()
    assert loop.obstacles() == (False, False)


def test_a_long_turn_remembers_no_tensor_that_the_loop_let_go(monkeypatch):
    monkeypatch.setattr(kept_samples, "_MANY", 8)
    kept = KeptSamples()
    for _ in range(100):
        kept.note([torch.ones(1)])
        kept.stepped()
    assert len(kept._now) <= 9

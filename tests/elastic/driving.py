"""The driver's part in the tests: take one trial through given widths, one boundary at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fluidtune.elastic import Reform
from fluidtune.testing.processes import PeerProcess, until

from . import trials


class Driver:
    """``pool[0]`` leads; the others are spare followers."""

    def __init__(self, pool: list[PeerProcess], trial: Callable[..., Any], config: dict[str, Any]) -> None:
        self.pool = pool
        self.trial = trial
        self.config = config
        self.generation = 0
        self.width = 1
        self.followers_started: set[int] = set()
        pool[0].call(trials.start, trial, config, True, "w0")
        until(lambda: pool[0].call(trials.address))

    def resize(self, width: int) -> None:
        """At the leader's next boundary."""
        self.generation += 1
        members = tuple(f"w{i}" for i in range(width))
        reform = Reform(self.generation, members, self.pool[0].call(trials.address))
        joining = list(range(self.width, width))
        for i in joining:
            self.pool[i].call(trials.start, self.trial, self.config, False, f"w{i}")
        for i in joining:
            assert self.pool[i].call(trials.enter, reform)
        until(lambda: self.pool[0].call(trials.announced, self.generation, joining))
        self.pool[0].call(trials.direct, reform)
        self.width = width

    def turn(self, done: int) -> None:
        """Let the leader run until it has made ``done`` reports, and stand there."""
        leader = self.pool[0]
        until(lambda: len(leader.call(trials.reports)) >= done or leader.call(trials.outcome, 0)[0] != "runs")


def run(
    pool: list[PeerProcess],
    trial: Callable[..., Any],
    config: dict[str, Any],
    widths: Sequence[int],
    drives: Callable[..., Driver] = Driver,
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """The trial with widths[k] workers in turn k + 1, and one in turn 0: (reports, final weights of each)."""
    driver = drives(pool, trial, config)
    for turn, width in enumerate(widths, start=1):
        driver.turn(turn)
        if width != driver.width:
            driver.resize(width)
        pool[0].call(trials.allow)
    driver.turn(len(widths) + 1)
    pool[0].call(trials.allow)
    endings = [worker.call(trials.outcome) for worker in pool[: driver.width]]
    assert all(kind == "returned" for kind, _ in endings), endings
    return pool[0].call(trials.reports), [value for _, value in endings]

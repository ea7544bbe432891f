"""The driver's part in the tests: take one trial through given widths, one boundary at a time."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from fluidtune.elastic import Reform
from tests.contracts.processes import PeerProcess, until

from . import trials


class Refused(Exception):
    """A worker ended with one line of ours."""


def seed() -> None:
    """What the host of a worker does before the trial's code begins there: the leader's streams."""
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)


def same(ours: Any, alone: Any) -> None:
    torch.testing.assert_close(ours, alone, rtol=2e-5, atol=2e-5)


class Driver:
    """``pool[0]`` leads; the others are spare followers."""

    def __init__(self, pool: list[PeerProcess], trial: Callable[..., Any], config: dict[str, Any]) -> None:
        self.pool = pool
        self.trial = trial
        self.config = config
        self.generation = 0
        self.width = 1
        self.joining: list[int] = []
        pool[0].call(seed)
        pool[0].call(trials.start, trial, config, True, "w0")
        until(lambda: pool[0].call(trials.address))

    def resize(self, width: int) -> None:
        """At the leader's next boundary. `Refused` if a joiner does not come to its first boundary."""
        self.generation += 1
        reform = Reform(self.generation, tuple(f"w{i}" for i in range(width)), self.pool[0].call(trials.address))
        joining = self.joining = list(range(self.width, width))
        for i in joining:
            self.pool[i].call(seed)
            self.pool[i].call(trials.start, self.trial, self.config, False, f"w{i}")
        for i in joining:
            if not self.pool[i].call(trials.enter, reform):
                raise Refused(self.pool[i].call(trials.outcome)[1])
        until(lambda: self.pool[0].call(trials.announced, self.generation, joining))
        self.pool[0].call(trials.direct, reform)
        self.width = width

    def turn(self, done: int) -> None:
        """Let the leader run until it has made ``done`` reports, and stand there."""
        until(lambda: len(self.pool[0].call(trials.reports)) >= done or not self.runs())

    def runs(self) -> bool:
        return self.pool[0].call(trials.outcome, 0)[0] == "runs"


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


class Trip(Driver):
    """Takes a trial through its widths, or says with which line it was refused.

    ``refused`` and ``differs``: patterns of what may be said of a growth that did not come or was ended, and of workers
    that differed until that was put right. By default it must reach every width, and the workers must never differ.
    """

    def __init__(
        self,
        pool: list[PeerProcess],
        config: dict[str, Any],
        loop: Callable[..., Any],
        refused: str = "",
        differs: str = "",
    ) -> None:
        self.refused, self.differs = refused, differs
        super().__init__(pool, loop, config)

    def resize(self, width: int) -> None:
        self.dismiss()
        super().resize(width)
        self.width = self.reached()  # the leader has not taken them in so far

    def dismiss(self) -> None:
        """End the joiners that the leader has not taken in so far, and see its width."""
        self.width = self.reached()
        for i in self.joining:
            if i >= self.width:
                self.pool[i].call(trials.leave)
                assert self.pool[i].call(trials.outcome)[0] == "left"

    def reached(self) -> int:
        return self.pool[0].call(trials.facts)["width"]

    def go(self, widths: tuple[int, ...]) -> tuple[list[float], list[Any]]:
        leader = self.pool[0]
        missed: list[str] = []
        differences: list[str | None] = []
        for turn, width in enumerate(widths, start=1):
            self.turn(turn)
            if not self.runs():
                break
            self.width = self.reached()
            if width != self.width:
                self.resize(width)
            leader.call(trials.allow)
            self.turn(turn + 1)
            differences.append(leader.call(trials.difference))
            if self.runs() and self.reached() != width:
                missed.append(f"{self.reached()} workers instead of {width} in turn {turn}")
        if self.runs():
            self.dismiss()
        leader.call(trials.allow, 100)
        endings = [worker.call(trials.outcome) for worker in self.pool[: self.width]]
        if any(kind == "lost" and "CannotDivide(" in text for kind, text in endings):
            raise Refused(next(text for _, text in endings if "CannotDivide(" in text))
        why = leader.call(trials.refused)[1]
        assert not missed or (self.refused and re.search(self.refused, str(why))), f"{missed} {why}"
        ended = {"returned", "left"} if self.refused and why else {"returned"}
        assert endings[0][0] == "returned" and all(kind in ended for kind, _ in endings), endings
        differences.append(leader.call(trials.difference))
        for found in differences:
            assert found is None or (self.differs and re.search(self.differs, found)), found
        reports = leader.call(trials.reports)
        assert len(reports) > len(widths), "the trial had not a turn at each width"
        return reports, [value for kind, value in endings if kind == "returned"]

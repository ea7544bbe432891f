"""A framework's trials at several widths, beside the framework alone: what the tests of all frameworks do with them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fluidtune.elastic.checks.rehearsal import rehearse
from tests.contracts.processes import PeerProcess, peer_processes
from tests.elastic import trials
from tests.elastic.driving import Driver, run

#: Of three resizes: what a trial's width is in the turns after its first one.
WIDTHS = [(1, 1, 1), (2, 2, 2), (1, 2, 1), (3, 2, 3)]


def same(got: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 1e-5) -> None:
    """All values of all reports are equal, as far as sums in another order let them."""
    assert len(got) == len(expected)
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=rel), f"{name} of report {number}"


def same_weights(ours: dict[str, Any], ending: dict[str, Any], within: float = 1e-4) -> None:
    for name, value in ending["weights"].items():
        assert torch.allclose(ours["weights"][name], value, rtol=within, atol=within), name


class AtWidths:
    """``module``: its ``trial`` is the trial. It is imported when it is needed: the framework may not be installed."""

    def __init__(self, module: str) -> None:
        self._name = module

    @property
    def module(self) -> Any:
        return importlib.import_module(f"tests.integrations.{self._name}")

    def trial(self) -> Callable[..., Any]:
        trial: Callable[..., Any] = self.module.trial
        return trial

    def assert_kinds(self, kinds: Sequence[str], refused: Sequence[str]) -> None:
        """The names by which tests are collected are those of the module."""
        assert tuple(self.module.KINDS) == kinds and tuple(self.module.REFUSED) == refused

    def rehearsed(self, kind: str, folder: Path, **config: Any) -> Any:
        """The verdict on the trial, which must have written no file."""
        found = rehearse(lambda: self.trial()({"kind": kind, "folder": str(folder), **config}, lambda _: None))
        assert [path for path in folder.rglob("*") if path.is_file()] == []
        return found

    def refused(self, pool: list[PeerProcess], kind: str, folder: Path) -> None:
        """It stays plain for the reason that its module says."""
        self.stays_plain(pool, kind, folder, self.module.REFUSED[kind][1])

    def alone(self, kind: str, folder: Path, **config: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
        """What the framework gives in this process, without what is ours."""
        return self.plain(kind, folder / "alone", stock=True, **config)

    def plain(self, kind: str, folder: Path, **config: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
        """What the trial gives in this process, outside a session."""
        return trials.plain(self.trial(), {"kind": kind, "folder": str(folder), **config})

    def run(
        self, pool: list[PeerProcess], kind: str, folder: Path, widths: tuple[int, ...], **config: Any
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """The reports, and how each worker ended."""
        return run(pool, self.trial(), {"kind": kind, "folder": str(folder / "ours"), **config}, widths)

    def stays_plain(self, pool: list[PeerProcess], kind: str, folder: Path, why: str) -> None:
        """It reports what it reports alone, and a line says why it has one worker."""
        expected, _ = self.alone(kind, folder)
        config = {"kind": kind, "folder": str(folder / "ours"), "free": True}
        pool[0].call(trials.start, self.trial(), config, True, "w0")
        ending = pool[0].call(trials.outcome)
        assert ending[0] == "returned", ending
        assert why in str(pool[0].call(trials.refused)[1])
        same(pool[0].call(trials.reports), expected, rel=1e-6)

    def goes_on(self, pool: list[PeerProcess], kind: str, folder: Path, stopped: int) -> list[dict[str, Any]]:
        """Grow it after its first turn, end it after ``stopped`` turns, and go on from its commit with two workers."""
        expected, ending = self.alone(kind, folder)
        stopped = min(stopped, len(expected) - 1)
        told = {"commits": str(folder / "commits")}
        driver = Driver(pool, self.trial(), {"kind": kind, "folder": str(folder / "ours"), **told})
        for turn in range(1, stopped + 1):
            driver.turn(turn)
            if turn == 1:
                driver.resize(2)
            if turn == stopped:
                pool[0].call(trials.leave)
            pool[0].call(trials.allow)
        assert pool[0].call(trials.outcome)[0] == "left"
        reports, endings = self.run(pool, kind, folder, (2,) * (len(expected) - stopped - 1), **told)
        same(reports, expected[stopped:])
        for ours in endings:
            same_weights(ours, ending, 1e-3)
        return [ending, *endings]

    def loses_a_worker(self, kind: str, folder: Path) -> None:
        """The leader's loop ends with the loss of its group, through what the framework does about exceptions."""
        with peer_processes(2) as workers:
            driver = Driver(workers, self.trial(), {"kind": kind, "folder": str(folder), "stop": 6})
            driver.turn(1)
            driver.resize(2)
            workers[0].call(trials.allow)
            driver.turn(2)
            workers[1].kill()
            workers[0].call(trials.allow, 6)
            assert workers[0].call(trials.outcome)[0] == "lost"

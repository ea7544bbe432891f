"""Loops of many kinds, mixed: at all widths as alone, or refused in one line; never silently different.

A trial must reach each width that is asked for, unless a line says why that this mix may get (`mixes`).
"""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fluidtune.elastic import Reform
from fluidtune.elastic.checks.rehearsal import rehearse
from fluidtune.testing.processes import PeerProcess, peer_processes, until

from . import trials
from .driving import Driver
from .kinds_of_loops import Mix, trial
from .mixes import HISTORIES, may_be_refused, may_differ, stop_of, table

pytestmark = pytest.mark.slow


class Refused(Exception):
    """A worker ended with one line of ours."""


def seed() -> None:
    """What the host of a worker does before the trial's code begins there: the leader's streams."""
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)


def hosted(config: dict[str, Any], report: Any) -> dict[str, Any]:
    """The trial in a folder of this worker's own, as its host gives it one."""
    folder = Path(config["folder"], trials.here().session.worker)
    folder.mkdir(parents=True, exist_ok=True)  # it may come a second time
    return trial({**config, "folder": str(folder)}, report)


class Trip(Driver):
    """Takes a trial through its widths, or says with which line it was refused.

    ``refused`` and ``differs``: patterns of what may be said of a growth that did not come or was ended, and of workers
    that differed until that was put right. By default it must reach every width, and the workers must never differ.
    """

    def __init__(
        self,
        pool: list[PeerProcess],
        config: dict[str, Any],
        loop: Callable[..., Any] = hosted,
        refused: str = "",
        differs: str = "",
    ) -> None:
        pool[0].call(seed)
        self.joining: list[int] = []
        self.refused, self.differs = refused, differs
        super().__init__(pool, loop, config)

    def resize(self, width: int) -> None:
        self.dismiss()
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

    def dismiss(self) -> None:
        """End the joiners that the leader has not taken in so far, and see its width."""
        self.width = self.pool[0].call(trials.facts)["width"]
        for i in self.joining:
            if i >= self.width:
                self.pool[i].call(trials.leave)
                assert self.pool[i].call(trials.outcome)[0] == "left"

    def go(self, widths: tuple[int, ...]) -> tuple[list[float], list[Any]]:
        leader = self.pool[0]
        missed: list[str] = []
        differences: list[str | None] = []
        for turn, width in enumerate(widths, start=1):
            self.turn(turn)
            if leader.call(trials.outcome, 0)[0] != "runs":
                break
            self.width = leader.call(trials.facts)["width"]
            if width != self.width:
                self.resize(width)
            leader.call(trials.allow)
            self.turn(turn + 1)
            differences.append(leader.call(trials.difference))
            reached = leader.call(trials.facts)["width"]
            if leader.call(trials.outcome, 0)[0] == "runs" and reached != width:
                missed.append(f"{reached} workers instead of {width} in turn {turn}")
        if leader.call(trials.outcome, 0)[0] == "runs":
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


def tree(folder: Path) -> dict[str, Any]:
    """The files of a folder: text as it is, weights by name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".pt":
            loaded = torch.load(path, weights_only=False)
            found[path.name] = dict(loaded if isinstance(loaded, dict) else loaded.state_dict())
        else:
            found[path.name] = path.read_text()
    return found


def same(ours: Any, alone: Any) -> None:
    torch.testing.assert_close(ours, alone, rtol=2e-5, atol=2e-5)


def alike(folder: Path, got: list[float], reports: list[float], values: list[Any], value: Any) -> None:
    """AssertionError if the workers' results, weights or files are not those of the trial alone."""
    same(got, reports)
    for each in values:
        same(each["model"], value["model"])
    same(values[0]["own"], value["own"])
    files, expected = tree(folder / "with" / "w0"), tree(folder / "alone")
    assert list(files) == list(expected)
    for name, content in expected.items():
        if isinstance(content, str):
            assert files[name] == content
        else:
            same(files[name], content)


def compare(pool: Any, folder: Path, mix: Mix, widths: tuple[int, ...]) -> None:
    """AssertionError if the trial, taken through these widths, is not what it is alone. `Refused` if it says why."""
    config = {"mix": mix, "stop": stop_of(mix, widths)}
    for name in ("alone", "with", "rehearsed"):
        (folder / name).mkdir(parents=True)
    seed()
    reports, value = trials.plain(trial, {**config, "folder": str(folder / "alone")})
    seed()
    verdict = rehearse(lambda: trial({**config, "folder": str(folder / "rehearsed")}, lambda loss: None))
    if verdict.kind == "differs":
        raise Refused(verdict.reason)
    assert verdict.kind == "same", verdict
    trip = Trip(
        pool,
        {**config, "folder": str(folder / "with")},
        refused=may_be_refused(mix, widths),
        differs=may_differ(mix),
    )
    got, values = trip.go(widths)
    alike(folder, got, reports, values, value)


def check(pool: Any, folder: Path, mix: Mix, widths: tuple[int, ...]) -> None:
    """`compare`, where a refusal must be one line that this mix may get."""
    try:
        compare(pool, folder, mix, widths)
    except Refused as error:
        allowed = may_be_refused(mix, widths)
        assert allowed and re.search(allowed, str(error)), error
        assert "\n" not in str(error)
    finally:
        gc.collect()  # ends the processes of the loaders that ran here


@pytest.fixture(scope="module")
def pool():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with peer_processes(3) as started:
        yield started
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("history", "mix"),
    list(table()),
    ids=lambda value: "-".join(vars(value).values()) if isinstance(value, Mix) else value,
)
def test_a_loop_gives_at_every_width_what_it_gives_alone(pool, tmp_path, history, mix):
    check(pool, tmp_path, mix, HISTORIES[history])

"""Loops of many kinds, mixed: at all widths as alone, or refused in one line; never silently different."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from fluidtune.elastic import Reform
from fluidtune.elastic.rehearsal import rehearse
from fluidtune.testing.processes import PeerProcess, peer_processes, until

from . import trials
from .driving import Driver
from .kinds_of_loops import DATA, EXTRAS, MODELS, OPTIMIZERS, OUTSIDE, SCHEDULES, STEPS, Mix, trial

pytestmark = pytest.mark.slow

#: The widths of the turns, of which the first is always alone: 1, 2, 3, 1-2-1 and 2-1-3.
WIDTHS = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (2, 1, 1), (2, 1, 3)]
AXES = {
    "model": list(MODELS),
    "optimizer": list(OPTIMIZERS),
    "schedule": list(SCHEDULES),
    "data": list(DATA),
    "step": list(STEPS),
    "extra": list(EXTRAS),
}
KINDS = [(axis, kind) for axis, kinds in AXES.items() for kind in kinds]
#: Mixes for each kind. More: FLUIDTUNE_MIXES=20 pytest tests/elastic/test_kinds_of_loops.py
MIXES = int(os.environ.get("FLUIDTUNE_MIXES", "2"))
#: A loss above this says nothing: a loop that diverges multiplies rounding. Judgement: losses begin below 100.
DIVERGED = 1e6
#: A batch may be fetched before the last one is used, or several are at hand: refused where they are divided unlike.
AHEAD = {"prefetching", "summed", "in step", "in a cycle"}
#: A worker's part of a batch is shorter than the batch.
BY_LENGTH = {"short batches left out", "short batches end the turn"}
#: Mixed with a given kind, these say nothing: a part of one does what the other needs undone.
APART = [
    ({"step": {"scaled", "accumulate", "accumulate over turns", "by gradient", "summed"}}, {"schedule": {"by step"}}),
    ({"step": {"short batches end the turn"}}, {"data": {"batch sampler", "buckets"}}),  # they have no batch size
    ({"data": {"one by one"}}, {"model": {"batch norm", "image", "frozen"}}),  # one sample has no variance
    ({"step": {"penalty"}}, {"model": {"attention"}}),  # torch has no second derivative of it
    ({"step": {"two passes", "recomputed"}}, {"model": {"spectral"}}),  # torch refuses: it changes in each forward
    ({"extra": {"saves its model"}}, {"model": {"parametrised", "spectral"}}),  # torch pickles no such model
    (
        {"extra": {"group added"}},
        {"schedule": set(SCHEDULES) - {"none", "lr by hand"}},
    ),  # they want all groups at first
]


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
    """Takes a trial through its widths, or says with which line it was refused."""

    def __init__(self, pool: list[PeerProcess], config: dict[str, Any], loop: Callable[..., Any] = hosted) -> None:
        pool[0].call(seed)
        self.joining: list[int] = []
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
        for turn, width in enumerate(widths, start=1):
            self.turn(turn)
            if leader.call(trials.outcome, 0)[0] != "runs":
                break
            self.width = leader.call(trials.facts)["width"]  # the loop may end before it is asked again
            if width != self.width:
                self.resize(width)
            leader.call(trials.allow)
        self.turn(len(widths) + 1)
        if leader.call(trials.outcome, 0)[0] == "runs":
            self.dismiss()
        leader.call(trials.allow, 100)
        endings = [worker.call(trials.outcome) for worker in self.pool[: self.width]]
        if any(kind == "lost" and "CannotDivide(" in text for kind, text in endings):
            raise Refused(next(text for _, text in endings if "CannotDivide(" in text))
        assert all(kind == "returned" for kind, _ in endings), endings
        return leader.call(trials.reports), [value for _, value in endings]


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


def compare(pool: Any, folder: Path, mix: Mix, widths: tuple[int, ...]) -> None:
    """AssertionError if the trial, taken through these widths, is not what it is alone. `Refused` if it says why."""
    config = {"mix": mix, "stop": len(widths) + 1}
    if mix.extra == "stops early":  # after three turns: nobody joins then
        widths = (*widths[:2], widths[1])
    for name in ("alone", "with", "rehearsed"):
        (folder / name).mkdir(parents=True)
    seed()
    reports, value = trials.plain(trial, {**config, "folder": str(folder / "alone")})
    assume(all(abs(loss) < DIVERGED for loss in reports))
    seed()
    verdict = rehearse(lambda: trial({**config, "folder": str(folder / "rehearsed")}, lambda loss: None))
    if verdict.kind == "differs":
        raise Refused(verdict.reason)
    assert verdict.kind == "same", verdict
    got, values = Trip(pool, {**config, "folder": str(folder / "with")}).go(widths)
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


def sensible(mix: Mix) -> bool:
    return not any(all(getattr(mix, axis) in kinds for part in pair for axis, kinds in part.items()) for pair in APART)


@pytest.fixture(scope="module")
def pool():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with peer_processes(3) as started:
        yield started
    torch.set_num_threads(threads)


def mixes(axis: str, kind: str) -> st.SearchStrategy[Mix]:
    others = {name: st.sampled_from(kinds) for name, kinds in AXES.items() if name != axis}
    return st.builds(Mix, **others, **{axis: st.just(kind)}).filter(sensible)


def refusable(mix: Mix) -> bool:
    return mix.step in AHEAD | BY_LENGTH or STEPS[mix.step] in OUTSIDE


@pytest.mark.parametrize(("axis", "kind"), KINDS)
def test_a_loop_gives_at_every_width_what_it_gives_alone(pool, tmp_path_factory, axis, kind):
    @settings(
        max_examples=MIXES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(mixes(axis, kind), st.sampled_from(WIDTHS[1:]))
    def each(mix: Mix, widths: tuple[int, ...]) -> None:
        try:
            compare(pool, tmp_path_factory.mktemp("loop"), mix, widths)
        except Refused as error:
            assert refusable(mix), error
        finally:
            gc.collect()  # ends the processes of the loaders that ran here

    each()

"""Which variables a loop carries by itself; and loops in which what looks like one is harmless."""

from __future__ import annotations

import copy
import random
import sys
import time

import numpy
import pytest
import torch

from fluidtune import elastic
from fluidtune.elastic.commits.carried import Carried, read_first

from .kept_loops import EPOCHS, net, parts, step
from .restarts import Trial

SEEN: list[list[str]] = []


def waited(stop):
    """As `elastic.epochs`: notes what the loop around it reads first."""
    code = sys._getframe(1).f_code
    return _waited(code, stop)


def _waited(code, stop):
    for number in range(stop):
        frame = sys._getframe(1)
        while frame.f_code is not code:
            frame = frame.f_back
        SEEN.append(read_first(code, frame.f_lasti))
        yield number


def given(iterable):
    yield from iterable  # as tqdm


def plain():
    a = b = c = d = total = 0
    for epoch in waited(1):
        a += 1
        fresh = b
        fresh = fresh + c
        total = [each for each in range(d)]
        epoch += 1
    return a, total, epoch


def branched(flag=True):
    kept = late = seen = 0
    for _ in given(waited(1)):
        if flag:
            kept = 1
            inside = kept
        seen = inside if flag else 0
        for late in range(2):
            last = late
        if kept and last:
            seen += late
    return seen


def nested():
    outer = counter = 0
    for _ in waited(1):
        for _ in range(2):
            first = outer
            while first < 3:
                first += 1
                counter += first
        try:
            value = counter
        except ValueError:
            value = outer
        with torch.no_grad():
            _ = value
    return value


@pytest.mark.parametrize(
    ("loop", "read", "written_first"),
    [
        (plain, {"a", "b", "c", "d"}, {"fresh", "total", "epoch"}),
        (branched, {"flag", "kept", "inside"}, {"late", "last", "seen"}),
        (nested, {"outer", "counter", "torch"}, {"first", "value"}),
    ],
)
def test_what_an_epoch_reads_before_it_writes_it(loop, read, written_first):
    SEEN.clear()
    loop()
    [found] = SEEN
    assert read <= set(found), found
    assert not written_first & set(found), found


def marked(now, before, prepared=()):
    """The names that have changed between two looks, and those that a mark without fractions shows."""
    looks = iter([before, now])
    carried = Carried(lambda: (next(looks), __name__))
    carried.begin(prepared)
    marks = carried.marks(prepared)
    others = Carried(lambda: (before, __name__))
    others.begin(prepared)
    return marks.apart(others.marks(prepared), exact=True), marks.apart(others.marks(prepared), exact=False)


class Own:
    def __init__(self, **more):
        vars(self).update(more)


class Opaque(Own):
    __module__ = "elsewhere"


def drawn(generator, times):
    for _ in range(times):
        generator.random()
    return generator


def stepped(times):
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 9)
    for _ in range(times):
        scheduler.step()
    return scheduler


CHANGES = {
    "integer": (2, 1, True),
    "fraction": (0.5, 0.25, False),
    "text": ("warm", "cold", True),
    "tensor": (torch.ones(3), torch.zeros(3), False),
    "half": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16), False),
    "indices": (torch.tensor([1]), torch.tensor([2]), True),
    "array": (numpy.ones(2), numpy.zeros(2), False),
    "longer": ([0.1, 0.2], [0.1], True),
    "deep": ({"a": [{"b": {3}}]}, {"a": [{"b": {4}}]}, True),
    "random": (drawn(random.Random(1), 2), drawn(random.Random(1), 1), True),
    "numpy random": (drawn(numpy.random.default_rng(1), 2), drawn(numpy.random.default_rng(1), 1), True),
    "scheduler": (stepped(2), stepped(1), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_shows_in_a_mark(name):
    now, before, roughly = CHANGES[name]
    assert marked({"x": now}, {"x": before}) == (["x"], ["x"] if roughly else [])
    assert marked({"x": now}, {"x": copy.deepcopy(now)}) == ([], [])
    own = marked({"x": Own(part=now, other=1)}, {"x": Own(part=before, other=1)})
    assert own == (["x.part"], ["x.part"] if roughly else [])


def test_what_is_no_state_has_no_mark():
    for now, before in [
        (Opaque(n=1), Opaque(n=2)),
        (print, len),
        ((n for n in ()), (n for n in ())),
        (list(range(200_000)), []),
        (torch.zeros(2**25), torch.ones(2**25)),
    ]:
        assert marked({"x": now}, {"x": before})[0] in ([], ["x"])
        assert marked({"x": now}, {"x": now}) == ([], [])
    assert marked({"x": Opaque(n=1)}, {"x": Opaque(n=2)}) == ([], [])
    assert marked({"start": time.time(), "t0": time.perf_counter()}, {"start": 1.0, "t0": 2.0})[0] == ["start", "t0"]
    assert marked({"epoch_time": 5.0, "data_s": 1.0}, {"epoch_time": 4.0, "data_s": 2.0}) == ([], [])
    model = net()
    assert marked({"model": model}, {"model": net()}, [model])[0] == ["model"]


class Counting:
    def __init__(self, report):
        self.model, self.optimizer, self.loader = elastic.prepare(*parts())
        self.report, self.started, self.calls = report, time.time(), 0

    def fit(self):
        for _ in elastic.epochs(0, EPOCHS):
            self.calls += 1
            self.report(loss=sum(step(self.model, self.optimizer, x, y) for x, y in self.loader))


def test_a_counter_that_does_nothing_yet_is_found_in_the_object_that_has_it(tmp_path):
    trial = Trial(tmp_path)
    for dies in (6, None):
        trial.life(lambda report: Counting(report).fit(), dies=dies)
    assert trial.said[1].startswith(
        "epoch 4 run again from its commit ends with other values of the loop's own: keep what the loop carries from "
        "epoch to epoch (self.calls) in elastic.state() or elastic.prepare()"
    )

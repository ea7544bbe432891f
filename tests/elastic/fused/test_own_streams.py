"""The streams of several trials in one process: each draws what it would draw alone, and copies only what has moved."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.elastic.fused.own_streams import OwnStreams
from fluidtune.elastic.random_streams import Streams, capture_streams, restore_streams


@pytest.fixture(autouse=True)
def own() -> Any:
    before = capture_streams()
    yield
    restore_streams(before)


def initial(seed: int) -> Streams:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return capture_streams()


#: What a loop does between two changes of the baton.
DRAWS: dict[str, Any] = {
    "nothing": lambda: None,
    "python": random.random,
    "a python normal": lambda: random.gauss(0, 1),
    "numpy": lambda: float(numpy.random.rand()),
    "a numpy normal": lambda: float(numpy.random.randn()),
    "two numpy normals": lambda: numpy.random.randn(2).tolist(),
    "many": lambda: [random.random() for _ in range(700)] + numpy.random.rand(700).tolist(),
    "torch": lambda: torch.rand(3).tolist(),
    "numpy seeded": lambda: numpy.random.seed(1),
    "python seeded": lambda: random.seed(1),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(DRAWS))), max_size=30))
def test_each_draws_what_it_would_draw_alone(turns: list[tuple[int, str]]) -> None:
    alone = []
    for number in range(3):
        restore_streams(initial(number))
        alone.append([DRAWS[draw]() for who, draw in turns if who == number] + [DRAWS["a numpy normal"]()])
    streams = [OwnStreams(initial(number)) for number in range(3)]
    drawn: list[list[Any]] = [[], [], []]
    for who, draw in [*turns, *((number, "a numpy normal") for number in range(3))]:
        streams[who].put()
        drawn[who].append(DRAWS[draw]())
        streams[who].take()
    assert drawn == alone


def test_only_a_stream_that_was_drawn_from_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = OwnStreams(initial(3))
    streams.put()
    streams.take()
    copies: Counter[str] = Counter()
    for module in (random, numpy.random):
        copy = getattr(module, "getstate", None) or module.get_state  # type: ignore[attr-defined]

        def counted(copy: Any = copy, name: str = module.__name__) -> Any:
            copies[name] += 1
            return copy()

        monkeypatch.setattr(module, copy.__name__, counted)
    for draw in ("nothing", "torch", "numpy", "nothing", "python", "a numpy normal", "nothing"):
        streams.put()
        DRAWS[draw]()
        streams.take()
    assert copies == {"random": 1, "numpy.random": 2}

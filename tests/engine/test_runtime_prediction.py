"""Seconds per iteration are predicted from hyperparameters."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.engine import Engine
from fluidtune.engine import messages as m
from fluidtune.engine.runtime_prediction import GROWTH, RuntimePredictor

COST = {"width": {"32": 0.2, "64": 0.6, "96": 1.1}, "batch": {"64": 1.0, "128": 0.8}}


def trial(k: int, rng: random.Random) -> tuple[tuple[tuple[str, str], ...], float]:
    width, batch = rng.choice(list(COST["width"])), rng.choice(list(COST["batch"]))
    traits = (("lr", str(rng.random())), ("width", width), ("batch", batch), ("epochs", "9"))
    return traits, COST["width"][width] * COST["batch"][batch]


def test_the_hyperparameters_that_make_trials_slow_are_found() -> None:
    rng, predictor = random.Random(0), RuntimePredictor()
    trials = [trial(k, rng) for k in range(40)]
    for traits, _ in trials:
        predictor.add_trial(traits)
    assert predictor.predict(trials[0][0]) is None
    for k, (traits, seconds) in enumerate(trials[:20]):
        predictor.record_seconds(f"t{k}", traits, seconds)
    for traits, seconds in trials[20:]:
        assert predictor.predict(traits) == pytest.approx(seconds, rel=0.25)
    # A learning rate that no other trial has says nothing, nor does a value that all trials have.
    assert predictor.predict((("lr", trials[0][0][0][1]), ("epochs", "9"))) is None


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from("abc"), st.floats(1e-6, 1e6)), max_size=400))
def test_it_is_seldom_fitted_again_and_never_says_what_no_trial_took(heard: list[tuple[int, str, float]]) -> None:
    predictor = RuntimePredictor()
    for name in "abc" * 2:
        predictor.add_trial((("kind", name),))
    news = sum(predictor.record_seconds(str(k), (("kind", kind),), seconds) for k, kind, seconds in heard)
    assert GROWTH ** (news - 2) <= max(1, len(heard))
    for kind in "abc":
        seconds = predictor.predict((("kind", kind),))
        assert seconds is None or 1e-7 < seconds < 1e7


def test_the_longest_trials_go_first_once_they_are_predicted() -> None:
    engine = Engine()
    engine.handle(m.DeviceGained(0), m.GroupAnnounced("all"), now=0.0)
    order = ["small", "large", "small", "small", "large", "large", "small", "large"]
    added = [m.TrialAdded(f"t{k}", "all", iterations=3.0, traits=(("size", size),)) for k, size in enumerate(order)]
    running = [i.trial for i in engine.handle(*added, now=0.0) if isinstance(i, m.Start)]
    started = []
    while running:
        name = running.pop()
        started.append(order[int(name[1:])])
        seconds = 1.0 if started[-1] == "large" else 0.1
        for _ in range(3):
            engine.handle(m.Result(name, seconds, 1.0), now=0.0)
        running += [i.trial for i in engine.handle(m.TrialEnded(name, "stopped"), now=0.0) if isinstance(i, m.Start)]
    assert started == ["small", "large", "large", "large", "large", "small", "small", "small"]

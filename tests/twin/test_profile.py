"""Profiles: the times that they give, which ones are refused, and where they come from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fluidtune.profiles import DEFAULT, Profile, ProfileError
from fluidtune.report.measured import measure
from tests.report import makers
from tests.report.makers import begin, ended, resized, started

times = st.floats(0.01, 100.0)


def test_placement_and_neighbours_are_read_off():
    profile = Profile("p", {"1": 1.0, "2": 0.6, "11": 0.7, "4": 0.4}, {2: 1.5})
    assert profile.iteration((2,)) == 0.6
    assert profile.iteration((1, 1)) == 0.7
    assert 0.4 < profile.iteration((3,)) < 0.6
    assert profile.iteration((1, 2)) == profile.iteration((2, 1))
    assert profile.iteration((8,)) == 0.4, "wider than recorded is as fast as the widest"
    assert profile.iteration((1,), 3) == pytest.approx(1.5 * 3 / 2), "what is not recorded is time shared out"


@pytest.mark.parametrize(
    "wrong, why",
    [
        ({"seconds": {"2": 1.0}}, "not for '1'"),
        ({"seconds": {"1": -1.0}}, "is -1.0"),
        ({"seconds": {"1": math.nan}}, "nan"),
        ({"seconds": {"1": 1.0, "x": 1.0}}, "'x' is not a placement"),
        ({"seconds": {"1": 1.0}, "packed": {1: 1.0}}, "the key 1"),
        ({"seconds": {"1": 1.0}, "packed": {2: math.inf}}, "inf"),
        ({"seconds": {"1": 1.0}, "memory": 2.0}, "memory is 2.0"),
    ],
)
def test_a_wrong_profile_says_what_is_wrong(wrong: dict, why: str):
    with pytest.raises(ProfileError, match=why):
        Profile("p", **wrong)


def test_a_file_is_written_as_plain_json_and_read(tmp_path: Path):
    DEFAULT.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["packed"]["2"] == 1.05
    assert Profile.load(tmp_path / "p.json") == DEFAULT


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"seconds": {"1": 1}, "speed": 2}', "unknown keys"),
        ('{"seconds": {"1": 1}, "packed": {"two": 2}}', "number of trials"),
        ('{"seconds": {"1": "fast"}}', "'fast'"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(text: str | None, why: str, tmp_path: Path):
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ProfileError, match=why):
        Profile.load(path)


def result(t: float, trial: str, seconds: float) -> dict:
    return makers.result(t, trial, 1, seconds, 1.0)


def test_iterations_are_measured_by_the_trials_that_trained_there():
    events = [started(0, "a", 0)]
    events += [result(float(t), "a", 1.0) for t in (1, 2, 3)]
    # The engine starts b at 3 s, and b loads until 5 s. Until then a has the device to itself.
    events += [started(3, "b", 0), result(4, "a", 1.0), result(5, "a", 1.0)]
    events += [result(6.5, "b", 1.5), result(6.6, "a", 1.5)]
    events += [result(8.0, "b", 1.5), result(8.1, "a", 1.5), ended(8.2, "b")]
    # An iteration is under way when it grows.
    events += [resized(9, "a", 0, 1), result(9.3, "a", 0.8), result(9.9, "a", 0.6)]
    profile = measure(events).profile
    assert profile.seconds == {"1": 1.0, "2": 0.6}
    assert profile.packed == {2: 1.5}


def test_a_trial_that_loads_slows_no_neighbour():
    events = [started(0, "a", 0), result(1.0, "a", 1.0), started(1, "b", 0)]
    events += [*(result(float(t), "a", 1.0) for t in range(2, 12)), result(13.0, "b", 1.0)]
    assert measure(events).profile.packed == {}


def test_a_trial_whose_neighbour_is_gone_is_measured_alone():
    """Whichever event says that it is gone: tests/report/test_occupancy.py."""
    events = [begin(0, 1), started(0, "a", 0), started(0, "b", 0)]
    for t in (2, 4, 6, 8):
        events += [result(t, "a", 2.0), result(t, "b", 2.0)]
    events += [ended(10, "b"), *(result(10.0 + t, "a", 1.0) for t in range(1, 11))]
    profile = measure(events).profile
    assert profile.seconds == {"1": 1.0}
    assert profile.packed == {2: 2.0}


def test_trials_of_different_cost_share_one_profile():
    events = []
    for trial, cost in (("a", 1.0), ("b", 3.0), ("c", 1.0)):
        events.append(started(0, trial, ord(trial)))
        events += [result(cost * k, trial, cost) for k in range(1, 5)]
    measured = measure(sorted(events, key=lambda event: event["t"]))
    assert measured.profile.seconds == {"1": 1.0}
    assert measured.costs == {"a": 1.0, "b": 3.0, "c": 1.0}


def test_a_run_without_an_iteration_is_no_profile():
    with pytest.raises(ProfileError, match="no finished iteration"):
        measure([started(0, "a", 0)])

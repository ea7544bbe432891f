"""Orloj on one worker of the twin: the published columns as far as they can be reached, and the baselines."""

import pytest

from benchmarks.orloj import SHOWN, WANTED, WORKLOADS, Runs, accepts_b, accepts_columns
from benchmarks.orloj_cases import load, modal
from benchmarks.orloj_worker import SIDES, ProfileChanged, ToldScheduler
from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.messages import Request
from symphony_serve.model_side import DEFERRED, Model
from symphony_serve.profiles import Profile
from tests.serve.driving import Driver

#: One seed instead of the five of the command.
RUNS = Runs(1, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WANTED))
def test_columns(name: str) -> None:
    assert RUNS.shown(name, WORKLOADS[name], SIDES["orloj"]) == pytest.approx(WANTED[name], abs=0.03)


def rate(side: str, multiple: float) -> float:
    case = modal(2)
    return SIDES[side](case, load(case, multiple, 1, 4000), case.profile(1)).run().good / 4000


@pytest.mark.slow
def test_no_sound_baseline_is_ahead_where_the_slo_is_tight() -> None:
    ours = rate("orloj", 1.5)
    for other in ("edf", "fifo", "window", "nexus", "clipper", "clockwork", "clockwork_1"):
        assert ours > rate(other, 1.5), other


def columns(**changed: float) -> dict[str, dict[str, list[float]]]:
    """What `orloj.columns` finds; by workload and place, how much more Orloj has than is wanted."""
    found = {name: {"orloj": list(row), "orloj_all": [1.0] * 5, "edf": [0.4] * 5} for name, row in WANTED.items()}
    for where, more in changed.items():
        name, place = where.rsplit("_", 1)
        found[name]["orloj"][int(place)] += more
    return found


def test_what_is_accepted() -> None:
    assert set(SHOWN) <= WANTED.keys()
    assert set(accepts_columns(columns()).values()) == {True}
    assert accepts_columns(columns(two_modal_2=0.03)) == {"figures": True, "baselines": True, "peaks": True}
    assert not accepts_columns(columns(bursty_0=-0.031))["figures"]
    assert accepts_columns(columns(two_modal_0=0.081)) == {"figures": False, "baselines": True, "peaks": False}
    for place, rate in ((0, 0.60), (2, 0.961)):
        found = columns()
        found["two_modal"]["edf"][place] = rate
        assert accepts_columns(found) == {"figures": True, "baselines": False, "peaks": True}


@pytest.mark.parametrize(("last", "lower", "good"), [(0.62, 0.60, True), (0.631, 0.60, False), (0.62, 0.57, False)])
def test_what_is_accepted_of_b(last: float, lower: float, good: bool) -> None:
    found = {f"1e{i}": [0.61, 0.9] for i in range(-5, -1)}
    assert accepts_b({"1e-6": [last, 0.9], **found, "1e-1": [lower, 0.9]}) == good


def test_a_profile_that_changes_moves_the_start() -> None:
    run = Driver(ToldScheduler([Model("m", Profile.linear(1.0, 5.0, 16), 12.0, Fifo, DEFERRED)]))
    run.joins(0.0)
    run.requests([Request(1, "m", 0.0, 12.0)])
    run.at(1.0, ProfileChanged("m", Profile.linear(1.5, 7.5, 16)))
    (dispatch,) = run.run().dispatches
    assert (dispatch.start, dispatch.seconds) == (12.0 - 10.5, 9.0)

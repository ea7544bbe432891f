"""Policies by name, one of a user's own, and the order in which each puts jobs."""

from __future__ import annotations

import pytest

from salus_share import Policy, SalusError, policy
from salus_share.policies import Standing
from salus_share.turns import credited, next_turn, served

JOBS = {
    "first": Standing(1, service=5.0, last_turn=8, remaining=50.0),
    "short": Standing(2, service=9.0, last_turn=9, remaining=1.0),
    "unknown": Standing(3, service=7.0, last_turn=3),
    "poor": Standing(4, service=2.0, last_turn=7, remaining=60.0),
    "promoted": Standing(5, service=8.0, last_turn=6, remaining=70.0, rung=1),
}


class Last(Policy):
    """The job that arrived last goes first."""

    name = "last"

    def turn(self, job):
        return (-job.arrival,)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("FIFO", ["first", "short", "unknown", "poor", "promoted"]),
        ("PACK", ["unknown", "promoted", "poor", "first", "short"]),
        ("SRTF", ["short", "first", "poor", "promoted", "unknown"]),
        ("FAIR", ["poor", "first", "unknown", "promoted", "short"]),
        ("HPT", ["promoted", "poor", "first", "unknown", "short"]),
        (f"{__name__}:Last", ["promoted", "poor", "unknown", "short", "first"]),
    ],
)
def test_turns(name, order) -> None:
    left, found = dict(JOBS), []
    while left:
        found.append(next_turn(policy(name), left))
        del left[found[-1]]
    assert found == order
    assert next_turn(policy(name), {}) is None


@pytest.mark.parametrize("name", ["fair", "", "nosuchmodule:X", "math:nosuch", "math:floor", "builtins:dict"])
def test_no_policy(name) -> None:
    with pytest.raises(SalusError, match="policy"):
        policy(name)


def test_what_an_iteration_changes() -> None:
    assert served(Standing(1, 2.0, 3, 1.5), 1.0, 9) == Standing(1, 3.0, 9, 0.5)
    assert served(Standing(1, remaining=0.5), 1.0, 9).remaining == 0.0
    assert served(Standing(1), 1.0, 9).remaining is None


def test_credit_is_bounded() -> None:
    assert credited(2.0, 50.0) == 49.0
    assert credited(49.5, 50.0) == 49.5
    assert credited(60.0, 50.0) == 60.0

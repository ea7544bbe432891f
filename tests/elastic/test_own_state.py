"""Trials that bring their own state: what they commit, and how they go on in place when a worker dies."""

from __future__ import annotations

import pytest

from fluidtune.elastic import CommitStore
from tests.contracts.processes import peer_processes

from . import trials
from .driving import Driver


@pytest.fixture
def pool():
    with peer_processes(3) as started:
        yield started


def in_second_turn(pool, folder, width):
    """A trial of this many workers whose leader stands at the report of its second turn."""
    driver = Driver(pool, trials.counting, {"stop": 5, "commits": str(folder)})
    driver.turn(1)
    driver.resize(width)
    pool[0].call(trials.allow)
    driver.turn(2)
    return driver


def test_a_leader_goes_on_when_its_follower_dies(pool, tmp_path):
    driver = in_second_turn(pool, tmp_path, width=2)
    pool[1].kill()
    for turn in (3, 4, 5):
        pool[0].call(trials.allow)
        driver.turn(turn)
    facts = pool[0].call(trials.facts)
    assert facts["width"] == 1 and facts["generation"] == facts["last_reform"][0] == 1.001
    pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome) == ("returned", [1, 2, 1, 1, 1])
    assert pool[0].call(trials.reports) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_follower_commits_in_place_of_a_leader_that_died(pool, tmp_path):
    driver = in_second_turn(pool, tmp_path, width=3)
    pool[0].call(trials.allow)
    driver.turn(3)
    pool[0].kill()
    for worker in pool[1:]:
        assert worker.call(trials.outcome)[0] == "lost"
    for worker in ("w1", "w2"):
        commit = CommitStore(str(tmp_path / f"heir-{worker}")).load()
        # What was saved before the leader's last order, and what the leader had reported then.
        assert (commit.state, commit.note) == ({"value": 2}, 2)


def test_a_restart_goes_on_from_what_was_saved_last(pool, tmp_path):
    driver = Driver(pool, trials.counting, {"stop": 5, "commits": str(tmp_path)})
    for turn in (1, 2):
        driver.turn(turn)
        if turn == 2:
            pool[0].call(trials.leave)
        pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome)[0] == "left"
    driver = Driver(pool, trials.counting, {"stop": 5, "commits": str(tmp_path)})
    driver.turn(1)
    assert pool[0].call(trials.reports) == [3.0]

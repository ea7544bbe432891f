"""What a host sees of a session: entering, leaving, stopping, losing peers, in real processes."""

from __future__ import annotations

import re
import time
from unittest import mock

import pytest
import torch

from fluidtune import elastic
from fluidtune.elastic import CommitStore, ElasticSession, Left, LoopThread, Reform
from fluidtune.elastic.alike import likeness
from fluidtune.elastic.alike.common_batches import CommonBatches
from fluidtune.elastic.alike.growth import Growth
from fluidtune.elastic.checks.in_turns import InTurns, TurnBackend
from fluidtune.elastic.data.plain_state import State
from tests.contracts.processes import peer_processes, until

from . import trials
from .driving import Driver
from .groups import in_session, lone_session

pytestmark = [pytest.mark.slow, pytest.mark.core]


@pytest.fixture
def pool():
    with peer_processes(2) as started:
        yield started


def assert_lost(worker):
    """The worker's loop ends with GroupLost, long before gloo gives up after half an hour."""
    kind, value = worker.call(trials.outcome)
    assert kind == "lost", value


def at_width_two(pool, config=None):
    """A trial whose two workers are in turn 1; the leader stands at its report, which is the second one."""
    driver = Driver(pool, trials.mlp, {"stop": 10_000, **(config or {})})
    driver.turn(1)
    driver.resize(2)
    pool[0].call(trials.allow)
    driver.turn(2)
    return driver


def test_a_leader_that_leaves_commits_and_stops_all(pool, tmp_path):
    at_width_two(pool, {"commits": str(tmp_path), "budget": 0.0})
    pool[0].call(trials.leave)
    pool[0].call(trials.leave)
    assert pool[0].call(trials.outcome, 0.2)[0] == "runs"  # it stands in the user's code
    pool[0].call(trials.allow)
    for worker in pool:
        assert worker.call(trials.outcome)[0] == "left"
    assert CommitStore(str(tmp_path)).load().iteration == 2


def test_a_directive_can_be_taken_back(pool):
    driver = Driver(pool, trials.mlp, {})
    driver.turn(1)
    driver.resize(2)
    pool[0].call(trials.direct, None)
    pool[0].call(trials.allow)
    driver.turn(2)
    assert pool[0].call(trials.facts)["width"] == 1


@pytest.mark.parametrize("dies", [0, 1])
def test_a_worker_killed_in_training(pool, dies):
    at_width_two(pool)
    pool[0].call(trials.allow, 5000)
    time.sleep(0.2)
    pool[dies].kill()
    assert_lost(pool[1 - dies])


def test_user_code_that_catches_exceptions_does_not_keep_a_loop_alive(pool):
    driver = Driver(pool, trials.stubborn, {"stop": 10_000})
    driver.turn(1)
    driver.resize(2)
    pool[0].call(trials.allow)
    driver.turn(2)
    pool[1].kill()
    pool[0].call(trials.allow)
    assert_lost(pool[0])


def test_class_trainables_come_to_a_boundary_before_each_step(pool, tmp_path):
    reports = trials.plain(trials.mlp, {})[0]
    driver = Driver(pool, trials.stepping, {"commits": str(tmp_path), "budget": 1e9})
    for turn in range(1, 5):
        driver.turn(turn)
        if turn == 2:
            driver.resize(2)
        pool[0].call(trials.allow)
    for worker in pool:
        assert worker.call(trials.outcome)[0] == "left"
    assert pool[0].call(trials.reports) == pytest.approx(reports, rel=1e-4)
    assert CommitStore(str(tmp_path)).load().iteration == 4


@pytest.mark.parametrize(
    ("trial", "config", "why"),
    [
        (trials.nested, {}, "inside elastic.epochs"),
        (trials.keeping, {}, "keeps an iterator"),
        (trials.extending, {}, r"param groups of \[2\] tensors before, param groups of \[2, 2\]"),
        (trials.capturing, {}, "CUDA graph"),
        (trials.keeping, {"renews": True}, None),
    ],
)
def test_a_loop_that_cannot_grow_goes_on_alone_and_its_joiner_ends(pool, trial, config, why):
    config = {**config, "stop": 5}
    driver = Driver(pool, trial, config)
    for turn in range(1, 6):
        driver.turn(turn)
        if turn == 2:
            driver.resize(2)
        if turn == 3 and why is not None:
            kind, error = pool[1].call(trials.outcome)
            assert kind == "left" and "Refused" in error
        pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome)[0] == "returned"
    if trial is not trials.keeping or why is not None:  # else a report is of the leader's samples alone
        assert pool[0].call(trials.reports) == pytest.approx(trials.plain(trial, config)[0], rel=1e-4)
    generation, reason = pool[0].call(trials.refused)
    if why is None:
        assert (generation, reason, pool[1].call(trials.outcome)[0]) == (None, None, "returned")
    else:
        assert generation == 1 and re.search(why, reason)


def test_an_iterator_is_kept_or_not_before_a_trial_grows(pool):
    driver = Driver(pool, trials.keeping, {"stop": 5})
    driver.turn(1)
    driver.resize(2)  # at its first boundary nobody knows
    for turn in range(2, 6):
        pool[0].call(trials.allow)
        driver.turn(turn)
    assert pool[0].call(trials.refused)[0] == 1


@pytest.mark.parametrize("config", [{}, {"mean": True, "norm": True}], ids=str)
def test_a_step_that_one_worker_leaves_out_is_an_error(pool, config):
    driver = Driver(pool, trials.skipping, {**config, "stop": 5})
    driver.turn(1)
    driver.resize(2)
    pool[0].call(trials.allow, 5)
    for worker in pool:
        kind, error = worker.call(trials.outcome)
        assert kind == "lost" and "CannotDivide" in error and "stands at" in error, error


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("warm-up", r"learning rate \(0\.01, leader 0\.02\)"),
        ("late", "parameters"),
        ("scheduler", "in: schedulers;"),
        ("step", r"optimizer steps \(5, leader 4\)"),
        ("rounding", None),
        ("nothing", None),
    ],
)
def test_a_worker_that_differs_is_sent_away_and_it_is_said(pool, what, said):
    config = {"what": what, "stop": 6}
    driver = Driver(pool, trials.warming, config)
    driver.turn(1)
    driver.resize(2)
    for turn in range(2, 7):
        pool[0].call(trials.allow)
        driver.turn(turn)
        assert pool[0].call(trials.difference) is None
    pool[0].call(trials.allow)
    leader, follower = (worker.call(trials.outcome) for worker in pool)
    assert (leader[0], follower[0]) == ("returned", "returned" if said is None else "left")
    refused, ends = pool[0].call(trials.refused)
    assert (refused, ends) == (None, None) if said is None else (refused == 1 and re.search(said, ends)), ends
    for name, value in trials.plain(trials.warming, config)[1].items():
        torch.testing.assert_close(leader[1][name], value)


def test_workers_that_differ_after_a_turn_get_the_leaders_state_and_it_is_said(pool):
    driver = Driver(pool, trials.warming, {"what": "buffer", "stop": 7})
    driver.turn(1)
    driver.resize(2)
    found = []
    for turn in range(2, 8):
        pool[0].call(trials.allow)
        driver.turn(turn)
        found.append(pool[0].call(trials.difference))
    pool[0].call(trials.allow)
    assert [worker.call(trials.outcome)[0] for worker in pool] == ["returned"] * 2
    assert sum(each is not None and "in: buffers;" in each for each in found) >= 2, found
    assert "drift apart" in pool[0].call(trials.refused)[1]


@pytest.mark.parametrize("ends", ["by itself", "re-formed", "stopped"])
def test_drift_is_named_before_a_loop_or_its_group_ends_however_dear_digests_are(pool, ends):
    driver = Driver(pool, trials.warming, {"what": "once", "seldom": True, "stop": 6})
    driver.turn(1)
    driver.resize(2)
    found = []
    for turn in range(2, 7):
        if turn == 5 and ends == "re-formed":
            driver.resize(1)
        if turn == 5 and ends == "stopped":
            pool[0].call(trials.leave)
            pool[0].call(trials.allow)
            break
        pool[0].call(trials.allow)
        driver.turn(turn)
        found.append(pool[0].call(trials.difference))
    if ends == "stopped":
        assert [worker.call(trials.outcome)[0] for worker in pool] == ["left"] * 2
        found.append(pool[0].call(trials.difference))
    # The weights drift in the third turn. They are compared for their price when the group is new, and not again.
    named = 3 if ends != "by itself" else 4
    assert "in: parameters;" in found.pop(named), found
    assert not any(found)


def test_a_loop_that_was_left_and_is_kept_is_named_where_the_next_one_begins():
    with in_session() as session:
        kept = elastic.epochs(0, 3)
        for _ in kept:
            break
        assert list(elastic.epochs(0, 2)) == [0, 1]
        assert "left by `break` and that a variable keeps" in session.facts().ungrowable
        assert next(kept) == 1


class Formed(TurnBackend):
    """A leader's or a follower's in a group of two; notes which groups are called and formed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []

    def call_generation(self, generation, members=()):
        self.calls.append(("called", generation, members))

    def joiners_announced(self, generation, ranks):
        return True

    def form(self, address, generation, rank, world):
        self.calls.append(("formed", generation, world))


def test_workers_that_go_apart_where_the_group_re_forms_leave_the_leader_alone():
    turns = InTurns(2)

    def play(rank):
        backend = Formed(turns, rank, "cpu")
        session = ElasticSession(trial="t", worker=f"w{rank}", leader=rank == 0, backend=backend)
        member = session._member
        member.entered, member.address, member._members = True, ("127.0.0.1", 1), ("w0", "w1")
        session.prepare(State(steps=rank))
        member.position.loop, member.position.iteration = 0, 1
        member.state.loop_begins()
        member.common.formed(joiners=True)
        member.common.got(common=True)
        if rank == 0:
            session.direct(Reform(1, ("w0", "w1", "w2"), ("127.0.0.1", 1)))
        try:
            member.come_to(1)
        except Left as error:
            return backend.calls, str(error)
        return backend.calls, session.facts().refused

    leader, follower = turns.run(play)
    assert leader == ([("called", 1, ("w0",))], 1)
    assert follower[0] == [] and "does not compute what the leader does" in follower[1]


def test_a_slow_digest_does_not_delay_later_ones():
    taken = iter([0.0, 0.01, 0.01, 10.0, 1010.0, 1010.01])  # the first one takes 10 ms, the second one 9 s
    ours = likeness.Likeness(CommonBatches(), Growth(), lambda: None, str)
    with mock.patch.object(likeness.time, "monotonic", lambda: next(taken)):
        for _ in range(2):
            ours.compare_all(None, trials.Count(), weights=True)
    for now, due in ((0.5, False), (1.02, True)):
        with mock.patch.object(likeness.time, "monotonic", lambda now=now: now):
            assert ours.weights_due() == due


def test_a_trial_whose_optimizer_was_extended_goes_on_from_a_commit_that_fits(pool, tmp_path):
    config = {"commits": str(tmp_path), "stop": 5, "free": True}
    pool[0].call(trials.start, trials.extending, config, True, "w0")
    assert pool[0].call(trials.outcome) == ("returned", [2, 2])
    assert CommitStore(str(tmp_path)).load().epoch == 1
    pool[0].call(trials.start, trials.extending, config, True, "w0")
    assert pool[0].call(trials.outcome) == ("returned", [2, 2])
    expected = trials.plain(trials.extending, config)[0]
    assert pool[0].call(trials.reports) == pytest.approx(expected[1:], rel=1e-6)


def test_mistakes_are_named():
    leader, follower = lone_session(), lone_session(leader=False)
    there = ("127.0.0.1", 1)
    with pytest.raises(ValueError, match="different workers"):
        Reform(1, ("a", "a"), there)
    with pytest.raises(ValueError, match=r"members\[0\]"):
        leader.direct(Reform(1, ("x", "w"), there))
    with pytest.raises(ValueError, match="only the leader"):
        follower.direct(Reform(1, ("w",), there))
    with pytest.raises(ValueError, match="above"):
        leader.direct(Reform(-1, ("w",), there))
    with pytest.raises(ValueError, match="cannot enter"):
        leader.enter(Reform(1, ("w", "x"), there))
    with pytest.raises(ValueError, match="cannot enter"):
        follower.enter(Reform(1, ("x", "y"), there))
    elastic.use(leader)
    try:
        with pytest.raises(RuntimeError, match="already runs"):
            elastic.use(follower)
        assert elastic.current() is leader
    finally:
        elastic.use(None)
    assert elastic.current() is None


def test_a_follower_whose_function_fails_is_never_ready():
    with in_session(leader=False) as follower:
        loop = LoopThread(follower, lambda: 1 / 0).start()
        assert not follower.wait_ready(10)
        assert loop.join(60).kind == "failed"


def test_a_joiner_whose_leader_ends_is_let_go(pool):
    driver = Driver(pool, trials.mlp, {"stop": 2})
    driver.turn(1)
    pool[1].call(trials.start, trials.mlp, {}, False, "w1")
    pool[1].call(trials.enter, Reform(5, ("w0", "w1"), pool[0].call(trials.address)))
    until(lambda: pool[0].call(trials.announced, 5, [1]))
    pool[0].call(trials.allow, 2)
    assert pool[0].call(trials.outcome)[0] == "returned"
    assert_lost(pool[1])


def test_a_commit_in_a_second_loop(pool, tmp_path):
    whole = trials.plain(trials.two_loops, {})[0]
    driver = Driver(pool, trials.two_loops, {"commits": str(tmp_path)})
    for turn in (1, 2, 3):
        driver.turn(turn)
        if turn == 3:
            pool[0].call(trials.leave)
        pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome)[0] == "left"
    assert pool[0].call(trials.reports) == whole[:3]
    assert CommitStore(str(tmp_path)).load().loop == 1
    driver = Driver(pool, trials.two_loops, {"commits": str(tmp_path)})
    driver.turn(1)
    pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome)[0] == "returned"
    assert pool[0].call(trials.reports) == whole[3:]
    assert pool[0].call(trials.facts)["iteration"] == 4

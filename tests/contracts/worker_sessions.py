"""The contract of a worker's sessions, as tests. The test file of a session is a case and an import:

    from tests.contracts.worker_sessions import GroupContract, SessionCase

    class MyCase(SessionCase): ...      # of a module, so that it can be sent to other processes

    class TestMySession(GroupContract):
        @pytest.fixture
        def case(self) -> MyCase:
            return MyCase()

`LeaderContract` alone is for a session that never has followers. Every worker has its own process, which hosts one
session after another, as a warm worker does. The suite drives sessions as the host of a class trainable does.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest

from fluidtune.elastic import GroupLost, LeaderSession, Left, LoopOutcome, LoopThread, Reform
from fluidtune.group_facts import GroupFacts

from .processes import PeerProcess

FollowerSession = WorkerSession = Any

#: Seconds within which a peer's death must be noticed, and within which a group must form. That is far above what it
#: takes on a loaded machine, and far below the time-outs of the collective libraries.
NOTICE_S, FORM_S = 15.0, 30.0


class SessionCase(ABC):
    """Makes the sessions of one trial. It is pickled: its methods run in the workers' processes.

    Workers are called "w0" (the leader), "w1" and "w2".
    """

    @abstractmethod
    def leader(self, worker: str) -> LeaderSession:
        """The session of a trial that begins anew, with no commit, in use by this process."""

    def follower(self, worker: str) -> FollowerSession:
        """The session of another worker, in use by this process. (Only for `GroupContract`.)"""
        raise NotImplementedError

    def set_up(self, session: LeaderSession) -> None:
        """What the trial's code calls of the session's room before its first iteration."""
        return None

    def turn(self, session: LeaderSession, done: int) -> None:
        """One iteration of the leader, from its boundary on; ``done`` iterations were done before it."""
        if session.facts().is_elastic:
            session.boundary(done)

    def follow(self, session: FollowerSession) -> None:
        """The trial's code in a follower, which `FollowerSession.run` calls, if it does."""
        return None

    @abstractmethod
    def put_away(self) -> None:
        """No session is in use by this process any more."""


class _Hosted:
    """The session that this process hosts."""

    case: SessionCase
    session: Any
    loop: LoopThread | None
    turns: int
    threads: set[int | None]


def _host(case: SessionCase, worker: str, leads: bool) -> None:
    _Hosted.threads = {thread.ident for thread in threading.enumerate()}
    _Hosted.case, _Hosted.turns, _Hosted.loop = case, 0, None
    _Hosted.session = case.leader(worker) if leads else case.follower(worker)
    if leads:
        case.set_up(_Hosted.session)
    else:
        _Hosted.loop = LoopThread(_Hosted.session, case.follow, _Hosted.session).start()


def _facts() -> GroupFacts:
    facts: GroupFacts = _Hosted.session.facts()
    return facts


def _call(name: str, *args: Any) -> Any:
    return getattr(_Hosted.session, name)(*args)


def _turn() -> str | None:
    """One iteration of the leader; the name of the exception that ended it."""
    try:
        _Hosted.case.turn(_Hosted.session, _Hosted.turns)
    except (Left, GroupLost) as error:
        return type(error).__name__
    _Hosted.turns += 1
    return None


def _outcome(timeout: float) -> str | None:
    """How a follower's loop ended, None if it has not within ``timeout`` seconds."""
    assert _Hosted.loop is not None
    outcome: LoopOutcome | None = _Hosted.loop.join(timeout)
    return None if outcome is None else f"failed: {outcome.error!r}" if outcome.kind == "failed" else outcome.kind


def _unload() -> list[str]:
    """End the session as the host does; the threads that it has left behind."""
    session: WorkerSession = _Hosted.session
    session.leave()
    if _Hosted.loop is not None:
        assert _Hosted.loop.join(NOTICE_S) is not None, "the follower's loop did not end"
    elif _facts().is_elastic:
        _turn()
    session.close()
    session.close()
    _Hosted.case.put_away()
    left: list[str] = []
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate() if thread.ident not in _Hosted.threads]
        if not left:
            break
        time.sleep(0.01)
    return left


class Workers:
    """Warm processes by the worker's name; one that was killed is replaced."""

    def __init__(self) -> None:
        self._peers: dict[str, PeerProcess] = {}
        self._hosting: set[str] = set()

    def __getitem__(self, worker: str) -> PeerProcess:
        return self._peers[worker]

    def host(self, case: SessionCase, worker: str) -> PeerProcess:
        """The worker's process, with a new session in it; "w0" leads."""
        if worker not in self._peers or not self._peers[worker].alive:
            self._peers[worker] = PeerProcess()
        self._peers[worker].call(_host, case, worker, worker == "w0")
        self._hosting.add(worker)
        return self._peers[worker]

    def unload(self, worker: str) -> None:
        """End the worker's session, and check that its process could serve another trial."""
        self._hosting.discard(worker)
        assert self._peers[worker].call(_unload) == [], "threads left running"

    def end_test(self) -> None:
        """Followers end before their leader, or a leader waits for those that are in its group."""
        for worker in sorted(self._hosting):
            if self._peers[worker].alive:
                self._peers[worker].call(_unload)
        self._hosting.clear()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class LeaderContract:
    """What holds for the session of a trial that has one worker."""

    @pytest.fixture
    def case(self) -> Any:
        raise NotImplementedError("define a fixture `case` that returns a SessionCase")

    @pytest.fixture(scope="class")
    @classmethod
    def all_workers(cls) -> Iterator[Workers]:
        workers = Workers()
        yield workers
        workers.close()

    @pytest.fixture
    def workers(self, all_workers: Workers) -> Iterator[Workers]:
        yield all_workers
        all_workers.end_test()

    def test_a_new_leader_is_alone(self, case: SessionCase, workers: Workers) -> None:
        leader = workers.host(case, "w0")
        facts = leader.call(_facts)
        assert facts.width == 1 and facts.last_reform is None and not facts.committing

    def test_iterations_without_a_directive_resize_nothing(self, case: SessionCase, workers: Workers) -> None:
        leader = workers.host(case, "w0")
        elastic = leader.call(_facts).is_elastic
        for _ in range(3):
            assert leader.call(_turn) is None
            facts = leader.call(_facts)
            assert facts.width == 1 and facts.last_reform is None
            assert facts.is_elastic >= elastic
            elastic = facts.is_elastic

    def test_without_a_commit_there_is_none_to_go_on_from(self, case: SessionCase, workers: Workers) -> None:
        leader = workers.host(case, "w0")
        for name in ("load_commit", "prefer_checkpoint", "forget_resume", "ended"):
            leader.call(_call, name)
        assert leader.call(_turn) is None

    def test_a_leader_that_is_asked_to_leave_ends_at_its_boundary(self, case: SessionCase, workers: Workers) -> None:
        leader = workers.host(case, "w0")
        assert leader.call(_turn) is None
        leader.call(_call, "leave")
        leader.call(_call, "leave")
        if leader.call(_facts).is_elastic:
            assert leader.call(_turn) in ("Left", None)
        assert not leader.call(_facts).committing
        workers.unload("w0")

    @pytest.mark.parametrize("turns", [0, 2])
    def test_the_process_can_host_another_session(self, turns: int, case: SessionCase, workers: Workers) -> None:
        for _ in range(2):
            leader = workers.host(case, "w0")
            for _ in range(turns):
                assert leader.call(_turn) is None
            workers.unload("w0")


class GroupContract(LeaderContract):
    """What holds for the sessions of a trial that can have several workers."""

    def _led(self, case: SessionCase, workers: Workers) -> PeerProcess:
        """A leader that has done an iteration."""
        leader = workers.host(case, "w0")
        assert leader.call(_turn) is None
        return leader

    def _reform(self, leader: PeerProcess, generation: int, *followers: str) -> Reform:
        return Reform(generation, ("w0", *followers), leader.call(_facts).address)

    def _join(self, case: SessionCase, workers: Workers, worker: str, reform: Reform) -> PeerProcess:
        """A new follower that has been told to enter."""
        follower = workers.host(case, worker)
        assert follower.call(_call, "wait_ready", FORM_S)
        follower.call(_call, "enter", reform)
        return follower

    def _form(self, leader: PeerProcess, reform: Reform) -> None:
        """Direct the leader, and let it go on until the group has formed."""
        leader.call(_call, "direct", reform)
        deadline = time.monotonic() + FORM_S
        while (leader.call(_facts).last_reform or (-1,))[0] != reform.generation:
            assert time.monotonic() < deadline, f"{reform} did not form"
            assert leader.call(_turn) is None

    def _pair(self, case: SessionCase, workers: Workers) -> tuple[PeerProcess, PeerProcess]:
        """A leader and a follower in one group, generation 1."""
        leader = self._led(case, workers)
        reform = self._reform(leader, 1, "w1")
        follower = self._join(case, workers, "w1", reform)
        self._form(leader, reform)
        return leader, follower

    def test_an_elastic_leader_has_an_address(self, case: SessionCase, workers: Workers) -> None:
        facts = self._led(case, workers).call(_facts)
        host, port = facts.address
        assert facts.is_elastic and isinstance(host, str) and port > 0

    def test_a_group_grows_and_shrinks_at_boundaries(self, case: SessionCase, workers: Workers) -> None:
        leader, first = self._pair(case, workers)
        facts = leader.call(_facts)
        assert facts.width == 2
        generation, seconds = facts.last_reform
        assert generation == 1 and 0 <= seconds < FORM_S
        reform = self._reform(leader, 2, "w1", "w2")
        second = self._join(case, workers, "w2", reform)
        self._form(leader, reform)
        assert leader.call(_facts).width == 3
        self._form(leader, self._reform(leader, 3, "w2"))
        assert leader.call(_facts).width == 2
        assert first.call(_outcome, NOTICE_S) == "left"
        assert second.call(_outcome, 0.0) is None
        workers.unload("w1")
        reform = self._reform(leader, 4, "w2", "w1")
        self._join(case, workers, "w1", reform)
        self._form(leader, reform)
        assert leader.call(_facts).width == 3

    def test_a_directive_is_carried_out_once(self, case: SessionCase, workers: Workers) -> None:
        leader, _ = self._pair(case, workers)
        last = leader.call(_facts).last_reform
        for _ in range(2):
            assert leader.call(_turn) is None
        assert leader.call(_facts).last_reform == last

    def test_the_leader_goes_on_until_all_joiners_are_there(self, case: SessionCase, workers: Workers) -> None:
        leader = self._led(case, workers)
        both = self._reform(leader, 1, "w1", "w2")
        self._join(case, workers, "w1", both)
        leader.call(_call, "direct", both)
        for _ in range(2):
            assert leader.call(_turn) is None
            assert leader.call(_facts).width == 1
        self._join(case, workers, "w2", both)
        self._form(leader, both)
        assert leader.call(_facts).width == 3

    def test_a_directive_replaces_one_that_was_not_carried_out(self, case: SessionCase, workers: Workers) -> None:
        leader = self._led(case, workers)
        leader.call(_call, "direct", self._reform(leader, 1, "w2"))
        assert leader.call(_turn) is None
        reform = self._reform(leader, 2, "w1")
        follower = self._join(case, workers, "w1", self._reform(leader, 1, "w1"))
        follower.call(_call, "enter", reform)
        self._form(leader, reform)
        facts = leader.call(_facts)
        assert facts.width == 2 and facts.last_reform[0] == 2

    @pytest.mark.parametrize("told", [False, True])
    def test_a_follower_that_waits_to_enter_leaves_at_once(
        self, told: bool, case: SessionCase, workers: Workers
    ) -> None:
        if told:
            follower = self._join(case, workers, "w1", self._reform(self._led(case, workers), 1, "w1"))
        else:
            follower = workers.host(case, "w1")
            assert follower.call(_call, "wait_ready", FORM_S)
        assert follower.call(_outcome, 0.2) is None
        follower.call(_call, "leave")
        assert follower.call(_outcome, NOTICE_S) == "left"
        assert not follower.call(_call, "wait_ready", FORM_S)
        workers.unload("w1")

    def test_a_leader_that_leaves_dismisses_its_followers(self, case: SessionCase, workers: Workers) -> None:
        _, follower = self._pair(case, workers)
        workers.unload("w0")
        assert follower.call(_outcome, NOTICE_S) == "left"
        workers.unload("w1")

    def test_a_follower_that_is_to_leave_goes_when_its_leader_dies(self, case: SessionCase, workers: Workers) -> None:
        leader, follower = self._pair(case, workers)
        follower.call(_call, "leave")
        leader.kill()
        assert follower.call(_outcome, NOTICE_S) == "left"

    def test_a_leader_notices_at_its_boundary_that_a_follower_died(self, case: SessionCase, workers: Workers) -> None:
        leader, follower = self._pair(case, workers)
        follower.kill()
        started = time.monotonic()
        assert leader.call(_turn) == "GroupLost"
        assert time.monotonic() - started < NOTICE_S
        workers.unload("w0")

    def test_a_follower_notices_that_its_leader_died(self, case: SessionCase, workers: Workers) -> None:
        leader, follower = self._pair(case, workers)
        leader.kill()
        assert follower.call(_outcome, NOTICE_S) == "lost"
        workers.unload("w1")

    def test_after_a_loss_both_processes_can_form_a_group_again(self, case: SessionCase, workers: Workers) -> None:
        leader, follower = self._pair(case, workers)
        follower.kill()
        assert leader.call(_turn) == "GroupLost"
        workers.unload("w0")
        leader, follower = self._pair(case, workers)
        assert leader.call(_facts).width == 2

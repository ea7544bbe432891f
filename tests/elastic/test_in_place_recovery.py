"""Which workers go on when a group broke: a leader and its followers, each in a thread, without any collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fluidtune.elastic import GroupLost
from fluidtune.elastic.group.in_place_recovery import GENERATION_STEP, agree_on_survivors
from fluidtune.elastic.transport.torch_backend import TorchBackend

MEMBERS = ("w0", "w1", "w2", "w3")


class Quick(TorchBackend):
    """Meets as every backend does, and connects to nobody."""

    def _form(self, store: Any, rank: int, world: int) -> None: ...

    def _dissolve(self, in_order: bool) -> None: ...


class Group:
    """The members of generation 1, which broke."""

    def __init__(self) -> None:
        self.backends = [Quick(form_timeout=5.0) for _ in MEMBERS]
        self.address = self.backends[0].serve()
        self.together(lambda rank: self.backends[rank].form(self.address, 1, rank, len(MEMBERS)), range(len(MEMBERS)))
        for backend in self.backends:
            backend.dissolve()

    def together(self, do: Callable[[int], Any], ranks: Any) -> dict[int, Any]:
        """What each of these ranks returns, or the GroupLost that it raises."""
        found: dict[int, Any] = {}

        def one(rank: int) -> None:
            try:
                found[rank] = do(rank)
            except GroupLost as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return found

    def agree(self, rank: int, generation: float = 1 + GENERATION_STEP, members: tuple[str, ...] = MEMBERS) -> Any:
        return agree_on_survivors(self.backends[rank], self.address, members, MEMBERS[rank], generation)

    def dies(self, rank: int) -> None:
        self.backends[rank].close()


@pytest.fixture
def group():
    made = Group()
    yield made
    for backend in reversed(made.backends):
        backend.close()


def test_all_that_live_go_on(group):
    group.dies(2)
    assert group.together(group.agree, [0, 1, 3]) == dict.fromkeys([0, 1, 3], ("w0", "w1", "w3"))


def test_a_leader_whose_followers_died_is_alone_at_once(group):
    for rank in (1, 2, 3):
        group.dies(rank)
    assert group.together(group.agree, [0]) == {0: ("w0",)}


def test_a_follower_that_died_after_it_had_said_that_it_stays(group):
    group.dies(1)
    group.backends[3].announce_survivor(group.address, 1 + GENERATION_STEP, 3)
    group.dies(3)
    assert group.together(group.agree, [0, 2])[0] == ("w0", "w2")


def test_a_follower_that_died_before_it_came_to_the_new_group_is_not_waited_for(group):
    """Its rank in the new group is not that in the group that broke. The others go on without it, in the next group."""
    group.dies(1)
    left = group.together(group.agree, [0, 2, 3])[0]
    assert left == ("w0", "w2", "w3")
    group.dies(2)

    def form(rank: int) -> None:
        group.backends[rank].form(group.address, 1 + GENERATION_STEP, left.index(MEMBERS[rank]), len(left))

    for backend in (group.backends[0], group.backends[3]):
        backend.form_timeout = 60.0
    lost = group.together(form, [0, 3])
    assert "rank 1 died" in str(lost[0]) and "rank 1 died" in str(lost[3])
    for rank in (0, 3):
        group.backends[rank].dissolve()
    again = group.together(lambda rank: group.agree(rank, 1 + 2 * GENERATION_STEP, left), [0, 3])
    assert again == dict.fromkeys([0, 3], ("w0", "w3"))


@pytest.mark.slow
def test_followers_without_their_leader_are_lost(group):
    group.backends[0].close()
    lost = group.together(group.agree, [1, 2, 3])
    assert all(isinstance(error, GroupLost) for error in lost.values())

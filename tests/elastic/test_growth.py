"""What a leader answers to a growth that its loop puts off."""

from __future__ import annotations

from fluidtune.elastic import Reform
from fluidtune.elastic.alike.growth import MOST_BOUNDARIES, Growth


class Loop:
    """A trial's state that other processes cannot go on from, for a reason that may pass."""

    def __init__(self) -> None:
        self.why: str | None = "the loop has an iterator that it may keep"

    def obstacle(self, lasting: bool = False) -> str | None:
        return None if lasting else self.why


class Group:
    def __init__(self) -> None:
        self.called: list[tuple[float, tuple[str, ...]]] = []

    def joiners_announced(self, generation: float, ranks: list[int]) -> bool:
        return True

    def call_generation(self, generation: float, members: tuple[str, ...] = ()) -> None:
        self.called.append((generation, members))


def test_a_growth_that_is_put_off_too_often_is_given_up_and_says_why():
    growth, loop, group = Growth(), Loop(), Group()
    reform = Reform(3, ("w0", "w1"), ("127.0.0.1", 1))
    answers = [growth.answer(reform, ("w0",), loop.obstacle, group) for _ in range(MOST_BOUNDARIES + 1)]
    assert answers == ["not now"] * MOST_BOUNDARIES + ["no"]
    assert growth.refused == 3 and "may keep, at 4 boundaries" in growth.ungrowable
    assert group.called == [(3, ("w0",))]  # the joiner hears that it is not taken in


def test_another_growth_is_put_off_as_often_again():
    growth, loop, group = Growth(), Loop(), Group()
    for generation in (1, 2, 3):
        reform = Reform(generation, ("w0", "w1"), ("127.0.0.1", 1))
        for _ in range(MOST_BOUNDARIES):
            assert growth.answer(reform, ("w0",), loop.obstacle, group) == "not now"
    loop.why = None
    assert growth.answer(reform, ("w0",), loop.obstacle, group) == "yes"
    assert growth.ungrowable is None

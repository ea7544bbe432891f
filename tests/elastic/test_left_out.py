"""Batches that all workers have left out because their parts are short: found, and nothing else is taken for that."""

from __future__ import annotations

import pytest
import torch

from fluidtune.elastic.data.attribution import BatchesAtHand
from fluidtune.elastic.data.batches import Reading, Share


class Loop:
    """What a loop of one of ``width`` workers does in a turn, one call each."""

    def __init__(self, width=3, learns=True):
        self.width, self.readings = width, {}
        self.hand = BatchesAtHand()
        self.hand.left_out.learns = learns

    def fetch(self, size, name="a"):
        part = -(-size // self.width)
        share = Share(part / size, size, self.width)
        self.hand.fetched(self.readings.setdefault(name, Reading()), share)
        return self

    def learn(self, *sizes, name="a"):
        for size in sizes:
            self.fetch(size, name).hand.gradients.use()
        return self

    def end(self, name="a"):
        self.hand.ended(self.readings.pop(name))
        return self

    def why(self, place):
        return self.hand.left_out.why(place)


def test_short_batches_in_the_middle():
    assert "6 samples" in Loop().learn(12).fetch(6).learn(12).end().why("reading")
    assert "6 samples" in Loop().fetch(6).learn(12, 12).end().why("reading")


def test_what_is_no_decision_by_length():
    assert Loop().learn(9, 9, 3).end().why("boundary") is None
    assert Loop().learn(9, 9).fetch(9).end().why("boundary") is None  # left early
    assert Loop().learn(9, 9).fetch(1).end().why("boundary") is None  # one sample: alone, too
    assert Loop().learn(3, 9).fetch(3).end().why("boundary") is None  # one of three was used
    assert Loop().fetch(9).learn(9, 9).end().why("boundary") is None  # prefetching
    assert Loop().fetch(9).fetch(9).fetch(9).end().learn().why("reading") is None
    assert Loop(2).learn(9, 9).fetch(8).end().why("boundary") is None  # parts as long as a used one


def test_an_evaluation_leaves_nothing_out():
    loop = Loop().learn(9, 9).end()
    with torch.no_grad():
        loop.fetch(9, "v").fetch(3, "v").end("v")
    assert loop.why("boundary") is None
    loop.fetch(9, "w").fetch(3, "w").end("w")  # with gradients on, and none computed
    assert loop.why("boundary") is None
    alone = Loop().fetch(9, "v")
    alone.hand.counts.use()  # it counts the samples of what it has fetched
    assert alone.end("v").why("boundary") is None


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_limit_between_the_parts_of_two_batches(width):
    for left_out in range(2, 20):
        for used in range(1, 20):
            found = Loop(width).learn(used).fetch(left_out).end().why("reading")
            parts = [[-(-(size - rank) // width) or 1 for rank in range(width)] for size in (left_out, used)]
            assert (found is not None) == (max(parts[0]) < min(parts[1])), (left_out, used)

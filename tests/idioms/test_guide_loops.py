"""Loops of PyTorch's guides: at widths 1-2-1 as alone, or refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from fluidtune.elastic.checks.rehearsal import rehearse
from tests.elastic import trials
from tests.elastic.conftest import pool
from tests.elastic.driving import Refused, Trip, same, seed
from tests.idioms.guide_loops import LOOPS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
__all__ = ["pool"]

#: The widths of the second, third and fourth turn; the first is alone.
WIDTHS = (2, 2, 1)


def outcome(pool: Any, loop: Any) -> str:
    """ "same", or the line that refuses it. AssertionError if it was neither."""
    config = {"stop": len(WIDTHS) + 1}
    seed()
    reports, weights = trials.plain(loop, config)
    seed()
    verdict = rehearse(lambda: loop(config, lambda loss: None))
    if verdict.kind == "differs":
        return verdict.reason
    if verdict.kind == "unknown":  # it fails alone, or draws for each sample, so that no two divisions are the same
        return f"unknown: {verdict.reason}"
    trip = Trip(pool, config, loop)
    try:
        got, endings = trip.go(WIDTHS)
    except Refused as error:
        return str(error)
    same(got, reports)
    same(endings[0], weights)
    return verdict.kind


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_of_a_guide_gives_at_every_width_what_it_gives_alone(pool: Any, loop: Any) -> None:
    assert LOOPS[loop] in outcome(pool, loop)

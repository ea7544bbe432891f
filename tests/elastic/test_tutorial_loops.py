"""Loops of tutorials and popular repositories give at every width what they give alone, or say why they do not grow.

A loop that no table here names grows, its batches are divided, and no line is said.
"""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest

from fluidtune.elastic import CommitStore
from fluidtune.elastic.checks.rehearsal import rehearse

from . import trials, tutorial_loops, tutorial_models, tutorial_readings, tutorial_sequences
from .driving import Refused, Trip, same, seed

pytestmark = pytest.mark.slow
HISTORIES = {"1-2-2-1": (1, 2, 2, 1), "2-3-3": (2, 3, 3)}
#: For a loop of which it is known after its second turn only that it keeps no iterator.
LATER = {"1-2-2-1": (1, 2, 2, 1), "2-3-3": (1, 3, 3)}

LOOPS = {
    **tutorial_loops.LOOPS,
    **tutorial_readings.LOOPS,
    **tutorial_sequences.LOOPS,
    **tutorial_models.LOOPS,
}
_KEEPS = "the loop still has samples of the turn before"
_UNLIKE = "a new worker does not compute what the leader does: "
#: Those that a rehearsal refuses, which then get no worker, and its line.
REHEARSED = {
    "words, hidden of the batch size": "divided among 2 workers the loop fails",
    "vae, a sum": "divided among 2 workers the gradient of",
    "size of the data set": r"elastic.mean\(\) got the number of all samples, 44",
    "curriculum": "the loop has prepared no DataLoader",
}
#: Those that go on with one worker, and the line that says why.
REFUSED = {
    "ema": f"{_UNLIKE}parameters",
    "zipped with one not prepared": f"{_UNLIKE}its gradient of",
    "forever, for all epochs": "the loop keeps an iterator over a prepared DataLoader",
    "curriculum, prepared": "the loop has changed what it prepared: DataLoaders 0 before",
    "dynamic weights of losses": f"{_UNLIKE}its gradient of",
    "hard examples": _KEEPS,
    "hard examples, later": _KEEPS,
    "a cycle for all epochs": _KEEPS,
    "swa": f"{_UNLIKE}what AveragedModel returns in an evaluation",
    "swa, evaluated later": f"{_UNLIKE}what AveragedModel returns in an evaluation",
    "sam with momentum": f"{_UNLIKE}its gradient of",
    "lookahead, inner prepared": _UNLIKE,
}
POSTPONED = ("forever, an epoch", "next by hand", "islice")
_ANEW = "its workers do not compute the same any more: "
#: Those whose leader ends with a line. The host goes on alone, from the last commit; after `_ANEW` there is none.
LOST = {
    "dynamic weights of losses": f"{_ANEW}its gradient of",
    "hard examples, collected later": f"{_ANEW}{_KEEPS}",
    "words, hidden from None": r"divided among \d workers the loop fails: RuntimeError\('Expected hidden",
    "words, hidden of the batch size": r"divided among \d workers the loop fails: RuntimeError\('Expected hidden",
    "size of the data set": r"elastic.mean\(\) got the number of all samples, 44, as the count of a worker",
    "mean of batches": r"elastic.mean\(\) got a number of batches, 6, and not all parts of a batch had the same size",
}
#: But not in this history: each batch is divided evenly, or no part was seen before the workers differed.
EXCEPT = {"mean of batches": "1-2-2-1", "dynamic weights of losses": "1-2-2-1"}


def named(config: dict[str, Any], report: Any) -> Any:
    """The loop of this name."""
    return LOOPS[config["loop"]](config, report)


def common_state() -> str:
    return trials.here().session._member.common.state


class Seeing(Trip):
    """``seen``: after each turn the number of workers, and what their next batch is (`common_batches`)."""

    def turn(self, done: int) -> None:
        super().turn(done)
        self.seen = [*getattr(self, "seen", []), (self.reached(), self.pool[0].call(common_state))]


def check(pool: Any, name: str, widths: tuple[int, ...]) -> None:
    config = {"loop": name, "stop": len(widths) + 2}
    seed()
    reports, weights = trials.plain(named, config)
    gc.collect()  # ends the processes of the loaders that ran here
    trip = Seeing(pool, config, named, refused=REFUSED.get(name, ""))
    got, values = trip.go(widths)
    same(got, reports)
    for each in values:
        same(each, weights)
    said = pool[0].call(trials.refused)[1]
    if name in REFUSED:
        assert re.search(REFUSED[name], str(said)) and "\n" not in said
    else:
        assert said is None
        divided = {state for width, state in trip.seen if width > 1}
        assert divided & {"first", "divided"}, trip.seen


def _cases() -> list[tuple[str, str]]:
    """Each loop that a job would let grow, with one of the histories in turn."""
    names = [name for name in LOOPS if name not in {*REHEARSED, "mixup", *LOST}]
    return [(name, list(HISTORIES)[place % 2]) for place, name in enumerate(names)] + list(EXCEPT.items())


@pytest.mark.parametrize(("name", "history"), _cases())
def test_every_result_is_as_alone(pool, name, history):
    check(pool, name, (LATER if name in POSTPONED else HISTORIES)[history])


def _lost() -> list[tuple[str, tuple[int, ...]]]:
    found = [(name, HISTORIES[history]) for name in LOST for history in HISTORIES if EXCEPT.get(name) != history]
    return [*found, ("dynamic weights of losses", (2, 2, 2))]  # without another growth


@pytest.mark.parametrize(("name", "widths"), _lost())
def test_a_loop_that_cannot_go_on_divided_ends_with_a_line_before_a_result_is_wrong(pool, tmp_path, name, widths):
    config = {"loop": name, "stop": len(widths) + 2}
    seed()
    alone, _ = trials.plain(named, config)
    with pytest.raises(Refused, match=LOST[name]):
        Trip(pool, {**config, "commits": str(tmp_path)}, named).go(widths)
    got = pool[0].call(trials.reports)
    same(got, alone[: len(got)])
    if LOST[name].startswith(_ANEW):
        assert CommitStore(str(tmp_path)).load() is None


@pytest.mark.parametrize("name", LOOPS)
def test_a_rehearsal_refuses_what_a_divided_batch_changes(name):
    seed()
    verdict = rehearse(lambda: named({"loop": name, "stop": 2}, lambda loss: None))
    gc.collect()
    assert verdict.kind == ("differs" if name in REHEARSED else "same"), verdict
    assert re.search(REHEARSED.get(name, ""), verdict.reason)

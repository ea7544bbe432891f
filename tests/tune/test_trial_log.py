"""What the event log has of a trial: its metric as Tune takes it, what the search chose, and when it waits."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.engine import Engine
from fluidtune.engine import messages as m
from fluidtune.group_facts import GroupFacts
from fluidtune.report.causes import wait_of
from fluidtune.report.events import EVENT_LOG_NAME, read_events
from fluidtune.report.fold import Fold
from fluidtune.report.metric_values import ranked, value_of
from fluidtune.tune.job_log import JobLog
from fluidtune.tune.trial_registry import VALUE_LENGTH, parameters_of
from tests.engine.helpers import plain, suspend
from tests.report.makers import log_in
from tests.tune.trainables import Stepper
from tests.tune.tried_manager import Tried


def test_a_reason_to_wait_that_changes_is_one_event_however_many_wait(tmp_path: Path) -> None:
    """Seen: with 4,000 trials each change wrote 4,000 lines, within one decision."""
    trials, flips, engine = [f"t{n}" for n in range(4_000)], 100, Engine()
    log = JobLog("job", tmp_path, engine)
    engine.handle(m.GroupAnnounced("g"), *map(plain, trials), now=0.0)
    log.instructions_given([])
    for flip in range(flips):
        change = m.DeviceLost(flip) if flip % 2 else m.DeviceGained(flip + 1)
        log.instructions_given(engine.handle(change, now=float(flip)))
    fold = Fold(read_events(tmp_path / EVENT_LOG_NAME))
    assert flips <= fold.counts["trial_waits"] <= 3 * flips
    assert (tmp_path / EVENT_LOG_NAME).stat().st_size < 20 * len(trials) + 500 * 3 * flips
    said: Any = {trial: wait_of(fold.trials[trial]) for trial in trials}
    assert (
        {each["why"] for each in said.values()}
        == {"no_device"}
        == {fold.trials[t].notes[-1].event["why"] for t in trials}
    )
    assert len(fold.trials["t3999"].notes) == flips + 1, "its story has each"


@pytest.mark.parametrize("value", [np.float32(0.5), Fraction(1, 2), Decimal("0.5"), np.array(0.5)])
def test_a_nested_metric_is_in_the_log_and_makes_a_trial_the_best(tried: Tried, value: Any) -> None:
    tried.job.scheduler.metric = "eval/loss"
    run = tried.placed(1.0)
    result = {"training_iteration": 1, "eval": {"loss": value}}
    tried.manager.schedule_actor_task(run.tracked, "train")
    tried.answered(run, IterationReply(result, "elastic", 1.0, 1, GroupFacts(address=("n", 1))))
    run.trial.last_result = result
    tried.job.log.run_ended([run.trial], "eval/loss", "min")
    assert [each["metric"] for each in tried.logged("trial_result")] == [0.5]
    assert tried.logged("run_ended")[0]["best"] == {"trial": "a", "metric": 0.5}


def test_a_value_has_the_name_that_tune_gives_it() -> None:
    result = {"a/b": 1, "a": {"c": {"d": 2, 3: 4}, "e/f": {"g": 5}}, "a/h": {"i": 6}, "none": {}}
    names = {"a/b": 1, "a/c/d": 2, "a/c/3": 4, "a/e/f/g": 5, "a/h/i": 6}
    assert {name: value_of(result, name) for name in names} == names
    assert [value_of(result, name) for name in ("a", "a/c", "a/c/d/e", "b", "", "none", "none/a")] == [None] * 7


@pytest.mark.parametrize(("mode", "best"), [("min", ["b", "c", "a"]), ("max", ["a", "b", "c"]), (None, [])])
def test_trials_are_ranked_by_their_last_values_and_of_equal_ones_the_first_is_first(mode: Any, best: Any) -> None:
    assert [trial for trial, _ in ranked([("a", 2.0), ("b", 1.0), ("none", None), ("c", 1.0)], mode)] == best


@pytest.mark.parametrize("value", [float("nan"), np.inf, 10**400, "0.5", None, 1j, np.zeros(1), [0.5]])
def test_what_is_no_finite_number_is_no_value(value: Any) -> None:
    assert value_of({"loss": value}, "loss") is None


def of(evaluated: dict[str, Any] | None, config: dict[str, Any]) -> dict[str, Any]:
    return parameters_of(cast(Any, SimpleNamespace(evaluated_params=evaluated, config=config)))


def test_the_values_are_those_of_the_configuration_now() -> None:
    """PBT changes these. What the search has not chosen, such as a key to some service, is left out."""
    config = {"lr": 0.2, "net": {"width": 8}, "api_key": "secret"}
    assert of({"lr": 0.1, "net/width": 4}, config) == {"lr": 0.2, "net/width": 8}
    assert of({"net": {"width": 4}}, config) == {"net": "{'width': 8}"}
    assert of({"layers/0": 3, "gone": 1}, {"layers": [4]}) == {"layers/0": 3, "gone": 1}
    assert of(None, config) == of({}, config) == {}


def test_every_value_can_be_written_and_is_short(tmp_path: Any) -> None:
    odd = {"a": np.float32(0.5), "b": float("nan"), "c": "x" * 1000, "d": len, "e": None, "f": True, "g": [1, 2]}
    found = of(odd, odd)
    log = log_in(tmp_path)
    log.write("trial_added", trial="t", group="g", kind="plain", iterations=1, parameters=found)
    log.close()
    read = read_events(tmp_path / EVENT_LOG_NAME)[0]["parameters"]
    assert (read["a"], read["b"], read["e"], read["f"], read["g"]) == (0.5, None, None, True, "[1, 2]")
    assert len(read["c"]) == VALUE_LENGTH and read["d"] == "<built-in function len>"


def test_a_trial_that_is_wanted_again_in_the_same_step_waits_by_the_log(tried: Tried) -> None:
    # Seen: `fluidtune top` said "paused" of such a trial, and hid it.
    run = tried.placed(1.0, Stepper)
    tried.tell(run, suspend("a"))
    tried.manager.schedule_actor_task(run.tracked, "train")
    tried.answer_newest(None)
    tried.manager._advance()
    assert tried.written()[-3:] == ["trial_ended", "trial_added", "trial_started"]
    assert Fold(tried.logged()[:-1]).trials["a"].state == "waiting"


def test_a_pause_of_tunes_own_is_called_so_even_after_a_move(tried: Tried) -> None:
    run = tried.placed(1.0, Stepper)
    tried.tell(run, suspend("a"))
    tried.manager.schedule_actor_task(run.tracked, "train")
    assert run.life.losses.last == (why := f"moved to another device: {suspend('a').why.words}")
    tried.answer_newest(None)
    tried.manager._advance()
    (moved,) = tried.logged("trial_ended")
    assert (moved["ending"], moved["reason"]) == ("paused", why)
    tried.manager.remove_actor(run.tracked)
    tried.manager._advance()
    assert tried.logged("trial_ended")[-1]["why"] == "paused"


def test_what_goes_on_when_the_run_ends_leaves_with_its_driver(tried: Tried) -> None:
    """Seen: after a SIGTERM, `fluidtune why` said "Tune paused it"."""
    run = tried.placed(1.0)
    tried.manager.run_ended(True)
    tried.manager.remove_actor(run.tracked)
    tried.manager._advance()
    assert tried.logged("trial_ended")[-1]["reason"] == "its driver ends"

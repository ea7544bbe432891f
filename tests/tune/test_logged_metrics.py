"""The event log has the metric of each result as Tune takes it: nested or not, and of any type of numbers."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.group_facts import GroupFacts
from fluidtune.report.metric_values import value_of
from fluidtune.tune.groups.budgets import iteration_at
from tests.tune.tried_manager import Tried


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


@pytest.mark.parametrize("value", [float("nan"), np.inf, 10**400, "0.5", None, 1j, np.zeros(1), [0.5]])
def test_what_is_no_finite_number_is_no_value(value: Any) -> None:
    assert value_of({"loss": value}, "loss") is None


def test_a_budget_in_a_nested_attribute_is_known() -> None:
    trial: Any = SimpleNamespace(last_result={"training_iteration": 2, "done": {"epochs": np.int64(4)}})
    assert iteration_at(trial, "done/epochs", 10) == 5.0

"""Whatever the moment at which trials join, end, raise, are stopped, paused, promoted or exploited: each is as alone.

The models are those of `benchmarks.fused` themselves.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.fused import MODELS
from fluidtune.elastic.fused import FusedTrial, FusedTrials, current_trial

from .loops import INPUTS, Broken, Plan, Saved, Stopped, alone, compare, same, together, train

#: What happens to a trial, and before which of its iterations. A promotion is a pause after which it goes on at once.
EVENTS = ["raises", "ends", "stops", "pauses", "promoted", "exploits"]
EPOCHS = 5


@st.composite
def plans(draw: Any) -> Plan:
    events = draw(st.dictionaries(st.sampled_from(EVENTS), st.integers(0, 12), max_size=2))
    promoted = events.pop("promoted", None)
    if promoted is not None:
        events["pauses"] = promoted
    plan = Plan(
        number=draw(st.integers(0, 9)),
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adamw"])),
        dropout=draw(st.sampled_from([0.0, 0.2])),
        batch=draw(st.sampled_from([16, 16, 20])),
        **events,
    )
    plan.kept["promoted"] = promoted is not None
    return plan


class Joined:
    """Trials of one process that come at their moments. ``gates``: before which iteration of the first one."""

    def __init__(self, chosen: list[Plan], gates: list[int]) -> None:
        self.trials, self.chosen, self.gates = FusedTrials(), chosen, gates
        self.started: list[tuple[Plan, Any]] = []
        chosen[0].before = self._others

    def _others(self, iteration: int, _: nn.Module) -> None:
        for plan, gate in zip(self.chosen[1:], self.gates, strict=False):
            if gate == iteration:
                self.start(plan)

    def start(self, plan: Plan, saved: Saved | None = None) -> None:
        if plan.kept["promoted"]:
            plan.again = lambda left: self.start(plan, left)
        self.started.append((plan, self.trials.start("joiner", train, plan, saved)))

    def end(self) -> None:
        """Wait for all; those that are paused go on as soon as they are seen to be."""
        for plan, trial in self.started:  # it grows meanwhile
            assert trial.join(60)
            if isinstance(trial.value, Saved) and not plan.kept["promoted"]:
                self.start(plan, trial.value)
        self.trials.join()


def as_alone(chosen: list[Plan], gates: list[int], model: str | Callable[[], nn.Module], epochs: int) -> None:
    """Each trial but the first one is started by the first one. ``model``: a name in `loops`, or what makes one."""
    known: dict[str, Saved] = {}
    for plan in chosen:
        plan.model, plan.epochs = model, epochs
        if plan.exploits is not None:
            if plan.optimizer not in known:
                donor = train(Plan(11, plan.model, plan.optimizer, pauses=2))
                assert isinstance(donor, Saved)
                known[plan.optimizer] = donor
            plan.donor = known[plan.optimizer]
    expected = [alone(plan) for plan in chosen]
    losses = [copy.copy(plan.kept["losses"]) for plan in chosen]
    joined = Joined(chosen, gates)
    joined.start(chosen[0])
    joined.end()
    for plan, trial in joined.started:
        (number,) = [i for i, other in enumerate(chosen) if other is plan]
        assert trial.reasons == []
        if isinstance(trial.value, Saved):
            continue
        same(plan.kept["losses"], losses[number])
        of_alone = expected[number]
        if isinstance(of_alone, Broken | Stopped):
            assert repr(trial.error) == repr(of_alone)
            continue
        assert not isinstance(of_alone, BaseException) and trial.error is None, trial.error
        # Adam divides a gradient by its own size: where the true one is 0, as of the bias of attention's keys, the
        # weights are made of rounding, and the losses do not depend on them.
        whole = plan.optimizer == "sgd" or model is not MODELS["transformer"]
        names = [name for name in of_alone if whole or name in ("losses", "drawn")]
        same([trial.value[name] for name in names], [of_alone[name] for name in names])


@settings(max_examples=4, deadline=None)
@given(st.lists(plans(), min_size=2, max_size=4), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_trials_come_go_and_change_at_any_moment(chosen: list[Plan], gates: list[int]) -> None:
    as_alone(chosen, gates, "perceptron", 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=int(os.environ.get("FLUIDTUNE_FUSED", "50")), deadline=None)
@given(st.lists(plans(), min_size=2, max_size=5), st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_trials_of_every_model_come_go_and_change_at_any_moment(
    model: str, chosen: list[Plan], gates: list[int]
) -> None:
    as_alone(chosen, gates, MODELS[model], EPOCHS)


@pytest.mark.parametrize("model", MODELS)
def test_losses_of_five_epochs_are_those_alone(model: str, sizes: Counter[tuple[str, int]]) -> None:
    """Issue 21: within 1e-4 relative, in float32, for each model of `benchmarks.fused`, with its optimizer."""
    every = [Plan(i, MODELS[model], "adam", EPOCHS) for i in range(3)]
    expected = [alone(plan) for plan in every]
    for trial, of_alone in zip(together(every), expected, strict=True):
        assert isinstance(of_alone, dict) and trial.error is None and trial.reasons == []
        assert len(of_alone["losses"]) == EPOCHS * 4  # three iterations and a validation
        assert trial.value["losses"] == pytest.approx(of_alone["losses"], rel=1e-4, abs=0)
        assert {value.dtype for value in trial.value["model"].values() if value.is_floating_point()} == {torch.float32}
    assert sizes["call", 3] == EPOCHS * 4


def test_a_trial_that_joins_while_another_one_validates_is_fused_and_says_nothing() -> None:
    """Whether a model trains differs only for a while."""
    trials = FusedTrials()
    others: list[FusedTrial] = []

    def loop(validates: bool) -> None:
        model = MODELS["perceptron"]().train(not validates)
        trial = current_trial()
        assert trial is not None
        trial.prepare(model)
        if validates:
            others.append(trials.start("joiner", loop, False))
            trial.prepare()  # the other one goes first
            model(INPUTS)

    trials.start("first", loop, True)
    for trial in trials.join():
        assert trial.error is None and trial.reasons == []


# -- single moments, so that each is met in every run --


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_one_of_three(event: str, optimizer: str, sizes: Counter[tuple[str, int]]) -> None:
    chosen = [Plan(i, optimizer=optimizer, dropout=0.2) for i in range(3)]
    for plan in chosen:
        plan.kept["promoted"] = False
    setattr(chosen[1], "pauses" if event == "promoted" else event, 2)
    chosen[1].kept["promoted"] = event == "promoted"
    as_alone(chosen, [0, 0], "perceptron", 2)
    assert sizes["call", 3] >= 1


def test_a_trial_takes_over_the_weights_of_a_neighbour_that_has_ended(sizes: Counter[tuple[str, int]]) -> None:
    """Its tensors were parts of the same memory as those that are written."""
    first, second = Plan(0, optimizer="momentum", ends=2), Plan(1, optimizer="momentum")

    def take_over(iteration: int, model: nn.Module) -> None:
        if iteration == 4:
            model.load_state_dict(first.kept["model"].state_dict())

    second.before = take_over
    compare([first, second, Plan(2, optimizer="momentum")])
    assert sizes["call", 3] >= 2

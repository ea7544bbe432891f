"""A step over all parameters at once gives torch's numbers, and one that fails has changed nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fluidtune.elastic.fused import FusedTrials, flat_steps
from fluidtune.elastic.fused.baton import Baton, Request, Runner
from fluidtune.elastic.fused.flat_steps import FlatStep
from fluidtune.elastic.fused.own_streams import OwnStreams
from fluidtune.elastic.fused.stack_memory import Slot, Stack

from .loops import OPTIMIZERS, Plan, compare, perceptron


def stacked() -> list[Slot]:
    """Two models beside each other."""
    slots = [Slot(None, perceptron()) for _ in range(2)]
    stack = Stack(slots[0].parts.shape)
    for slot in slots:
        stack.add(slot)
    stack.settle()
    return slots


def draw_gradients(models: list[nn.Module], number: int) -> None:
    for model in models:
        torch.manual_seed(number)
        for p in model.parameters():
            p.grad = torch.randn_like(p)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "rmsprop"])
def test_the_numbers_are_torchs(name: str) -> None:
    torch.manual_seed(1)
    slot = stacked()[1]
    alone = copy.deepcopy(slot.model)
    ours, theirs = (OPTIMIZERS[name](list(model.parameters()), 2) for model in (slot.model, alone))
    flat, done = FlatStep(ours, slot), []
    for number in range(6):
        draw_gradients([slot.model, alone], number)
        if number == 4:  # as a loop does that goes back to what it has saved
            for optimizer in (ours, theirs):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.param_groups[-1]["lr"] *= 0.5
        done.append(flat.step())
        if not done[-1]:
            ours.step()
        theirs.step()
        for mine, other in zip(slot.model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine, other)
    assert done == [not ours.state, *[True] * 5]
    for state, other in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert all(torch.equal(state[key], other[key]) for key in other) and state.keys() == other.keys()


def test_a_step_that_fails_is_the_optimizers_own_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = flat_steps._adam

    def failing(run: Any, grad: torch.Tensor, made: float, optimizer: torch.optim.Optimizer) -> Any:
        if made == 4 and optimizer.param_groups[0]["lr"] == 2e-3:  # the second trial's
            raise MemoryError("no room\nfor more")
        return adam(run, grad, made, optimizer)

    monkeypatch.setattr(flat_steps, "_adam", failing)
    trials = compare([Plan(i, optimizer="adam", epochs=3) for i in range(3)], fused=False)
    assert [trial.reasons for trial in trials] == [[], ["Adam steps by itself: MemoryError: no room"], []]


def test_memory_that_cannot_be_laid_out_leaves_each_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Stack) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Stack, "settle", failing)
    trials = compare([Plan(i) for i in range(2)], fused=False)
    assert all("MemoryError: no room" in line for trial in trials for line in trial.reasons)
    assert [len(trial.reasons) for trial in trials] == [1, 1]


def test_common_work_that_raises_is_left_to_each_loop() -> None:
    baton = Baton()
    runner = Runner("only", OwnStreams.of_process())

    def broken(requests: list[Request]) -> None:
        requests[0].result = "half"
        raise RuntimeError("broken")

    baton.add(runner)
    baton.enter(runner)
    request = Request("key", broken)
    baton.wait(runner, request)
    assert request.result is None and str(request.error) == "broken"
    baton.end(runner)


def test_a_trial_says_what_common_work_has_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FusedTrials, requests: list[Request]) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(FusedTrials, "perform_call", broken)
    trials = compare([Plan(i) for i in range(2)], fused=False)
    assert [trial.reasons for trial in trials] == [["common work was not done: RuntimeError: broken"]] * 2

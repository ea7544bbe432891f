"""Trials that are trained as one are what they are alone, whatever their neighbours do."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fluidtune.elastic.fused import FusedTrials, current_trial

from .loops import INPUTS, MODELS, OPTIMIZERS, Plan, Twice, compare, perceptron, plain, together


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_trained_as_alone(model: str, sizes: Counter[tuple[str, int]]) -> None:
    compare([Plan(i, model, "momentum", dropout=0.1 * i) for i in range(3)])
    assert sizes["call", 3] >= 6  # three iterations and a validation an epoch
    assert sizes["step", 1] == 3 * (6 - 1)  # all but the first one, which makes the state


def test_those_that_have_been_started_are_together_from_the_first_call_on(sizes: Counter[tuple[str, int]]) -> None:
    compare([Plan(i) for i in range(3)])
    assert sizes["call", 3] == 8  # three iterations and a validation in each of two epochs
    assert {trials for kind, trials in sizes if kind == "call"} == {3}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_steps_as_alone(optimizer: str, sizes: Counter[tuple[str, int]]) -> None:
    compare([Plan(i, "perceptron", optimizer, 3) for i in range(3)])
    assert sizes["step", 1] == {"rmsprop": 0, "sgd": 3 * 9, "two groups": 3 * 9}.get(optimizer, 3 * 8)


def test_different_batch_sizes_train_side_by_side() -> None:
    compare([Plan(i, batch=(16, 16, 10)[i]) for i in range(3)])


def test_a_trial_that_ends_or_raises_leaves_the_others_as_they_are() -> None:
    others = [Plan(1, optimizer="adam", raises=3), Plan(2, ends=2), Plan(3, optimizer="adam")]
    compare([Plan(0, optimizer="adam"), *others])


# -- what a trial leaves behind, and what it sees of itself --


def test_what_a_trial_saves_has_its_own_size() -> None:
    files: dict[int, list[int]] = {}

    def save(number: int) -> Any:
        def before(iteration: int, model: nn.Module) -> None:
            if iteration == 4:
                buffer = io.BytesIO()
                torch.save(model.state_dict(), buffer)
                copied = copy.deepcopy(model)
                assert pickle.loads(pickle.dumps(copied))(INPUTS[:2]).shape == (2, 4)
                files.setdefault(number, []).append(len(buffer.getvalue()))

        return before

    compare([Plan(i, optimizer="adam", before=save(i)) for i in range(3)])
    assert all(alone == fused for alone, fused in files.values())


def test_a_finished_trials_model_stays_as_it_is(sizes: Counter[tuple[str, int]]) -> None:
    short, long = Plan(0, epochs=1), Plan(1, epochs=3)
    weights: list[torch.Tensor] = []

    def look(iteration: int, _: nn.Module) -> None:
        if iteration >= 5:
            weights.append(next(short.kept["model"].parameters()).detach().clone())

    long.before = look
    together([short, long])
    assert len(weights) == 4 and all(torch.equal(weights[0], other) for other in weights)


def test_the_process_has_its_streams_and_functions_back() -> None:
    functions = nn.Module.__call__, torch.optim.SGD.step, torch.autograd.Function.apply
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    expected = random.random(), numpy.random.randn(), numpy.random.randn(), torch.rand(1).item()
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    together([Plan(0), Plan(1)])
    assert (random.random(), numpy.random.randn(), numpy.random.randn(), torch.rand(1).item()) == expected
    assert functions == (nn.Module.__call__, torch.optim.SGD.step, torch.autograd.Function.apply)
    assert float(Twice.apply(torch.ones(()))) == 2.0


def test_a_trial_that_blocks_does_not_hold_up_the_others() -> None:
    done = threading.Event()

    def blocked() -> str:
        trial = current_trial()
        assert trial is not None
        with trial.apart():
            assert done.wait(120)
        return "came back"

    def other() -> str:
        done.set()
        return "done"

    trials = FusedTrials()
    first, second = trials.start("first", blocked), trials.start("second", other)
    trials.join()
    assert (first.value, second.value) == ("came back", "done")


# -- steps as people write them --


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad(set_to_none=False)
    for half, labels in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.cross_entropy(model(half), labels) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return float(model(x).sum())


def two_calls(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    penalty = 1e-3 * next(model.parameters()).square().sum()
    loss = F.cross_entropy(model(x), y) + 0.1 * model(-x).square().mean() + penalty
    loss.backward()
    optimizer.step()
    return loss.item()


def retained(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    (0.1 * out.abs().mean()).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    return float(out.sum())


def adversarial(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    x = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return plain(model, optimizer, (x + 0.1 * slope.sign()).detach(), y)


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    def again() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return float(optimizer.step(again))


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    model.zero_grad()
    out = model(x)
    out.mul_(0.5)
    F.cross_entropy(out, y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.03 * p.grad
    return float(out.sum())


@pytest.mark.slow
@pytest.mark.parametrize("step", [accumulated, two_calls, retained, adversarial, with_closure, by_hand])
def test_steps_of_every_kind(step: Any) -> None:
    compare([Plan(i, optimizer="momentum", step=step) for i in range(2)])


def test_a_second_backward_pass_has_the_dropout_of_its_call() -> None:
    """Though the loop has drawn from its stream just before the call: the order of its samples."""
    compare([Plan(i, optimizer="momentum", step=retained, dropout=0.3) for i in range(2)])


def test_a_gradient_that_is_differentiated_is_computed_alone() -> None:
    def penalty(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = F.cross_entropy(model(x), y) + 0.1 * slope.flatten(1).norm(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    smooth = [Plan(i, model=lambda: nn.Sequential(perceptron(), nn.Tanh()), step=penalty) for i in range(2)]
    trials = compare(smooth, fused=False)
    assert any("differentiates its gradients" in line for trial in trials for line in trial.reasons)

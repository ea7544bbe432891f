"""Dropout draws for each of several trials what it draws for the trial alone; else the trials are not fused.

Cores stand in for a GPU: its operators (``native_dropout``, the attention of each trial by itself) are there, too, and
a generator of torch's on the CPU is that of the GPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fluidtune.elastic.fused import dropout_masks, own_streams
from fluidtune.elastic.fused.own_streams import OwnStreams
from fluidtune.elastic.fused.stacked_tensor import FORMS

from .loops import Attentive, Plan, compare, perceptron, plain


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operators for a GPU; they draw from the CPU's generator."""
    monkeypatch.setattr(dropout_masks, "on_gpu", lambda x: True)
    monkeypatch.setattr(own_streams, "gpu_generator", lambda: torch.default_generator)


@pytest.mark.parametrize("model", ["perceptron", "convolution", "transformer"])
def test_a_gpus_operators_draw_what_they_draw_alone(
    model: str, on_a_gpu: None, sizes: Counter[tuple[str, int]]
) -> None:
    compare([Plan(i, model, "momentum", dropout=0.1 * i) for i in range(3)])
    assert sizes["call", 3] >= 6


def test_attention_with_masks_on_a_gpu(on_a_gpu: None, sizes: Counter[tuple[str, int]]) -> None:
    class Masked(nn.Module):
        def __init__(self, own: bool) -> None:
            super().__init__()
            self.inner, self.own, self.head = Attentive(0.2), own, nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layer = self.inner.encoder.layers[0]
            padded = (x[..., 0] > 0.5) & (torch.arange(8) > 3) if self.own else None
            causal = torch.ones(8, 8, dtype=torch.bool).triu(1)
            return self.head(layer(x, src_mask=causal, src_key_padding_mask=padded).mean(1))

    for own in (False, True):
        compare([Plan(i, lambda own=own: Masked(own), "momentum") for i in range(2)])
    assert sizes["call", 2] == 16


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_gpu_draws_by_a_stream_or_in_an_order_of_its_own_is_not_fused(number: int, on_a_gpu: None) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(F.dropout(x[:, 1:5], 0.5, self.training).flatten(1))

    plans, reason = [
        ([Plan(i, "recurrent", dropout=0.1) for i in range(2)], "a stream of cuDNN's own"),
        ([Plan(i, Part) for i in range(2)], "a part of a tensor"),
    ][number]
    trials = compare(plans, fused=False)
    assert any(reason in line for trial in trials for line in trial.reasons)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The GPU's generator, from which dropout that is not in place draws, of one trial and of several."""
    stand_in, of_torch = torch.Generator().manual_seed(7), F.dropout

    def kernel(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.empty_like(x).bernoulli_(1 - p, generator=stand_in)
        return x * mask / (1 - p), mask

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if type(x) is torch.Tensor and training and 0 < p < 1:
            return kernel(x, p, True)[0]
        return of_torch(x, p, training, inplace)

    monkeypatch.setattr(dropout_masks, "on_gpu", lambda x: True)
    monkeypatch.setattr(own_streams, "gpu_generator", lambda: stand_in)
    monkeypatch.setattr(torch, "native_dropout", kernel)
    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setitem(FORMS, dropout, FORMS[of_torch])
    monkeypatch.setattr(torch.cuda, "manual_seed_all", stand_in.manual_seed)
    return stand_in


def test_each_trial_has_its_own_stream_of_the_gpu(gpu: torch.Generator, sizes: Counter[tuple[str, int]]) -> None:
    def before(iteration: int, _: nn.Module) -> None:
        torch.rand(iteration, generator=gpu)  # the loop draws from it, too

    plans = [Plan(i, optimizer="momentum", dropout=0.1 * i, before=before) for i in range(3)]
    compare([*plans, Plan(3, dropout=0.3, ends=4, before=before)])
    assert sizes["call", 4] >= 4 and sizes["call", 3] >= 2


def test_a_forward_that_draws_from_the_gpus_stream_is_not_fused(gpu: torch.Generator) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x + torch.randn(x.shape, generator=gpu))

    trials = compare([Plan(i, Noisy) for i in range(2)], fused=False)
    assert any("draws random numbers" in line for trial in trials for line in trial.reasons), trials[0].reasons


def test_a_second_backward_pass_has_the_dropout_that_the_gpu_drew(gpu: torch.Generator) -> None:
    def twice(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
        torch.rand(3, generator=gpu)
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward(retain_graph=True)
        (0.1 * out.abs().mean()).backward()
        optimizer.step()
        return out.sum().item()

    compare([Plan(i, optimizer="momentum", step=twice, dropout=0.3) for i in range(2)])


def test_a_stream_that_begins_when_another_trial_has_started_cuda_is_not_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = OwnStreams.of_process(), OwnStreams.of_process()
    generator = torch.Generator().manual_seed(1)
    first.put()
    monkeypatch.setattr(own_streams, "gpu_generator", lambda: generator)
    first.take()
    kept = generator.get_state()
    second.put()
    assert not torch.equal(generator.get_state(), kept)
    second.take()
    first.put()
    assert torch.equal(generator.get_state(), kept)


# -- on cores: in which order the numbers are drawn --


def _laid_out(layout: str) -> Any:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
        if layout == "transposed":
            return plain(model, optimizer, x.transpose(1, 2), y)
        return plain(model, optimizer, torch.stack([x, -x], 1).contiguous(memory_format=torch.channels_last), y)

    return step


def test_an_input_that_is_not_contiguous_is_dropped_out_of_as_alone(sizes: Counter[tuple[str, int]]) -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), perceptron())

    compare([Plan(i, dropping, step=_laid_out("transposed")) for i in range(2)])
    assert sizes["call", 2] == 8


def test_masks_that_are_not_those_of_a_trial_alone_are_noticed() -> None:
    class OfTwoChannels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(256, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x if x.dim() == 4 else torch.stack([x, -x], 1))  # type: ignore[no-any-return]

    trials = compare([Plan(i, OfTwoChannels, step=_laid_out("channels last")) for i in range(2)], fused=False)
    assert all(trial.error is None for trial in trials)
    assert any("another order" in line for trial in trials for line in trial.reasons)

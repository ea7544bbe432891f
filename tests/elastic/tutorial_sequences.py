"""Loops over sequences: see `tutorial_loops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from fluidtune import elastic

from .tutorial_loops import (
    Config,
    Loop,
    Meter,
    Report,
    loader_of,
    seeded,
    sgd,
    turns,
    weights,
)

WORDS = 9


def sentences(n: int = 44, length: int = 5, seed: int = 0) -> TensorDataset:
    words = torch.randint(1, WORDS, (n, length + 1), generator=seeded(seed))
    return TensorDataset(words[:, :-1], words[:, 1:])


# -- sequences --


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.cell = nn.Embedding(WORDS, 6), nn.LSTM(6, 7, batch_first=True)
        self.scores = nn.Linear(7, WORDS)
        self.double()

    def forward(self, x: torch.Tensor, hidden: Any = None) -> tuple[torch.Tensor, Any]:
        out, hidden = self.cell(self.words(x), hidden)
        return self.scores(out), hidden


def word_language(first: Callable[[Any], Any]) -> Loop:
    """The hidden state goes on from batch to batch. ``first``: of the batch, the state at an epoch's begin."""

    def loop(config: Config, report: Report) -> Any:
        model = Language()
        optimizer = sgd(model, 0.2)
        loader = loader_of(sentences(), shuffle=False, drop_last=True)
        model, optimizer, loader = elastic.prepare(model, optimizer, loader)
        for _ in turns(config):
            meter, hidden = Meter(), first(loader)
            for x, y in loader:
                optimizer.zero_grad()
                hidden = None if hidden is None else tuple(h.detach() for h in hidden)
                out, hidden = model(x, hidden)
                loss = F.cross_entropy(out.reshape(-1, WORDS), y.reshape(-1))
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                meter.update(loss.item(), len(x))
            report(meter.mean)
        return weights(model)

    return loop


def _zeros(loader: Any) -> Any:
    return tuple(torch.zeros(1, loader.batch_size, 7, dtype=torch.float64) for _ in range(2))


LOOPS: dict[str, Loop] = {
    "words, hidden from None": word_language(lambda loader: None),
    "words, hidden of the batch size": word_language(_zeros),
}

"""Loops over sequences: see `tutorial_loops`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import Dataset, TensorDataset

from fluidtune import elastic

from .tutorial_loops import (
    Config,
    Loop,
    Meter,
    Report,
    epoch_of,
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


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.scores = nn.Embedding(WORDS, 6), nn.Linear(7, WORDS)
        self.encoder, self.decoder = nn.GRU(6, 7, batch_first=True), nn.GRUCell(6, 7)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor, forced: float) -> torch.Tensor:
        hidden = self.encoder(self.words(x))[1][0]
        given, out = torch.zeros_like(y[:, 0]), []
        for t in range(y.shape[1]):
            hidden = self.decoder(self.words(given), hidden)
            out.append(self.scores(hidden))
            given = y[:, t] if random.random() < forced else out[-1].argmax(1)
        return torch.stack(out, 1)


def seq2seq(config: Config, report: Report) -> Any:
    """Teacher forcing, by one draw for each place of a batch."""
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(sentences()))
    for _ in turns(config):
        loss_fn = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
        meter = Meter()
        for x, y in loader:
            loss = loss_fn(model(x, y, 0.5), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), len(x))
        report(meter.mean)
    return weights(model)


def scheduled_sampling(prepared: bool) -> Loop:
    """Words are forced less often as the steps go on. ``prepared``: their number is."""

    def loop(config: Config, report: Report) -> Any:
        model = Seq2Seq()
        optimizer = sgd(model)
        progress = elastic.state(steps=0) if prepared else type("Progress", (), {"steps": 0})()
        model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(sentences()))
        for _ in turns(config):
            meter = Meter()
            for x, y in loader:
                progress.steps += 1
                out = model(x, y, max(0.0, 1 - progress.steps / 30))
                loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                meter.update(loss.item(), len(x))
            report(meter.mean)
        return weights(model)

    return loop


class Ragged(Dataset):
    """Sentences of two to seven words, and a number to predict."""

    def __init__(self) -> None:
        lengths = torch.randint(2, 8, (44,), generator=seeded(4)).tolist()
        self.all = [torch.randint(1, WORDS, (n,), generator=seeded(i)) for i, n in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.all[index]


def padded(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(s) for s in samples])
    return pad_sequence(samples, batch_first=True), lengths, torch.stack([s.double().mean() for s in samples]) / WORDS


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.cell, self.head = nn.Embedding(WORDS, 6, padding_idx=0), nn.GRU(6, 7), nn.Linear(7, 1)
        self.double()

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.cell(packed)[1][0]).squeeze(1)


class Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(WORDS, 8, padding_idx=0)
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.double()

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.words(x), x == 0
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64) < 0
        out = self.inner(
            hidden, hidden, tgt_mask=causal, src_key_padding_mask=mask, tgt_key_padding_mask=mask,
            memory_key_padding_mask=mask,
        )  # fmt: skip
        return self.head(out.masked_fill(mask.unsqueeze(2), 0.0).sum(1) / lengths.unsqueeze(1)).squeeze(1)


def over_padded(build: Callable[[], nn.Module]) -> Loop:
    def loop(config: Config, report: Report) -> Any:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(Ragged(), collate_fn=padded))
        for _ in turns(config):
            meter = Meter()
            for x, lengths, y in loader:
                loss = F.mse_loss(model(x, lengths), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                meter.update(loss.item(), len(x))
            report(meter.mean)
        return weights(model)

    return loop


def masked_language(config: Config, report: Report) -> Any:
    """A mean over the words that are there, which a part of the batch has more or fewer of."""
    model = Language()
    optimizer = sgd(model, 0.2)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(Ragged(), collate_fn=padded))
    for _ in turns(config):
        meter = Meter()
        for x, _, _ in loader:
            out, _ = model(x[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), x[:, 1:].flatten(), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), len(x))
        report(meter.mean)
    return weights(model)


def frozen_words(config: Config, report: Report) -> Any:
    table = torch.randn(WORDS, 6, generator=seeded(8), dtype=torch.float64)
    torch.manual_seed(1)
    words, head = nn.Embedding.from_pretrained(table, freeze=True), nn.Linear(6, WORDS).double()
    model = nn.Sequential(words, head)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.05)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(sentences()))
    loss_fn = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    for _ in turns(config):
        report(epoch_of(model, optimizer, loader, loss_fn))
    return weights(model)


LOOPS: dict[str, Loop] = {
    "words, hidden from None": word_language(lambda loader: None),
    "words, hidden of the batch size": word_language(_zeros),
    "seq2seq": seq2seq,
    "scheduled sampling": scheduled_sampling(prepared=False),
    "scheduled sampling, prepared": scheduled_sampling(prepared=True),
    "packed": over_padded(Packed),
    "transformer": over_padded(Translating),
    "masked language": masked_language,
    "frozen words": frozen_words,
}

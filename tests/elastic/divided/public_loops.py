"""Training loops of the kinds that public codes have, as their authors would write them, with tiny models.

Each loop is a generator. It yields the loss of each step. It returns the modules and tensors that are compared. A loop
knows nothing of FluidTune. ``LOOPS`` has, by name, the word that is expected of calls that stay whole, and whether some
are divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

STEPS = 12
Loop = Generator[float, None, Any]


class Row(NamedTuple):
    """``divided``: whether some call is; None: some may be. ``word``: why some stay whole.

    ``tolerance``: of losses and weights.
    """

    make: Callable[[], Loop]
    divided: bool | None
    word: str | None
    tolerance: float


LOOPS: dict[str, Row] = {}


def loop(word: str | None = None, divided: bool = True, tolerance: float = 1e-9) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        LOOPS[make.__name__] = Row(make, divided, word, tolerance)
        return make

    return keep


def labelled(n: int = 16, classes: int = 4, *shape: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(STEPS):
        yield torch.randn(n, *(shape or (8,))), torch.randint(classes, (n,))


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def stepped(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def sgd(*modules: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD([p for m in modules for p in m.parameters() if p.requires_grad], lr=lr, momentum=0.9)


def adam(*modules: nn.Module, lr: float = 1e-2) -> torch.optim.Adam:
    return torch.optim.Adam([p for m in modules for p in m.parameters() if p.requires_grad], lr=lr, eps=1e-3)


@loop()
def spectral_norm_and_r1() -> Loop:
    net_d = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 12)), nn.Softplus(), nn.Linear(12, 1))
    net_g = mlp(3, 12, 6)
    of_d, of_g = adam(net_d), adam(net_g)
    for _ in range(STEPS):
        real = torch.randn(12, 6, requires_grad=True)
        score = net_d(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        fake = net_g(torch.randn(12, 3))
        loss = F.softplus(net_d(fake.detach())).mean() + F.softplus(-score).mean() + slope.square().sum(1).mean()
        yield stepped(of_d, loss) + stepped(of_g, F.softplus(-net_d(fake)).mean())
    return net_d, net_g


@loop()
def mixture_density_with_strided_outputs() -> Loop:
    """The model returns a transposed tensor, which the loop transposes back and views."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))

        def forward(self, x: Any) -> Any:
            return self.net(x).view(len(x), -1, 4, 3).flatten(1, 2).permute(0, 2, 1)

    model = Mixture()
    optimizer = adam(model)
    for _ in range(STEPS):
        x = torch.randn(10, 5, 8)
        out = model(x)
        noisy = out + 0.1 * torch.randn_like(out)
        flat = noisy.permute(0, 2, 1).view(-1, 3)
        yield stepped(optimizer, torch.logsumexp(F.dropout(flat, 0.1), 1).square().mean())
    return model


@loop()
def moco_with_a_queue() -> Loop:
    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder_q, self.encoder_k = mlp(8, 12, 6), mlp(8, 12, 6)
            for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                k.data.copy_(q.data)
                k.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(6, 24), dim=0))
            self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

        def forward(self, im_q: Any, im_k: Any) -> Any:
            q = F.normalize(self.encoder_q(im_q), dim=1)
            with torch.no_grad():
                for a, b in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                    b.data = b.data * 0.9 + a.data * 0.1
                order = torch.randperm(len(im_k))
                k = F.normalize(self.encoder_k(im_k[order]), dim=1)[torch.argsort(order)]
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
            at = int(self.ptr)
            self.queue[:, at : at + len(k)] = k.T
            self.ptr[0] = (at + len(k)) % 24
            return logits, torch.zeros(len(q), dtype=torch.long)

    model = MoCo()
    optimizer = sgd(model)
    for x, _ in labelled(12):
        yield stepped(optimizer, F.cross_entropy(*model(x, x + 0.1 * torch.randn_like(x))))
    return model


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, drop: float) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.drop = nn.Linear(d, 3 * d), nn.Linear(d, d), heads, nn.Dropout(drop)

    def forward(self, x: Any, mask: Any) -> Any:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = (q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)).masked_fill(mask == 0, float("-inf"))
        return self.proj((self.drop(a.softmax(-1)) @ v).transpose(1, 2).reshape(b, t, d))


class Gpt(nn.Module):
    def __init__(self, vocab: int = 9, d: int = 8, drop: float = 0.1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, d), nn.Embedding(16, d)
        self.attn, self.ff = Attention(d, 2, drop), mlp(d, 16, d, act=nn.GELU)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Any, mask: Any) -> Any:
        z = self.token(x) + self.place(torch.arange(x.size(1)))
        z = z + self.attn(self.ln1(z), mask)
        return self.head(z + self.ff(self.ln2(z)))


@loop()
def causal_mask_of_the_size_of_the_batch() -> Loop:
    model = Gpt(drop=0.0)
    optimizer = adam(model)
    for i in range(STEPS):
        x = torch.randint(9, (6 if i < 5 or i > 9 else 8, 7))
        logits = model(x[:, :-1], torch.tril(torch.ones(6, 6)))
        yield stepped(optimizer, F.cross_entropy(logits.reshape(-1, 9), x[:, 1:].reshape(-1)))
    return model


@loop()
def complex_network() -> Loop:
    model = nn.Sequential(nn.Linear(6, 8, dtype=torch.complex128), nn.Linear(8, 4, dtype=torch.complex128))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        x = torch.fft.fft(torch.randn(12, 6))
        yield stepped(optimizer, (model(x).abs() - 1).square().mean())
    return model


@loop("is sparse")
def sparse_embeddings() -> Loop:
    embed, head = nn.Embedding(20, 6, sparse=True), nn.Linear(6, 4)
    sparse, dense = torch.optim.SparseAdam(embed.parameters(), 1e-2), adam(head)
    for _ in range(STEPS):
        x, y = torch.randint(20, (12, 3)), torch.randint(4, (12,))
        loss = F.cross_entropy(head(embed(x).mean(1)), y)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        yield loss.item()
    return embed, head


@loop()
def maml() -> Loop:
    model = mlp(8, 10, 4, act=nn.Tanh)
    optimizer = adam(model)
    for _ in range(STEPS):
        total: Any = 0.0
        for _ in range(2):
            (x, y), (qx, qy) = ((torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(2))
            names, fast = zip(*model.named_parameters(), strict=True)
            for _ in range(2):
                loss = F.cross_entropy(torch.func.functional_call(model, dict(zip(names, fast, strict=True)), (x,)), y)
                slopes = torch.autograd.grad(loss, fast, create_graph=True)
                fast = tuple(p - 0.1 * g for p, g in zip(fast, slopes, strict=True))
            out = torch.func.functional_call(model, dict(zip(names, fast, strict=True)), (qx,))
            total = total + F.cross_entropy(out, qy)
        with torch.no_grad():
            model(qx)
        yield stepped(optimizer, total)
    return model


@loop()
def data_parallel_on_the_cpu() -> Loop:
    model = nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 4)))
    optimizer = sgd(model)
    for x, y in labelled(12, 4, 3, 6, 6):
        yield stepped(optimizer, F.cross_entropy(model(x), y))
    return model

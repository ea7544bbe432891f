"""Kinds of modules and of calls: what is divided, and what stays whole and with which word.

Each kind is a function that returns (module, step); ``step(module, x, y, i)`` is the loss of step i, or does the step
itself and returns a number. ``LOOPS`` gets a loop of it: of a ``divided`` kind some calls are divided, and of a
``whole`` one some stay whole, with a part of the word that says why.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fluidtune.elastic.divided.module_calls import keep_whole

#: Of each kind.
STEPS = 16


class Row(NamedTuple):
    """A loop, which yields the loss of each step and returns its module.

    ``divided``: whether some call is; None: some may be. ``word``: why some stay whole. ``tolerance``: of losses and
    weights.
    """

    make: Callable[[], Generator[float, None, nn.Module]]
    divided: bool | None
    word: str | None
    tolerance: float


LOOPS: dict[str, Row] = {}


def keep(name: str, make: Any, divided: bool | None, word: str | None, tolerance: float = 1e-9) -> Any:
    def loop() -> Generator[float, None, nn.Module]:
        module, step = make()
        data = torch.Generator().manual_seed(2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for i in range(STEPS):
            x = torch.randn(13 if i % 4 == 3 else 20, 12, generator=data)
            y = torch.randint(5, (len(x),), generator=data)
            loss = step(module, x, y, i)
            if isinstance(loss, torch.Tensor):
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
            yield float(loss)
        return module

    assert name not in LOOPS
    LOOPS[name] = Row(loop, divided, word, tolerance)
    return make


def divided(make: Any) -> Any:
    return keep(make.__name__, make, True, None)


def roughly(tolerance: float) -> Any:
    """Divided, and equal to itself alone within this."""
    return lambda make: keep(make.__name__, make, True, None, tolerance)


def whole(word: str) -> Any:
    return lambda make: keep(make.__name__, make, None, word)


def net(*more: nn.Module, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, width), nn.Tanh(), *more, nn.Linear(width, 5))


def stepped(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def entropy(m: Any, x: torch.Tensor, y: torch.Tensor, i: int) -> torch.Tensor:
    return F.cross_entropy(m(x), y)


def five(m: Any, x: torch.Tensor, y: torch.Tensor, i: int) -> torch.Tensor:
    """Of a module that returns as many numbers as it is given."""
    return F.cross_entropy(m(x)[:, :5], y)


class Of(nn.Module):
    """A module with this forward, over a net. ``more``: its attributes."""

    def __init__(self, forward: Callable[..., Any], **more: Any) -> None:
        super().__init__()
        self.net = net()
        self.run = forward
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def scaled(forward: Callable[..., Any], **more: Any) -> Of:
    """With a weight that is one number, and 1 at first."""
    return Of(forward, scale=nn.Parameter(torch.ones(())), **more)


@dataclass
class Seen:
    logits: torch.Tensor
    extra: list[torch.Tensor]
    name: str = "seen"


# --- structures


@divided
def evaluation_and_inference() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        loss = F.cross_entropy(m(x), y)
        m.eval()
        with torch.inference_mode() if i % 2 else torch.no_grad():
            score = m(x).argmax(1).eq(y).double().mean()
        m.train()
        return loss * (1 + score.item())

    return net(nn.Dropout(0.2)), step


class Outputs(OrderedDict[str, Any]):
    """As the outputs of Transformers' models: a dictionary in order, whose entries are attributes, too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


@divided
def dictionaries() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        out = m({"x": x, "y": [y, None]}, scale=2.0)
        assert list(out) == ["logits", "more"]
        return F.cross_entropy(out[0], y) + out["more"][1].mean() + out.more[1].square().mean()

    def run(self: Any, batch: Any, scale: float) -> Any:
        z = self.net(batch["x"]) * scale
        return Outputs(logits=z, more=(batch["y"][0], z.exp()))

    return Of(run), step


@divided
def dataclasses_() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        seen = m(Seen(x, [y]))
        assert seen.name == "out"
        return F.cross_entropy(seen.logits, y) + seen.extra[0].square().mean()

    return Of(
        lambda self, seen: Seen(self.net(seen.logits), [seen.logits.sum(1) * self.net[0].bias.sum()], "out")
    ), step


@divided
def second_dimension() -> Any:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(4, 8, num_layers=2, dropout=0.3), nn.Linear(8, 5)

        def forward(self, x: Any) -> Any:
            z, (h, _) = self.cell(x)
            return self.head(z[-1]), h

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        out, h = m(x.view(-1, 3, 4).transpose(0, 1))
        return F.cross_entropy(out, y) + h.square().mean()

    return Recurrent(), step


@divided
def an_input_with_as_many_rows_as_the_batch() -> Any:
    """A causal mask, which is no batch."""

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        x, y = (x[:12], y[:12]) if i < 6 or i > 10 else (x, y)
        return F.cross_entropy(m(x, torch.tril(torch.ones(12, 12))), y)

    return Of(lambda self, x, mask: self.net(x @ mask)), step


@divided
def attributes_of_the_module_and_of_its_class() -> Any:
    class Scaled(Of):
        factor = 1.0
        of_class: ClassVar = {"late": False}

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        # One at a time, and no other one gets a new object: it alone must be noticed.
        m.scale, Scaled.factor = (2.0 if i >= change else 1.0 for change in (4, 6))
        m.table["late"], Scaled.of_class["late"] = i >= 11, i == 9
        return F.cross_entropy(m(x), y)

    def run(self: Any, x: Any) -> Any:
        late = self.table["late"] or self.of_class["late"]
        return self.net(x - x.mean(0) if late else x) * self.scale * self.factor

    return Scaled(run, scale=1.0, table={"late": False}), step


TEMPERATURE = 1.0


@divided
def what_functions_find_around_them() -> Any:
    """A function that is an attribute: variables, a dictionary, a class of settings, a default, its own attribute."""
    scale, table, default = 1.0, {"late": False}, {"scale": 1.0}

    class Settings:
        scale = 1.0

    def run(self: Any, x: Any, own: Any = default) -> Any:
        z = self.net(x - x.mean(0) if table["late"] else x) * scale * TEMPERATURE
        return z * Settings.scale * own["scale"] * run.scale

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        nonlocal scale
        scale, default["scale"], Settings.scale = (2.0 if i >= change else 1.0 for change in (4, 6, 8))
        globals()["TEMPERATURE"], run.scale = (2.0 if i >= change else 1.0 for change in (10, 12))
        table["late"] = i >= 14
        return F.cross_entropy(m(x), y)

    run.scale = 1.0
    return Of(run), step


@divided
def more_samples_go_another_way() -> Any:
    def run(self: Any, x: Any) -> Any:
        z = self.net(x)
        return z - z.mean(0) if len(x) > 15 else z

    return Of(run), lambda m, x, y, i: F.cross_entropy(m(x[: 13 if i < 8 else 20]), y[: 13 if i < 8 else 20])


@divided
def a_wrapper_that_hands_attributes_on() -> Any:
    """As Fabric's: what is set on it is set on the module that it wraps."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __setattr__(self, name: str, value: Any) -> None:
            if "_modules" in self.__dict__ and "inner" in self._modules and hasattr(self.inner, name):
                setattr(self.inner, name, value)
            else:
                super().__setattr__(name, value)

        def forward(self, *args: Any) -> Any:
            return self.inner(*args)

    return Wrapper(net()), entropy


# --- several modules, weights


@divided
def two_modules_with_tied_weights() -> Any:
    one, two = net(), net()
    two[2].weight = one[2].weight
    one[2].bias = two[2].bias
    return nn.ModuleList([one, two]), lambda m, x, y, i: F.cross_entropy(m[0](x) + m[1](x.flip(1)), y)


@roughly(1e-5)
def layers_added_frozen_and_cast() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        if i == 5:
            m.insert(2, nn.Linear(16, 16))
        if i == 8:
            m[0].requires_grad_(False)
        if i == 11:
            m.float()
        if i == 13:
            m.double()
        return F.cross_entropy(m(x.float() if 11 <= i < 13 else x).double(), y)

    return net(), step


@divided
def weights_written_in_every_way() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        with torch.no_grad():
            if i == 4:
                m[0].weight.data.mul_(1.1)
            if i == 6:
                m[0].weight.data = m[0].weight.data * 0.9
            if i == 8:
                m[2].bias.detach().numpy()[:] += 0.1
        return F.cross_entropy(m(x), y)

    return net(), step


@divided
def copies_and_pickles_of_a_model() -> Any:
    """A copy that is made while calls are divided computes alone, with its own weights."""

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        other = copy.deepcopy(m) if i % 2 else torch.load(_saved(m), weights_only=False)
        with torch.no_grad():
            other[0].weight.add_(1.0)
            assert not torch.equal(other(x), m(x))
        return F.cross_entropy(m(x), y)

    return net(), step


def _saved(m: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return file


# --- random numbers


@divided
def dropouts_and_a_sampler_on_the_same_stream() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        order = torch.randperm(len(x))
        return F.cross_entropy(m(x[order]), y[order])

    return net(nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)), step


@divided
def channels_in_another_order() -> Any:
    m = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(54, 5))
    images = torch.randn(40, 3, 5, 5, generator=torch.Generator().manual_seed(3)).to(memory_format=torch.channels_last)
    return m.to(memory_format=torch.channels_last), lambda m, x, y, i: F.cross_entropy(m(images[: len(x)]), y)


@divided
def noise_in_forward() -> Any:
    def run(self: Any, x: Any) -> Any:
        z = self.net(x)
        noise = torch.randn_like(z) + torch.rand(z.shape) + torch.empty_like(z).exponential_()
        return z + 0.1 * noise + 0.1 * torch.randint(0, 5, (len(x), 5)) + F.gumbel_softmax(z)

    return Of(run), entropy


# --- graphs


@divided
def second_derivatives() -> Any:
    """Seen: a hook on the gradient of a weight changed it twice."""

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(m(x), y)
        slopes = torch.autograd.grad(loss, [x, m[0].weight], create_graph=True)
        return loss + sum(slope.square().sum() for slope in slopes)

    m = net(nn.BatchNorm1d(16), nn.Dropout(0.1))
    m[0].weight.register_hook(lambda grad: 2 * grad)
    return m, step


@divided
def several_backwards() -> Any:
    """One keeps the graph, the order is another one, and one graph is never used."""
    own = net()
    optimizer = torch.optim.SGD(own.parameters(), 0.05)

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        a, b, unused = m(x), m(x * 2), m(x * 3)
        optimizer.zero_grad()
        F.cross_entropy(a, y).backward(retain_graph=True)
        F.cross_entropy(b, y).backward()
        a.square().mean().backward()
        optimizer.step()
        return a.sum().item() + unused.sum().item()

    return own, step


@divided
def outputs_changed_in_place() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        out = m(x)
        out.mul_(2.0)
        out[:, 0] += 1.0
        return F.cross_entropy(out, y)

    return net(), step


@divided
def a_head_without_a_loss() -> Any:
    """Weights that get no gradient keep none: weight decay would move them."""
    m = Of(lambda self, x: (self.net(x), self.head(x)), head=nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.5)

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        a, b = m(x)
        return stepped(optimizer, F.cross_entropy(a, y) + (b.mean() if i % 2 else 0.0))

    return m, step


@divided
def hooks_on_gradients() -> Any:
    m = net()
    m[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def halve(p: Any) -> None:
        p.grad.mul_(0.5)

    m[2].weight.register_post_accumulate_grad_hook(halve)
    return m, entropy


@divided
def fused_optimizer() -> Any:
    m = net()
    optimizer = torch.optim.AdamW(m.parameters(), 1e-2, fused=True)
    return m, lambda m, x, y, i: stepped(optimizer, F.cross_entropy(m(x), y))


@divided
def checkpoint_inside() -> Any:
    def run(self: Any, x: Any) -> Any:
        z = checkpoint(self.deep, x, use_reentrant=False)
        return self.net(checkpoint(self.deep, z, use_reentrant=False))

    return Of(run, deep=nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3), nn.Tanh())), entropy


@roughly(1e-2)
def autocast() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = m(x.float())
        return F.cross_entropy(out.double(), y)

    return net().float(), step


# --- as public codes have them


@divided
def spectral_norm_and_r1() -> Any:
    """Adversaries with two optimizers."""
    net_d = nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 12)), nn.Softplus(), nn.Linear(12, 1))
    both = nn.ModuleList([net_d, nn.Linear(3, 12)])
    of_d, of_g = (torch.optim.Adam(each.parameters(), lr=1e-2, eps=1e-3) for each in both)

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        real, fake = x.clone().requires_grad_(), m[1](torch.randn(len(x), 3))
        score = m[0](real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        loss = F.softplus(m[0](fake.detach())).mean() + F.softplus(-score).mean() + slope.square().sum(1).mean()
        return stepped(of_d, loss) + stepped(of_g, F.softplus(-m[0](fake)).mean())

    return both, step


@divided
def moco_with_a_queue() -> Any:
    """A teacher that is an average of weights."""

    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder_q = net()
            self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(5, 24), dim=0))
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

    return MoCo(), lambda m, x, y, i: F.cross_entropy(*m(x[:12], x[:12] + 0.1 * torch.randn(12, 12)))


@divided
def maml() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        total: Any = 0.0
        for half in (slice(0, None, 2), slice(1, None, 2)):
            fast = dict(m.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(torch.func.functional_call(m, fast, (x[half],)), y[half])
                slopes = torch.autograd.grad(loss, fast.values(), create_graph=True)
                fast = {name: fast[name] - 0.1 * slope for name, slope in zip(fast, slopes, strict=True)}
            total = total + F.cross_entropy(torch.func.functional_call(m, fast, (x[half],)), y[half])
        with torch.no_grad():
            m(x)
        return total

    return net(), step


@divided
def strided_outputs() -> Any:
    """The model returns a transposed tensor, which the loop transposes back and views."""

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        out = m(x)
        flat = (out + 0.1 * torch.randn_like(out)).permute(0, 2, 1).view(-1, 5)
        return torch.logsumexp(F.dropout(flat, 0.1), 1).square().mean()

    return Of(lambda self, x: self.net(x[:, None] * torch.arange(1.0, 4.0)[:, None]).permute(0, 2, 1)), step


@whole("is sparse")
def sparse_embeddings() -> Any:
    m = nn.ModuleList([nn.Embedding(20, 6, sparse=True), nn.Linear(6, 5)])
    sparse, dense = torch.optim.SparseAdam(m[0].parameters(), 1e-2), torch.optim.SGD(m[1].parameters(), 0.05)

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        sparse.zero_grad()
        loss = stepped(dense, F.cross_entropy(m[1](m[0](torch.randint(20, (len(x), 3))).mean(1)), y))
        sparse.step()
        return loss

    return m, step


# --- what stays whole


@whole("leaves something behind")
def a_memory_bank() -> Any:
    def run(self: Any, x: Any) -> Any:
        self.bank.append(x.detach().mean(0))
        return x * self.scale + torch.stack(self.bank[-3:]).mean(0)

    return scaled(run, bank=[]), five


@whole("changes seen")
def a_buffer_changed_in_forward() -> Any:
    m = scaled(lambda self, x: x * self.scale + self.seen.add_(1.0).mean())
    m.register_buffer("seen", torch.zeros(1))
    return m, five


class _LargestSeen(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax(0)))
        return super().forward(x)


@whole("changes 0.largest")
def a_batch_normalisation_with_a_buffer_of_its_own() -> Any:
    """Found by reading: each process had the largest of its own part."""
    norm = _LargestSeen(12)
    norm.register_buffer("largest", torch.zeros(12))
    m = nn.Sequential(norm, nn.Linear(12, 5))
    return m, lambda m, x, y, i: F.cross_entropy(m(x), y) + m[0].largest.sum()


@whole("leaves something behind")
def a_buffer_changed_in_some_calls() -> Any:
    def run(self: Any, x: Any) -> Any:
        if x[:, 0].max() > 1.8:
            self.seen.add_(1.0)
            self.count = self.count + 1
        return self.net(x) * (1 + self.seen / 10 + self.count)

    m = Of(run, count=0)
    m.register_buffer("seen", torch.zeros(1))
    return m, entropy


@whole("randperm")
def a_permutation_in_some_calls() -> Any:
    def run(self: Any, x: Any) -> Any:
        z = self.net(x)
        return z + z[torch.randperm(len(z))] if float(torch.rand(1)) < 0.3 else z

    return Of(run), entropy


@whole("outside of it")
def a_list_outside_that_the_forward_fills() -> Any:
    rows: list[int] = []

    def run(self: Any, x: Any) -> Any:
        rows.append(len(x))
        return self.net(x) * (1 + len(rows) / 50)

    return Of(run), entropy


@whole("changes its inputs")
def inputs_changed_in_place() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        x = x.clone()
        return F.cross_entropy(m(x)[:, :5] * x[:, :5], y)

    return scaled(lambda self, x: x.mul_(2.0) * self.scale), step


@whole("hooks")
def hooks_of_others() -> Any:
    m = nn.Linear(12, 5)
    m.register_forward_hook(lambda module, args, out: out * 2)
    return m, entropy


@whole("hooks are there for all modules")
def hooks_on_all_modules() -> Any:
    from torch.nn.modules.module import register_module_forward_hook

    seen: list[int] = []

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        handle = register_module_forward_hook(lambda module, args, out: seen.append(len(args[0])))
        loss = F.cross_entropy(m(x), y)
        handle.remove()
        assert set(seen) == {len(x)}
        seen.clear()
        return loss

    return nn.Linear(12, 5), step


@whole("cannot be pickled")
def a_lock() -> Any:
    m = nn.Linear(12, 5)
    m.lock = threading.Lock()
    return m, entropy


@whole("functional transform")
def functional_transforms() -> Any:
    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        whole = F.cross_entropy(m(x), y)
        each = torch.func.vmap(m)(x)
        return whole + F.cross_entropy(each, y)

    return nn.Linear(12, 5), step


@whole("tensor of another kind")
def tensor_subclasses() -> Any:
    class Tagged(torch.Tensor):
        pass

    return nn.Linear(12, 5), lambda m, x, y, i: F.cross_entropy(m(x.as_subclass(Tagged)).as_subclass(torch.Tensor), y)


@whole("TorchDispatchMode")
def a_dispatch_mode() -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        with FlopCounterMode(display=False):
            return F.cross_entropy(m(x), y)

    return nn.Linear(12, 5), step


@whole("view")
def an_output_that_is_the_input() -> Any:
    m = scaled(lambda self, x: x if self.scale is not None else None)

    def step(m: Any, x: Any, y: Any, i: int) -> Any:
        x = x.clone()
        m(x).add_(1.0)
        return F.cross_entropy((x * m.scale)[:, :5], y)

    return m, step


# --- kinds that are a module and a step, and no more


def without_batch(m: Any, x: torch.Tensor, y: torch.Tensor, i: int) -> torch.Tensor:
    z, scale = m(x)
    return F.cross_entropy(z * scale, y)


#: By name, the word that is logged (None: calls are divided), what makes the module, and the step.
ROWS: dict[str, tuple[str | None, Callable[[], nn.Module], Any]] = {
    "lists_with_an_entry_a_sample": (
        "a part of the batch fails",
        lambda: Of(lambda self, rows: [self.net(row[None]) for row in rows]),
        lambda m, x, y, i: F.cross_entropy(torch.cat(m([*x.clone()])), y),
    ),
    "what_has_no_batch": (None, lambda: scaled(lambda self, x: (self.net(x), self.scale.exp())), without_batch),
    "loss_inside_with_an_ignored_label": (
        None,
        lambda: Of(lambda self, x, y: F.cross_entropy(self.net(x), y)),
        lambda m, x, y, i: m(x, torch.where(y == 1, -100, y) if i > 4 else y),
    ),
    # From step 8 on samples are mixed: a plain value says so, so that such a call is checked anew.
    "plain_values_that_change": (
        None,
        lambda: Of(lambda self, x, k: self.net(x - x.mean(0) if k == "late" else x)),
        lambda m, x, y, i: F.cross_entropy(m(x, "late" if i >= 8 else "early"), y),
    ),
    "batches_smaller_than_the_width": (None, net, lambda m, x, y, i: entropy(m, x[: 1 + i % 5], y[: 1 + i % 5], i)),
    "attention_with_dropout": (
        None,
        lambda: nn.TransformerEncoderLayer(12, 3, 16, dropout=0.2, batch_first=True),
        lambda m, x, y, i: F.cross_entropy(m(x[:, None] * torch.ones(1, 4, 1)).mean(1)[:, :5], y),
    ),
    "batch_normalisation": (
        None,
        lambda: net(nn.BatchNorm1d(16), nn.Dropout(0.2), nn.BatchNorm1d(16, momentum=None, affine=False)),
        entropy,
    ),
    "reentrant_checkpoint_around": (
        None,
        lambda: net(nn.Dropout(0.3)),
        lambda m, x, y, i: F.cross_entropy(checkpoint(m, x.clone().requires_grad_(), use_reentrant=True), y),
    ),
    "complex_network": (
        None,
        lambda: nn.Sequential(*(nn.Linear(12 - 4 * k, 8 - 4 * k, dtype=torch.complex128) for k in range(2))),
        lambda m, x, y, i: (m(torch.fft.fft(x)).abs() - 1).square().mean(),
    ),
    "data_parallel_on_the_cpu": (None, lambda: nn.DataParallel(net(nn.BatchNorm1d(16))), entropy),
    "attention_over_the_batch": (
        "mixes samples",
        lambda: Of(lambda self, x: torch.softmax(x @ x.T * self.net[0].bias.exp().sum(), 1) @ x),
        five,
    ),
    "draws_of_python": (
        "random numbers of Python or NumPy",
        lambda: scaled(lambda self, x: x * self.scale * random.random()),
        five,
    ),
    "draws_inside_a_kernel": (
        "draws",
        lambda: nn.Sequential(nn.RReLU(), nn.PReLU()),
        lambda m, x, y, i: F.cross_entropy(m[0](m[1](x))[:, :5], y) + 0 * m(x).sum(),
    ),
    "no_batch_at_all": (
        "no dimension of its inputs",
        lambda: Of(lambda self: self.table * 2.0, table=nn.Parameter(torch.ones(12, 5))),
        lambda m, x, y, i: F.cross_entropy(x @ m(), y),
    ),
    "compiled": ("compiled", lambda: torch.compile(nn.Linear(12, 5), backend="eager"), entropy),
    "checkpoint_around": (
        "saved for the backward",
        lambda: nn.Linear(12, 5),
        lambda m, x, y, i: F.cross_entropy(checkpoint(m, x, use_reentrant=False), y),
    ),
    "another_value_each_call": (
        "each of its calls is of another kind",
        lambda: scaled(lambda self, x, i: x * self.scale * i),
        lambda m, x, y, i: sum(F.cross_entropy(m(x, 1.0 + i + k / 20)[:, :5], y) for k in range(12)),
    ),
    "kept_whole": ("keep_whole", lambda: keep_whole(nn.Linear(12, 5)), entropy),
}
for _name, (_word, _make, _step) in ROWS.items():
    keep(_name, lambda make=_make, step=_step: (make(), step), True if _word is None else None, _word)

"""Training loops of the kinds that public codes have, as their authors would write them, with tiny models.

Each loop is a generator. It yields the loss of each step. It returns the modules and tensors that are compared. A loop
knows nothing of FluidTune. ``LOOPS`` has, by name, the word that is expected of calls that stay whole, and whether some
are divided.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

STEPS = 12
Loop = Generator[float, None, Any]


class Row(NamedTuple):
    """``divided``: whether some call is. ``word``: why some stay whole. ``tolerance``: of losses and weights."""

    make: Callable[[], Loop]
    divided: bool
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


# --- images


class Block(nn.Module):
    def __init__(self, c: int, drop: float = 0.0) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.drop = drop

    def forward(self, x: Any) -> Any:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        if self.drop and self.training:  # stochastic depth, by sample
            out = out * torch.empty(len(x), 1, 1, 1).bernoulli_(1 - self.drop) / (1 - self.drop)
        return F.relu(out + x, inplace=True)


class ResNet(nn.Module):
    def __init__(self, c: int = 4, classes: int = 4, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Block(c, drop), nn.MaxPool2d(2), Block(c, drop))
        self.fc = nn.Linear(c, classes)

    def forward(self, x: Any) -> Any:
        x = self.layers(self.stem(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


@loop()
def resnet_and_data_loader() -> Loop:
    model = ResNet()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    loader = DataLoader(TensorDataset(torch.randn(44, 3, 6, 6), torch.randint(4, (44,))), batch_size=16, shuffle=True)
    for _ in range(STEPS // 3):
        model.train()
        for x, y in loader:
            yield stepped(optimizer, F.cross_entropy(model(x), y, label_smoothing=0.1))
            scheduler.step()
        model.eval()
        with torch.no_grad():
            sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return model


@loop()
def stochastic_depth_and_mixup_or_cutmix() -> Loop:
    model = ResNet(drop=0.3)
    optimizer = sgd(model)
    for x, y in labelled(16, 4, 3, 6, 6):
        lam, order = np.random.beta(1.0, 1.0), torch.randperm(len(x))
        if np.random.rand() < 0.5:
            x = lam * x + (1 - lam) * x[order]
        else:
            x[:, :, :3, 2:5], lam = x[order, :, :3, 2:5], 0.75
        out = model(x)
        yield stepped(optimizer, lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[order]))
    return model


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 5, 1)
        self.aux = nn.Conv2d(8, 5, 1)

    def forward(self, x: Any) -> Any:
        a = self.down(x)
        b = F.relu(self.mid(F.max_pool2d(a, 2)))
        out = {"out": self.head(torch.cat([a, self.up(b)], 1))}
        if self.training:
            out["aux"] = F.interpolate(self.aux(b), x.shape[-2:], mode="bilinear", align_corners=False)
        return out


@loop()
def unet_with_ignored_pixels_and_dice() -> Loop:
    model = UNet()
    optimizer = adam(model)
    for _ in range(STEPS):
        x, y = torch.randn(10, 3, 6, 6), torch.randint(5, (10, 6, 6))
        y[torch.rand(y.shape) < 0.2] = 255
        out = model(x)
        loss = F.cross_entropy(out["out"], y, ignore_index=255) + 0.4 * F.cross_entropy(out["aux"], y, ignore_index=255)
        p = out["out"].softmax(1)[:, 1]
        dice = 1 - 2 * (p * (y == 1)).sum() / (p.sum() + (y == 1).sum() + 1)
        yield stepped(optimizer, loss + dice)
    return model


@loop()
def detector_with_a_list_of_targets() -> Loop:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
            self.cls, self.reg = nn.Linear(16, 3), nn.Linear(16, 4)

        def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]] | None = None) -> Any:
            f = self.backbone(torch.stack(images)).flatten(1)
            scores, boxes = self.cls(f), self.reg(f)
            if not self.training:
                return [{"scores": s, "boxes": b} for s, b in zip(scores, boxes, strict=True)]
            assert targets is not None
            each = [(b - t["boxes"]).abs().mean() for b, t in zip(boxes, targets, strict=True)]
            labels = torch.stack([t["labels"][0] for t in targets])
            return {"box": torch.stack(each).mean(), "cls": F.cross_entropy(scores, labels)}

    model = Detector()
    optimizer = sgd(model)
    for _ in range(STEPS):
        images = [torch.randn(3, 6, 6) for _ in range(8)]
        counts = [random.randint(1, 3) for _ in range(8)]
        targets = [{"boxes": torch.rand(k, 4), "labels": torch.randint(3, (k,))} for k in counts]
        losses = model(images, targets)
        yield stepped(optimizer, sum(losses.values()))
        model.eval()
        with torch.no_grad():
            assert len(model(images)) == 8
        model.train()
    return model


@loop()
def online_hard_examples_and_focal() -> Loop:
    model = ResNet()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(labelled(16, 4, 3, 6, 6)):
        each = F.cross_entropy(model(x), y, reduction="none")
        focal = (1 - torch.exp(-each)) ** 2 * each
        yield stepped(optimizer, each.topk(6)[0].mean() if i % 2 else focal.mean())
    return model


@loop()
def margins_and_class_weights_from_a_later_epoch() -> Loop:
    counts = np.array([40.0, 20.0, 10.0, 5.0])
    margins = torch.tensor(0.5 / np.sqrt(np.sqrt(counts)))

    class NormedLinear(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(a, b))

        def forward(self, x: Any) -> Any:
            return F.normalize(x, dim=1).mm(F.normalize(self.weight, dim=0))

    model = nn.Sequential(mlp(8, 12, 8), nn.BatchNorm1d(8), NormedLinear(8, 4))
    optimizer = sgd(model)
    for i, (x, y) in enumerate(labelled()):
        weight = None if i < 6 else torch.tensor((1 - 0.9) / (1 - 0.9**counts))
        out = model(x)
        hot = F.one_hot(y, 4).double()
        yield stepped(optimizer, F.cross_entropy(10 * (out - hot * margins), y, weight=weight))
    return model


@loop()
def distillation_with_features() -> Loop:
    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.body, self.fc = (
                nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU()),
                nn.Linear(width, 4),
            )

        def forward(self, x: Any, is_feat: bool = False) -> Any:
            f = self.body(x)
            return ([f], self.fc(f)) if is_feat else self.fc(f)

    teacher, student, embed = Net(16).eval(), Net(6), nn.Linear(6, 16)
    optimizer = sgd(student, embed)
    for x, y in labelled():
        with torch.no_grad():
            feats, soft = teacher(x, is_feat=True)
        own, out = student(x, is_feat=True)
        kl = F.kl_div(F.log_softmax(out / 4, 1), F.softmax(soft / 4, 1), reduction="batchmean") * 16
        yield stepped(optimizer, F.cross_entropy(out, y) + kl + F.mse_loss(embed(own[0]), feats[0]))
    return student, embed, teacher


@loop()
def fake_quantisation_with_straight_through_gradients() -> Loop:
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0]

    class QuantLinear(nn.Linear):
        def forward(self, x: Any) -> Any:
            scale = self.weight.detach().abs().max() / 7
            return F.linear(x, Round.apply(self.weight / scale) * scale, self.bias)

    model = nn.Sequential(QuantLinear(8, 12), nn.Hardtanh(), QuantLinear(12, 4))
    optimizer = sgd(model)
    for x, y in labelled():
        yield stepped(optimizer, F.cross_entropy(model(x), y))
    return model


@loop()
def observers_of_quantisation() -> Loop:
    """The range of activations is an average that the forward writes; layers below are divided."""

    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 4)
            self.register_buffer("high", torch.ones(()))

        def forward(self, x: Any) -> Any:
            z = F.relu(self.fc1(x))
            if self.training:
                self.high.mul_(0.9).add_(0.1 * z.detach().max())
            return self.fc2(torch.clamp(z, max=self.high))

    model = Observed()
    optimizer = sgd(model)
    for x, y in labelled():
        yield stepped(optimizer, F.cross_entropy(model(x), y))
    return model


@loop()
def masked_autoencoder() -> Loop:
    class Mae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.mask, self.head = nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 6)

        def forward(self, x: Any) -> Any:
            n, length, _ = x.shape
            shuffle = torch.rand(n, length).argsort(1)
            restore, keep = shuffle.argsort(1), shuffle[:, :3]
            z = self.embed(x)
            z = self.block(z.gather(1, keep[..., None].expand(-1, -1, 8)))
            z = torch.cat([z, self.mask.expand(n, length - 3, -1)], 1)
            return self.head(z.gather(1, restore[..., None].expand(-1, -1, 8))), (restore >= 3).double()

    model = Mae()
    optimizer = adam(model)
    for _ in range(STEPS):
        x = torch.randn(12, 7, 6)
        out, mask = model(x)
        yield stepped(optimizer, ((out - x).square().mean(-1) * mask).sum() / mask.sum())
    return model


# --- generative


@loop()
def vae_with_a_sum_and_annealed_kl() -> Loop:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(8, 12, 6), mlp(3, 12, 8)

        def forward(self, x: Any) -> Any:
            mu, logvar = self.encoder(x).chunk(2, 1)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return torch.sigmoid(self.decoder(z)), mu, logvar

    model = Vae()
    optimizer = adam(model)
    for i in range(STEPS):
        x = torch.rand(14, 8)
        out, mu, logvar = model(x)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        yield stepped(optimizer, F.binary_cross_entropy(out, x, reduction="sum") + min(1.0, i / 8) * kl)
    return model


@loop()
def dcgan_with_labels_that_are_filled() -> Loop:
    net_g = nn.Sequential(nn.ConvTranspose2d(5, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.ConvTranspose2d(4, 1, 2, 2))
    net_d = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, inplace=True), nn.Flatten())
    net_d.extend([nn.Linear(16, 1), nn.Sigmoid()])
    of_d, of_g = adam(net_d), adam(net_g)
    for _ in range(STEPS):
        real, label = torch.randn(8, 1, 6, 6), torch.full((8,), 1.0)
        net_d.zero_grad()
        loss = F.binary_cross_entropy(net_d(real).view(-1), label)
        loss.backward()
        fake = net_g(torch.randn(8, 5, 1, 1))
        label.fill_(0.0)
        F.binary_cross_entropy(net_d(fake.detach()).view(-1), label).backward()
        of_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        of_gen = F.binary_cross_entropy(net_d(fake).view(-1), label)
        of_gen.backward()
        of_g.step()
        yield loss.item() + of_gen.item()
    return net_g, net_d


@loop()
def wgan_with_a_gradient_penalty() -> Loop:
    critic, generator = mlp(6, 12, 1, act=nn.Softplus), mlp(3, 12, 6)
    of_c, of_g = adam(critic), adam(generator)
    for i in range(STEPS):
        real, fake = torch.randn(12, 6), generator(torch.randn(12, 3)).detach()
        alpha = torch.rand(12, 1)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        out = critic(mixed)
        (slope,) = torch.autograd.grad(out, mixed, torch.ones_like(out), create_graph=True, retain_graph=True)
        penalty = 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = stepped(of_c, critic(fake).mean() - critic(real).mean() + penalty)
        if i % 3 == 2:
            loss += stepped(of_g, -critic(generator(torch.randn(12, 3))).mean())
        yield loss
    return critic, generator


@loop()
def wgan_with_clipped_weights() -> Loop:
    critic, generator = mlp(6, 12, 1), mlp(3, 12, 6)
    of_c, of_g = (torch.optim.RMSprop(m.parameters(), 1e-2, eps=1e-2) for m in (critic, generator))
    for _ in range(STEPS):
        loss = stepped(of_c, critic(generator(torch.randn(12, 3)).detach()).mean() - critic(torch.randn(12, 6)).mean())
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        yield loss + stepped(of_g, -critic(generator(torch.randn(12, 3))).mean())
    return critic, generator


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
def ddpm_with_an_average_of_weights() -> Loop:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.body = nn.Sequential(nn.Linear(8, 8), nn.SiLU()), mlp(6 + 8, 16, 6, act=nn.SiLU)

        def forward(self, x: Any, t: Any) -> Any:
            freqs = torch.exp(-math.log(1e4) * torch.arange(4) / 4)
            angles = t[:, None] * freqs[None]
            return self.body(torch.cat([x, self.time(torch.cat([angles.cos(), angles.sin()], 1))], 1))

    model = Denoiser()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = adam(model)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)
    for i in range(STEPS):
        x, t = torch.randn(12, 6), torch.randint(0, 50, (12,))
        noise = torch.randn_like(x)
        noisy = alphas[t].sqrt()[:, None] * x + (1 - alphas[t]).sqrt()[:, None] * noise
        yield stepped(optimizer, F.mse_loss(model(noisy, t), noise))
        for own, other in zip(average.parameters(), model.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)
        if i % 4 == 3:
            with torch.no_grad():
                average(torch.randn(4, 6), torch.full((4,), 49))
    return model, average


@loop()
def coupling_flow() -> Loop:
    class Coupling(nn.Module):
        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.net, self.flip = mlp(3, 12, 6, act=nn.Tanh), flip

        def forward(self, x: Any) -> Any:
            a, b = x.chunk(2, 1)
            a, b = (b, a) if self.flip else (a, b)
            s, t = self.net(a).chunk(2, 1)
            return torch.cat([a, b * torch.exp(torch.tanh(s)) + t], 1), torch.tanh(s).sum(1)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Coupling(bool(i % 2)) for i in range(3))
            self.register_buffer("mean", torch.zeros(6))

        def log_prob(self, x: Any) -> Any:
            total = torch.zeros(len(x))
            for layer in self.layers:
                x, log_det = layer(x)
                total = total + log_det
            return torch.distributions.Normal(self.mean, 1.0).log_prob(x).sum(1) + total

    model = Flow()
    optimizer = adam(model)
    for _ in range(STEPS):
        yield stepped(optimizer, -model.log_prob(torch.randn(14, 6)).mean())
    return model


@loop()
def vq_vae_with_a_codebook_that_averages() -> Loop:
    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.embedding.weight.requires_grad_(False)
            self.register_buffer("size", torch.ones(5))
            self.register_buffer("total", self.embedding.weight.data.clone())

        def forward(self, z: Any) -> Any:
            index = torch.cdist(z, self.embedding.weight).argmin(1)
            q = self.embedding(index)
            if self.training:
                hot = F.one_hot(index, 5).double()
                self.size.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.total.data.mul_(0.9).add_(hot.t() @ z.detach(), alpha=0.1)
                self.embedding.weight.data.copy_(self.total / self.size[:, None])
            return z + (q - z).detach(), 0.25 * F.mse_loss(q.detach(), z)

    encoder, quantizer, decoder = mlp(8, 12, 3), Quantizer(), mlp(3, 12, 8)
    optimizer = adam(encoder, decoder)
    for _ in range(STEPS):
        x = torch.randn(14, 8)
        q, commitment = quantizer(encoder(x))
        yield stepped(optimizer, F.mse_loss(decoder(q), x) + commitment)
    return encoder, quantizer, decoder


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


# --- representations


@loop()
def simclr() -> Loop:
    model = nn.Sequential(ResNet(classes=8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    optimizer = sgd(model)
    for x, _ in labelled(8, 4, 3, 6, 6):
        views = torch.cat([x + 0.1 * torch.randn_like(x), x.flip(-1)])
        z = F.normalize(model(views), dim=1)
        sim = (z @ z.T / 0.5).masked_fill(torch.eye(16, dtype=torch.bool), -1e9)
        yield stepped(optimizer, F.cross_entropy(sim, torch.arange(16).roll(8)))
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


@loop()
def byol() -> Loop:
    online = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
    target, predictor = copy.deepcopy(online), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    for p in target.parameters():
        p.requires_grad = False
    optimizer = sgd(online, predictor)
    for i, (x, _) in enumerate(labelled()):
        one, two = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            t1, t2 = target(one).detach(), target(two).detach()
        p1, p2 = predictor(online(one)), predictor(online(two))
        loss = (2 - 2 * F.cosine_similarity(p1, t2) + 2 - 2 * F.cosine_similarity(p2, t1)).mean()
        yield stepped(optimizer, loss)
        tau = 1 - 0.1 * (math.cos(math.pi * i / STEPS) + 1) / 2
        for own, other in zip(target.parameters(), online.parameters(), strict=True):
            own.data = tau * own.data + (1 - tau) * other.data
    return online, target, predictor


@loop()
def clip_with_two_towers() -> Loop:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.tokens, self.text = mlp(8, 12, 6), nn.Embedding(10, 6), nn.Linear(6, 6)
            self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

        def forward(self, image: Any, text: Any) -> Any:
            a = F.normalize(self.image(image), dim=-1)
            b = F.normalize(self.text(self.tokens(text))[torch.arange(len(text)), text.argmax(-1)], dim=-1)
            return a, b, self.logit_scale.exp()

    model = Clip()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3, weight_decay=0.2)
    for _ in range(STEPS):
        a, b, scale = model(torch.randn(12, 8), torch.randint(10, (12, 5)))
        logits, labels = scale * a @ b.t(), torch.arange(12)
        yield stepped(optimizer, (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2)
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
    return model


@loop()
def batch_hard_triplets() -> Loop:
    model = mlp(8, 12, 6)
    optimizer = adam(model)
    for x, y in labelled(16, 3):
        z = F.normalize(model(x), dim=1)
        d, same = torch.cdist(z, z), y[:, None] == y[None]
        hardest, closest = (d * same).max(1)[0], (d + 10 * same).min(1)[0]
        yield stepped(optimizer, F.relu(hardest - closest + 0.3).mean())
    return model


@loop()
def barlow_twins_inside_the_model() -> Loop:
    class Barlow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.projector = mlp(8, 12, 8), nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
            self.bn = nn.BatchNorm1d(6, affine=False)

        def forward(self, y1: Any, y2: Any) -> Any:
            z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
            c = self.bn(z1).T @ self.bn(z2) / len(z1)
            return (torch.diagonal(c) - 1).square().sum() + 0.005 * (c - torch.diag(torch.diagonal(c))).square().sum()

    model = Barlow()
    optimizer = sgd(model)
    for x, _ in labelled():
        yield stepped(optimizer, model(x, x + 0.2 * torch.randn_like(x)))
    return model


@loop()
def siamese_pairs() -> Loop:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cnn = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.Flatten())
            self.fc = nn.Linear(48, 4)

        def forward_once(self, x: Any) -> Any:
            return self.fc(self.cnn(x))

        def forward(self, a: Any, b: Any) -> Any:
            return self.forward_once(a), self.forward_once(b)

    model = Siamese()
    optimizer = adam(model)
    for x, y in labelled(10, 2, 1, 6, 6):
        d = F.pairwise_distance(*model(x, torch.randn_like(x)), keepdim=True)
        yield stepped(optimizer, ((1 - y) * d.T**2 + y * F.relu(2 - d.T) ** 2).mean())
    return model


# --- sequences


@loop()
def ctc() -> Loop:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rnn = nn.Conv1d(4, 6, 3, padding=1), nn.GRU(6, 6, bidirectional=True, batch_first=True)
            self.fc = nn.Linear(12, 5)

        def forward(self, x: Any) -> Any:
            out, _ = self.rnn(F.relu(self.conv(x)).transpose(1, 2))
            return F.log_softmax(self.fc(out), 2).transpose(0, 1)

    model = Speech()
    optimizer = adam(model)
    for _ in range(STEPS):
        out = model(torch.randn(8, 4, 10))
        lengths = torch.randint(2, 4, (8,))
        labels = torch.randint(1, 5, (int(lengths.sum()),))
        yield stepped(optimizer, F.ctc_loss(out, labels, torch.full((8,), 10), lengths, zero_infinity=True))
    return model


@loop()
def packed_sequences() -> Loop:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(11, 6, padding_idx=0), nn.LSTM(6, 5, batch_first=True)
            self.fc = nn.Linear(5, 4)

        def forward(self, x: Any, lengths: Any) -> Any:
            packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
            out, _ = self.rnn(packed)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.size(1))
            return self.fc(out)

    model = Tagger()
    optimizer = adam(model)
    for _ in range(STEPS):
        lengths = torch.cat([torch.tensor([7]), torch.randint(2, 8, (9,))])
        x = pad_sequence([torch.randint(1, 11, (int(n),)) for n in lengths], batch_first=True)
        y = torch.where(x > 0, x % 4, -100)
        yield stepped(optimizer, F.cross_entropy(model(x, lengths).transpose(1, 2), y))
    return model


@loop()
def seq2seq_with_teacher_forcing() -> Loop:
    """Whether the next input is the truth is drawn from Python's random numbers within the forward."""

    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder, self.decoder = nn.Embedding(7, 5), nn.GRU(5, 6), nn.GRUCell(5, 6)
            self.out = nn.Linear(6, 7)

        def forward(self, source: Any, target: Any, ratio: float = 0.5) -> Any:
            _, h = self.encoder(self.embed(source))
            h, token, outputs = h[0], target[0], []
            for t in range(1, len(target)):
                h = self.decoder(self.embed(token), h)
                outputs.append(self.out(h))
                token = target[t] if random.random() < ratio else outputs[-1].argmax(1)
            return torch.stack(outputs)

    model = Seq2Seq()
    optimizer = adam(model)
    for _ in range(STEPS):
        source, target = torch.randint(7, (6, 10)), torch.randint(7, (5, 10))
        out = model(source, target)
        loss = F.cross_entropy(out.view(-1, 7), target[1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield loss.item()
    return model


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, drop: float) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.drop = nn.Linear(d, 3 * d), nn.Linear(d, d), heads, nn.Dropout(drop)

    def forward(self, x: Any, mask: Any = None) -> Any:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        if mask is not None:
            a = a.masked_fill(mask == 0, float("-inf"))
        return self.proj((self.drop(a.softmax(-1)) @ v).transpose(1, 2).reshape(b, t, d))


class Gpt(nn.Module):
    def __init__(self, vocab: int = 9, d: int = 8, drop: float = 0.1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, d), nn.Embedding(16, d)
        self.attn, self.ff = Attention(d, 2, drop), mlp(d, 16, d, act=nn.GELU)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Any, mask: Any = None, targets: Any = None) -> Any:
        z = self.token(x) + self.place(torch.arange(x.size(1)))
        z = z + self.attn(self.ln1(z), mask)
        logits = self.head(z + self.ff(self.ln2(z)))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@loop()
def causal_model_with_tied_weights_and_its_loss() -> Loop:
    model = Gpt()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-2, eps=1e-3)
    for i in range(STEPS):
        x = torch.randint(9, (10, 7))
        optimizer.zero_grad(set_to_none=True)
        for part in x.chunk(2):
            _, loss = model(part[:, :-1], torch.tril(torch.ones(6, 6)), part[:, 1:].contiguous())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (i + 1) / 4)
        optimizer.step()
        yield loss.item()
    return model


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
def padded_tokens_and_their_mean() -> Loop:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    embed, encoder, head = nn.Embedding(9, 8, padding_idx=0), nn.TransformerEncoder(layer, 2), nn.Linear(8, 9)
    optimizer = adam(embed, encoder, head)
    for _ in range(STEPS):
        x = torch.randint(1, 9, (10, 6))
        x[torch.arange(6)[None] >= torch.randint(3, 7, (10, 1))] = 0
        masked = (torch.rand(x.shape) < 0.3) & (x > 0)
        h = encoder(embed(x.masked_fill(masked, 8)), src_key_padding_mask=x == 0)
        each = F.cross_entropy(head(h[masked]), x[masked], reduction="none")
        yield stepped(optimizer, each.sum() / max(1, int(masked.sum())))
    return embed, encoder, head


@loop()
def truncated_backpropagation_with_carried_states() -> Loop:
    class Lm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.fc = nn.Embedding(9, 6), nn.LSTM(6, 6, 2, dropout=0.2), nn.Linear(6, 9)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: Any, hidden: Any) -> Any:
            out, hidden = self.rnn(self.drop(self.embed(x)), hidden)
            return self.fc(out), hidden

    model = Lm()
    optimizer = sgd(model, lr=0.2)
    text = torch.randint(9, (STEPS * 5 + 1, 8))
    hidden = torch.zeros(2, 8, 6), torch.zeros(2, 8, 6)
    for i in range(STEPS):
        hidden = tuple(h.detach() for h in hidden)
        out, hidden = model(text[i * 5 : i * 5 + 5], hidden)
        yield stepped(optimizer, F.cross_entropy(out.view(-1, 9), text[i * 5 + 1 : i * 5 + 6].view(-1)))
    return model


@loop()
def curriculum_of_lengths() -> Loop:
    model = Gpt()
    optimizer = adam(model)
    for i in range(STEPS):
        x = torch.randint(9, (8 if i % 5 else 9, 4 + i // 4))
        yield stepped(optimizer, F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:]))
    return model


@loop()
def layer_drop() -> Loop:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                if not self.training or random.random() > 0.3:
                    x = x + torch.tanh(layer(x))
            return self.head(x)

    model = Drop()
    optimizer = adam(model)
    for x, y in labelled():
        yield stepped(optimizer, F.cross_entropy(model(x), y))
    return model


@loop()
def experts_with_a_balancing_loss() -> Loop:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(mlp(8, 8, 8) for _ in range(3))

        def forward(self, x: Any) -> Any:
            probs = self.gate(x).softmax(-1)
            weight, chosen = probs.topk(2)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                rows, which = torch.where(chosen == e)
                if len(rows):
                    out.index_add_(0, rows, expert(x[rows]) * weight[rows, which, None])
            share = F.one_hot(chosen[:, 0], 3).double().mean(0)
            return out, 3 * (share * probs.mean(0)).sum()

    model = nn.ModuleList([Moe(), nn.Linear(8, 4)])
    optimizer = adam(model)
    for x, y in labelled():
        out, balance = model[0](x)
        yield stepped(optimizer, F.cross_entropy(model[1](out), y) + 0.1 * balance)
    return model


@loop()
def perceiver_with_learned_latents() -> Loop:
    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(3, 8))
            self.cross, self.head = nn.MultiheadAttention(8, 2, batch_first=True, kdim=5, vdim=5), nn.Linear(8, 4)

        def forward(self, x: Any, mask: Any = None) -> Any:
            z = self.latents.unsqueeze(0).repeat(len(x), 1, 1)
            z = z + self.cross(z, x, x, key_padding_mask=mask, need_weights=False)[0]
            return self.head(z.mean(1))

    model = Perceiver()
    optimizer = adam(model)
    for x, y in labelled(12, 4, 6, 5):
        yield stepped(optimizer, F.cross_entropy(model(x, mask=torch.arange(6).expand(12, 6) >= y[:, None] + 2), y))
    return model


@loop()
def set_transformer() -> Loop:
    class Sab(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.ff, self.ln = Attention(8, 2, 0.0), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Any) -> Any:
            h = self.ln(x + self.attn(x))
            return h + F.relu(self.ff(h))

    model = nn.Sequential(nn.Linear(2, 8), Sab(), Sab(), nn.Linear(8, 2))
    optimizer = adam(model)
    for _ in range(STEPS):
        x = torch.randn(9, random.choice([5, 9]), 2)
        yield stepped(optimizer, (model(x).mean(1) - x.max(1)[0]).square().mean())
    return model


# --- other losses and data


@loop()
def auc_loss() -> Loop:
    model = mlp(8, 12, 1)
    optimizer = adam(model)
    for x, y in labelled(16, 2):
        s = torch.sigmoid(model(x)).squeeze(1)
        yield stepped(optimizer, (1 - (s[y == 1][:, None] - s[y == 0][None])).square().mean())
    return model


@loop()
def several_tasks_with_uncertainties_and_projected_gradients() -> Loop:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = mlp(8, 12, 12)
            self.heads = nn.ModuleDict({"class": nn.Linear(12, 4), "depth": nn.Linear(12, 1)})
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x: Any) -> Any:
            z = self.shared(x)
            return {name: head(z) for name, head in self.heads.items()}

    model = Heads()
    optimizer = adam(model)
    for x, y in labelled():
        out = model(x)
        losses = torch.stack([F.cross_entropy(out["class"], y), F.mse_loss(out["depth"][:, 0], x.sum(1))])
        losses = losses * torch.exp(-model.log_vars) + model.log_vars
        shared = list(model.shared.parameters())
        one, two = (torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses)
        optimizer.zero_grad()
        losses.sum().backward()
        for p, a, b in zip(shared, one, two, strict=True):
            dot = (a * b).sum()
            p.grad = a + b - (dot / (b * b).sum() * b if dot < 0 else 0)
        optimizer.step()
        yield losses.sum().item()
    return model


@loop()
def pseudo_labels_and_consistency() -> Loop:
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 4))
    optimizer = sgd(model)
    for i, (x, y) in enumerate(labelled(8)):
        weak, strong = torch.randn(14, 8), torch.randn(14, 8)
        labelled_out, weak_out, strong_out = model(torch.cat([x, weak, strong])).split([8, 14, 14])
        with torch.no_grad():
            probs, guess = weak_out.softmax(1).max(1)
        each = F.cross_entropy(strong_out, guess, reduction="none") * probs.ge(0.35 + 0.01 * i)
        yield stepped(optimizer, F.cross_entropy(labelled_out, y) + each.mean())
    return model


@loop()
def active_learning() -> Loop:
    pool, labels = torch.randn(60, 8), torch.randint(4, (60,))
    known = list(range(8))
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 4))
    for _ in range(STEPS // 4):
        optimizer = adam(model)
        for _ in range(4):
            x, y = pool[known], labels[known]
            yield stepped(optimizer, F.cross_entropy(model(x), y))
        rest = [i for i in range(60) if i not in known]
        with torch.no_grad():  # by dropout
            probs = torch.stack([model(pool[rest]).softmax(1) for _ in range(3)]).mean(0)
        known += [rest[i] for i in (-(probs * probs.log()).sum(1)).topk(5)[1].tolist()]
    return model


@loop()
def ensemble_in_a_module_list() -> Loop:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList(mlp(8, 10, 4) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return torch.stack([m(x) for m in self.members])

    model = Ensemble()
    optimizer = adam(model)
    for x, y in labelled():
        out = model(x)
        yield stepped(optimizer, sum(F.cross_entropy(each, y) for each in out) - 0.1 * out.var(0).mean())
    return model


@loop("fails", divided=False)
def graph_network_on_one_graph() -> Loop:
    """No dimension is that of samples, but the layers within are applied to each node."""

    class Conv(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(a, b) / 3), nn.Parameter(torch.zeros(b))

        def forward(self, x: Any, edges: Any) -> Any:
            source, target = edges
            messages = (x @ self.weight)[source]
            return torch.zeros(len(x), self.weight.size(1)).index_add_(0, target, messages) + self.bias

    class Gcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Conv(8, 12), Conv(12, 4)

        def forward(self, x: Any, edges: Any) -> Any:
            return self.two(F.dropout(F.relu(self.one(x, edges)), 0.3, self.training), edges)

    model = Gcn()
    optimizer = adam(model)
    x, y, edges, train = torch.randn(20, 8), torch.randint(4, (20,)), torch.randint(20, (2, 60)), torch.arange(12)
    for _ in range(STEPS):
        yield stepped(optimizer, F.cross_entropy(model(x, edges)[train], y[train]))
    return model


@loop()
def graphs_in_one_batch_with_pooling() -> Loop:
    class Gin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mlp, self.head = nn.Linear(5, 8), mlp(8, 8, 8), nn.Linear(8, 3)

        def forward(self, x: Any, edges: Any, batch: Any) -> Any:
            h = self.embed(x)
            h = self.mlp(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))
            return self.head(torch.zeros(int(batch.max()) + 1, 8).index_add(0, batch, h))

    model = Gin()
    optimizer = adam(model)
    for _ in range(STEPS):
        sizes = [random.randint(3, 6) for _ in range(6)]
        batch = torch.repeat_interleave(torch.arange(6), torch.tensor(sizes))
        starts = np.cumsum([0, *sizes])
        edges = torch.cat([torch.randint(int(a), int(b), (2, 6)) for a, b in pairwise(starts)], 1)
        out = model(torch.randn(len(batch), 5), edges, batch)
        yield stepped(optimizer, F.cross_entropy(out, torch.arange(6) % 3))
    return model


@loop()
def rays_of_a_scene() -> Loop:
    class Nerf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(3 * 5, 16, 4)

        def forward(self, x: Any) -> Any:
            bands = [x, *(f(2.0**k * x) for k in range(2) for f in (torch.sin, torch.cos))]
            out = self.net(torch.cat(bands, -1))
            return torch.sigmoid(out[..., :3]), F.relu(out[..., 3])

    coarse, fine = Nerf(), Nerf()
    optimizer = adam(coarse, fine)
    for _ in range(STEPS):
        origin, direction, truth = torch.randn(10, 3), torch.randn(10, 3), torch.rand(10, 3)
        loss: Any = 0.0
        z = torch.linspace(0, 1, 5).expand(10, 5) + 0.1 * torch.rand(10, 5)
        for model in (coarse, fine):
            rgb, sigma = model(origin[:, None] + direction[:, None] * z[..., None])
            alpha = 1 - torch.exp(-sigma * 0.2)
            passed = torch.cumprod(torch.cat([torch.ones(10, 1), 1 - alpha + 1e-10], 1), 1)[:, :-1]
            weights = alpha * passed
            loss = loss + F.mse_loss((weights[..., None] * rgb).sum(1), truth)
            picks = torch.multinomial(weights.detach() + 1e-3, 5, replacement=True)
            z = torch.sort(torch.cat([z, z.gather(1, picks)], 1), 1)[0]
        yield stepped(optimizer, loss)
    return coarse, fine


@loop()
def equation_with_second_derivatives() -> Loop:
    net = mlp(2, 10, 10, 1, act=nn.Tanh)
    optimizer = adam(net)
    for _ in range(STEPS):
        t, x = torch.rand(12, 1, requires_grad=True), torch.rand(12, 1, requires_grad=True)
        u = net(torch.cat([t, x], 1))
        u_t, u_x = torch.autograd.grad(u, (t, x), torch.ones_like(u), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)
        border = net(torch.cat([torch.zeros(6, 1), torch.rand(6, 1)], 1))
        yield stepped(optimizer, (u_t + u * u_x - 0.01 * u_xx).square().mean() + border.square().mean())
    return net


@loop()
def jacobian_penalty_by_batched_gradients() -> Loop:
    model = mlp(5, 10, 3, act=nn.Tanh)
    optimizer = adam(model)
    for x, y in labelled(12, 3, 5):
        x.requires_grad_(True)
        out = model(x)
        each = torch.eye(3)[:, None].expand(3, 12, 3)
        (rows,) = torch.autograd.grad(out, x, each, is_grads_batched=True, retain_graph=True)
        (slope,) = torch.autograd.grad(out, x, each[0], create_graph=True)
        yield stepped(optimizer, F.cross_entropy(out, y) + slope.square().mean() * rows.square().mean())
    return model


@loop()
def convolutional_lstm() -> Loop:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1 + 3, 12, 3, padding=1)

        def forward(self, x: Any, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
            h, c = state
            i, f, o, g = torch.split(self.conv(torch.cat([x, h], 1)), 3, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c

    cell, head = Cell(), nn.Conv2d(3, 1, 1)
    optimizer = adam(cell, head)
    for _ in range(STEPS):
        video = torch.randn(8, 4, 1, 5, 5)
        state = torch.zeros(8, 3, 5, 5), torch.zeros(8, 3, 5, 5)
        loss: Any = 0.0
        for t in range(3):
            state = cell(video[:, t], state)
            loss = loss + F.mse_loss(head(state[0]), video[:, t + 1])
        yield stepped(optimizer, loss)
    return cell, head


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


@loop("changes weight")
def embeddings_of_a_largest_norm() -> Loop:
    """The lookup itself writes weights."""
    embed, head = nn.Embedding(20, 6, max_norm=1.0), nn.Linear(6, 4)
    optimizer = sgd(embed, head, lr=0.5)
    for _ in range(STEPS):
        x, y = torch.randint(20, (12,)), torch.randint(4, (12,))
        yield stepped(optimizer, F.cross_entropy(head(embed(x)), y))
    return embed, head


# --- other ways to train


@loop("changes 0.weight")
def weights_that_the_forward_constrains() -> Loop:
    class Bounded(nn.Linear):
        def forward(self, x: Any) -> Any:
            self.weight.data.clamp_(-0.3, 0.3)
            self.weight.data.mul_(0.99)
            return F.linear(x, self.weight, self.bias)

    model = nn.Sequential(Bounded(8, 12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = sgd(model)
    for x, y in labelled():
        yield stepped(optimizer, F.cross_entropy(model(x), y))
    return model


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
def reptile_with_copies() -> Loop:
    model = mlp(8, 10, 4)
    for i in range(STEPS):
        fast = copy.deepcopy(model)
        optimizer = torch.optim.SGD(fast.parameters(), 0.1)
        x, y = torch.randn(10, 8), torch.randint(4, (10,))
        loss = 0.0
        for _ in range(3):
            loss = stepped(optimizer, F.cross_entropy(fast(x), y))
        for p, q in zip(model.parameters(), fast.parameters(), strict=True):
            p.data.add_(q.data - p.data, alpha=0.5 * (1 - i / STEPS))
        yield loss
    return model


@loop()
def ppo() -> Loop:
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = (
                nn.Sequential(nn.Linear(5, 12), nn.Tanh()),
                nn.Linear(12, 3),
                nn.Linear(12, 1),
            )

        def forward(self, x: Any) -> Any:
            z = self.body(x)
            return torch.distributions.Categorical(logits=self.actor(z)), self.critic(z)

    model = ActorCritic()
    optimizer = adam(model)
    for _ in range(STEPS // 2):
        states, actions, logs, state = [], [], [], torch.randn(4, 5)
        with torch.no_grad():
            for _ in range(4):
                policy, _ = model(state)
                action = policy.sample()
                states.append(state)
                actions.append(action)
                logs.append(policy.log_prob(action))
                state = torch.tanh(state + action[:, None] - 1)
        s, a, old = torch.cat(states), torch.cat(actions), torch.cat(logs)
        for _ in range(2):
            pick = torch.randperm(16)[:12]
            policy, value = model(s[pick])
            gain = -s[pick].square().sum(1)
            edge = (gain - value[:, 0]).detach()
            edge = (edge - edge.mean()) / (edge.std() + 1e-8)
            ratio = torch.exp(policy.log_prob(a[pick]) - old[pick])
            loss = -torch.min(ratio * edge, ratio.clamp(0.8, 1.2) * edge).mean()
            yield stepped(optimizer, loss + F.mse_loss(value[:, 0], gain) - 0.01 * policy.entropy().mean())
    return model


@loop()
def dqn_with_replay() -> Loop:
    policy, target = mlp(5, 12, 3), mlp(5, 12, 3)
    target.load_state_dict(policy.state_dict())
    optimizer = adam(policy)
    memory: deque[Any] = deque(maxlen=40)
    state = torch.randn(1, 5)
    for i in range(STEPS):
        for _ in range(10):
            with torch.no_grad():
                action = policy(state).max(1)[1].view(1, 1) if random.random() > 0.3 else torch.randint(3, (1, 1))
            following = torch.tanh(state + action - 1 + 0.1 * torch.randn(1, 5))
            memory.append((state, action, following, following.sum()[None]))
            state = following
        s, a, n, r = (torch.cat(each) for each in zip(*random.sample(memory, 8), strict=True))
        with torch.no_grad():
            goal = r + 0.9 * target(n).max(1)[0]
        loss = F.smooth_l1_loss(policy(s).gather(1, a)[:, 0], goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 0.1)
        optimizer.step()
        if i % 4 == 3:
            target.load_state_dict(policy.state_dict())
        yield loss.item()
    return policy, target


@loop()
def soft_actor_critic() -> Loop:
    actor, q1, q2 = mlp(5, 12, 4), mlp(7, 12, 1), mlp(7, 12, 1)
    log_alpha = torch.zeros(1, requires_grad=True)
    of_a, of_q, of_alpha = adam(actor), adam(q1, q2), torch.optim.Adam([log_alpha], 1e-2)

    def drawn(s: Any) -> Any:
        mean, log_std = actor(s).chunk(2, -1)
        policy = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = policy.rsample()
        return torch.tanh(raw), (policy.log_prob(raw) - torch.log(1 - torch.tanh(raw) ** 2 + 1e-6)).sum(1, keepdim=True)

    for _ in range(STEPS):
        s, a, r, n = torch.randn(12, 5), torch.rand(12, 2), torch.randn(12, 1), torch.randn(12, 5)
        with torch.no_grad():
            action, log = drawn(n)
            z = torch.cat([n, action], 1)
            goal = r + 0.9 * (torch.min(q1(z), q2(z)) - log_alpha.exp() * log)
        z = torch.cat([s, a], 1)
        loss = stepped(of_q, F.mse_loss(q1(z), goal) + F.mse_loss(q2(z), goal))
        action, log = drawn(s)
        z = torch.cat([s, action], 1)
        loss += stepped(of_a, (log_alpha.exp().detach() * log - torch.min(q1(z), q2(z))).mean())
        yield loss + stepped(of_alpha, -(log_alpha.exp() * (log.detach() - 2)).mean())
    return actor, q1, q2, log_alpha


@loop()
def hypernetwork() -> Loop:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.body = mlp(3, 10, 8 * 4 + 4), nn.Linear(8, 8)

        def forward(self, x: Any, task: Any) -> Any:
            made = self.make(task)
            weight, bias = made[:, :32].view(-1, 4, 8), made[:, 32:]
            return torch.bmm(weight, torch.tanh(self.body(x))[..., None])[..., 0] + bias

    model = Hyper()
    optimizer = adam(model)
    for x, y in labelled():
        yield stepped(optimizer, F.cross_entropy(model(x, F.one_hot(y % 3, 3).double()), y))
    return model


@loop()
def low_rank_adapters_on_a_frozen_base() -> Loop:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.drop = base, nn.Dropout(0.1)
            self.a, self.b = (
                nn.Parameter(torch.randn(2, base.in_features) / 3),
                nn.Parameter(torch.zeros(base.out_features, 2)),
            )

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.drop(x) @ self.a.T @ self.b.T * 2.0

    model = Gpt(drop=0.0).requires_grad_(False)
    model.attn.qkv, model.attn.proj = Lora(model.attn.qkv), Lora(model.attn.proj)
    optimizer = adam(model)
    for i in range(STEPS):
        if i == 8:  # the head is trained, too
            model.token.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [model.token.weight]})
        x = torch.randint(9, (10, 7))
        yield stepped(optimizer, F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:]))
    return model


@loop()
def averaged_weights_and_statistics_anew() -> Loop:
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02)
    seen = []
    for i, (x, y) in enumerate(labelled()):
        seen.append(x)
        yield stepped(optimizer, F.cross_entropy(model(x), y))
        if i > 5:
            averaged.update_parameters(model)
            scheduler.step()
    torch.optim.swa_utils.update_bn(seen, averaged)
    return model, averaged


@loop()
def sharpness_aware() -> Loop:
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 4))
    optimizer = sgd(model)
    for x, y in labelled():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        moves = [p.grad * 0.05 / (norm + 1e-12) for p in model.parameters()]
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                p.add_(e)
        for m in model.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.backup_momentum, m.momentum = m.momentum, 0
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                p.sub_(e)
        for m in model.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.momentum = m.backup_momentum
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    return model


@loop()
def lookahead_with_clipping_and_accumulation() -> Loop:
    model = nn.Sequential(
        nn.Linear(8, 12), nn.GroupNorm(3, 12), nn.ReLU(), parametrizations.weight_norm(nn.Linear(12, 4))
    )
    fast = adam(model)
    slow = [p.detach().clone() for p in model.parameters()]
    for i, (x, y) in enumerate(labelled(13)):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if i % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            fast.step()
            fast.zero_grad()
        if i % 5 == 4:
            for p, q in zip(model.parameters(), slow, strict=True):
                q.add_(p.data - q, alpha=0.5)
                p.data.copy_(q)
        yield loss.item()
    return model


@loop()
def closures_of_lbfgs() -> Loop:
    model = mlp(4, 6, 1, act=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    x = torch.randn(20, 4)
    for _ in range(STEPS // 2):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True).sin())
            loss.backward()
            return loss

        yield float(optimizer.step(closure))
    return model


@loop(tolerance=1e-6)  # a line search amplifies rounding
def style_transfer_of_an_image() -> Loop:
    """The image is trained, by features of a frozen net."""
    vgg = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU()).eval().requires_grad_(False)
    image = torch.randn(2, 3, 8, 8, requires_grad=True)
    with torch.no_grad():
        content, style = vgg(torch.randn(2, 3, 8, 8)), vgg(torch.randn(2, 3, 8, 8)).flatten(2)
        style = style @ style.transpose(1, 2)
    optimizer = torch.optim.Adam([image], 0.05, eps=1e-3)
    for _ in range(STEPS):
        out = vgg(image)
        gram = out.flatten(2) @ out.flatten(2).transpose(1, 2)
        yield stepped(optimizer, F.mse_loss(out, content) + 1e-3 * F.mse_loss(gram, style))
    return image


@loop()
def checkpointed_blocks() -> Loop:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
            return self.head(x)

    model = Deep()
    optimizer = adam(model)
    for x, y in labelled():
        yield stepped(optimizer, F.cross_entropy(model(x), y))
    return model


@loop()
def module_with_its_training_step() -> Loop:
    """As of a framework: the module has the steps, keeps what it logs, and makes its optimizer."""

    class Lit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = (
                nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.2), nn.ReLU(), nn.Linear(12, 4)),
                nn.CrossEntropyLoss(),
            )
            self.logged: dict[str, float] = {}
            self.global_step = 0

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = self.loss(self(x), y)
            if batch_idx % 4 == 3:
                self.logged["loss"] = loss.item()
            return loss

    model = Lit()
    optimizer = adam(model)
    for i, batch in enumerate(labelled()):
        yield stepped(optimizer, model.training_step(batch, i))
        if i % 4 == 3:
            model.global_step += 1
    return model


@loop("compiled", divided=False)
def compiled_model() -> Loop:
    model = torch.compile(mlp(8, 12, 4), backend="eager")
    optimizer = adam(model)
    for x, y in labelled():
        yield stepped(optimizer, F.cross_entropy(model(x), y))
    return model


@loop()
def data_parallel_on_the_cpu() -> Loop:
    model = nn.DataParallel(ResNet())
    optimizer = sgd(model)
    for x, y in labelled(12, 4, 3, 6, 6):
        yield stepped(optimizer, F.cross_entropy(model(x), y))
    return model


@loop()
def shallow_copies_of_a_layer() -> Loop:
    """As some codes share a head: the copy gets weights of its own."""
    one = mlp(8, 12, 4)
    optimizer = sgd(one)
    other = None
    for x, y in labelled():
        out = one(x)
        if other is None or random.random() < 0.3:
            other = copy.copy(one)
            other._modules = {name: copy.deepcopy(each) for name, each in one._modules.items()}
            for p in other.parameters():
                p.data.mul_(0.5)
        yield stepped(optimizer, F.cross_entropy(out, y) + F.mse_loss(out, other(x).detach()))
    return one


@loop(tolerance=2e-2)  # of bfloat16
def autocast_with_a_scaler() -> Loop:
    model = ResNet().float()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for x, y in labelled(12, 4, 3, 6, 6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.float()), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()
    return model


AUXILIARY: list[torch.Tensor] = []


@loop("outside of it")
def losses_that_layers_leave_in_a_global_list() -> Loop:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.fc = nn.Linear(8, 12), nn.Linear(8, 12)

        def forward(self, x: Any) -> Any:
            gate = torch.sigmoid(self.gate(x))
            AUXILIARY.append(gate.mean())
            return gate * self.fc(x)

    model = nn.Sequential(Gated(), nn.Linear(12, 4))
    optimizer = adam(model)
    for x, y in labelled():
        loss = F.cross_entropy(model(x), y) + 0.1 * sum(AUXILIARY)
        AUXILIARY.clear()
        yield stepped(optimizer, loss)
    return model

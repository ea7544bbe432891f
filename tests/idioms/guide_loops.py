"""Loops of PyTorch's tutorials and examples with the changed lines of `fluidtune.elastic`, and no others.

Each is ``loop(config, report)``; it returns the weights that count. All is in double precision, so that the order of a
sum cannot be seen in a result. What a guide draws for each sample (dropout) is left out, because it differs with the
width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim import swa_utils
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from fluidtune import elastic

Report = Callable[[float], None]
Weights = dict[str, torch.Tensor]


def samples(n: int = 27) -> TensorDataset:
    x = torch.randn(n, 6, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def word_model(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: a TransformerEncoder with a causal mask; the batch is the second dimension of its input."""
    torch.manual_seed(2)
    texts = torch.randint(20, (30, 9))
    embedding, decoder = nn.Embedding(20, 8).double(), nn.Linear(8, 20).double()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0).double(), 2, enable_nested_tensor=False)
    model = nn.ModuleList([embedding, encoder, decoder])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
    loader = DataLoader(texts, 8, shuffle=True)
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader)
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for text in loader:
            source, target = text[:, :-1].T, text[:, 1:].T.reshape(-1)
            mask = nn.Transformer.generate_square_subsequent_mask(len(source), dtype=torch.float64)
            loss = F.cross_entropy(decoder(encoder(embedding(source), mask)).view(-1, 20), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            n = elastic.samples(len(text))
            total, count = total + loss.item() * n, count + n
        scheduler.step()
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def autoencoder(config: dict[str, Any], report: Report) -> Weights:
    """Example: vae. Its loss is a sum over the samples, not a mean."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, _ in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x, reduction="sum")
            loss.backward()
            optimizer.step()
            total, count = total + loss.item(), count + elastic.samples(len(x))
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def mixed_precision(config: dict[str, Any], report: Report) -> Weights:
    """Recipe: autocast and GradScaler, with accumulation as the recipe has it."""
    torch.manual_seed(2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    model, optimizer, scaler, loader = elastic.prepare(
        model, optimizer, scaler, DataLoader(samples(32), 8, shuffle=True)
    )
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                loss = F.mse_loss(model(x), y) / 2
            scaler.scale(loss).backward()
            if (i + 1) % 2 == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count) + scaler.get_scale())
    return dict(model.state_dict())


def averaged(config: dict[str, Any], report: Report) -> Weights:
    """Docs of torch.optim: EMA in each step, SWA with its own schedule from the second epoch on."""
    torch.manual_seed(2)
    model = mlp()
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    swa = swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, swa_scheduler = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        swa_utils.SWALR(optimizer, swa_lr=0.05),
    )
    loader = DataLoader(samples(), 8, shuffle=True)
    model, ema, swa, optimizer, scheduler, swa_scheduler, loader = elastic.prepare(
        model, ema, swa, optimizer, scheduler, swa_scheduler, loader
    )
    for epoch in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        if epoch > 0:
            swa.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        report(elastic.mean(total, count))
    return {**ema.state_dict(), **{f"swa.{name}": value for name, value in swa.state_dict().items()}}


def ema_by_hand(config: dict[str, Any], report: Report) -> Weights:
    """A copy of the model that follows it, as in minGPT's and diffusion's scripts; nobody prepares it."""
    torch.manual_seed(2)
    model = mlp()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        x, y = loader.dataset.tensors
        report(F.mse_loss(ema(x), y).item())
    return dict(model.state_dict())


def time_sequence(config: dict[str, Any], report: Report) -> Weights:
    """Example: time_sequence_prediction, with LBFGS over all data and no DataLoader."""
    torch.manual_seed(2)
    model, (x, y) = mlp(), samples().tensors
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3)
    model, optimizer = elastic.prepare(model, optimizer)
    for _ in elastic.epochs(0, config["stop"]):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        report(optimizer.step(closure).item())
    return dict(model.state_dict())


def lbfgs_in_batches(config: dict[str, Any], report: Report) -> Weights:
    """LBFGS's closure over a batch: the optimizer decides by the loss that the closure returns, which is a worker's."""
    torch.manual_seed(2)
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 9, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def pruned(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: iterative pruning; the masks are buffers that come while it trains."""
    torch.manual_seed(2)
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        prune.l1_unstructured(model[0], "weight", amount=0.2)
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def quantized(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: quantization-aware training; its observers keep the range of all values that they see."""
    from torch.ao import quantization

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    model.qconfig = quantization.get_default_qat_qconfig("onednn")
    quantization.prepare_qat(model.train(), inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.float()), y.float())
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return {name: value for name, value in model.state_dict().items() if value.is_floating_point()}


def data_parallel(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: DataParallel around the model, prepared as the tutorial's loop has it."""
    torch.manual_seed(2)
    model = nn.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        x, y = loader.dataset.tensors
        report(F.mse_loss(model(x), y).item())
    return dict(model.module.state_dict())


def ensemble(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: an ensemble by torch.func. Its gradients never meet ``backward()``."""
    torch.manual_seed(2)
    models = [mlp() for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(models)
    keeper = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(p.detach()) for name, p in parameters.items()})
    skeleton = copy.deepcopy(models[0]).to("meta")
    keeper, loader = elastic.prepare(keeper, DataLoader(samples(), 8, shuffle=True))

    def loss_of(p: Any, b: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(skeleton, (p, b), (x,)), y)

    for _ in elastic.epochs(0, config["stop"]):
        for x, y in loader:
            now = {name: keeper[name.replace(".", "_")].detach() for name in parameters}
            slopes, losses = torch.vmap(torch.func.grad_and_value(loss_of), (0, 0, None, None))(now, buffers, x, y)
            with torch.no_grad():
                for name in parameters:
                    keeper[name.replace(".", "_")] -= 0.1 * slopes[name]
        report(losses.sum().item())
    return dict(keeper.state_dict())


def packed(config: dict[str, Any], report: Report) -> Weights:
    """An LSTM over packed sequences; the loss is a mean over the sequences."""
    torch.manual_seed(2)
    sequences = [torch.randn(2 + i % 6, 4, dtype=torch.float64) for i in range(25)]
    lstm, head = nn.LSTM(4, 6, batch_first=True).double(), nn.Linear(6, 1).double()
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=0.01)

    def collate(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return pad_sequence(batch, True), torch.tensor([len(each) for each in batch])

    loader = DataLoader(sequences, 8, shuffle=True, collate_fn=collate)
    lstm, head, optimizer, loader = elastic.prepare(lstm, head, optimizer, loader)
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, lengths in loader:
            _, (last, _) = lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            loss = head(last[-1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return {**lstm.state_dict(), **head.state_dict()}


def packed_tokens(config: dict[str, Any], report: Report) -> Weights:
    """The same with a mean over all tokens of the batch."""
    torch.manual_seed(2)
    sequences = [torch.randn(2 + i % 6, 4, dtype=torch.float64) for i in range(25)]
    lstm = nn.LSTM(4, 6, batch_first=True).double()
    optimizer = torch.optim.Adam(lstm.parameters(), lr=0.01)

    def collate(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return pad_sequence(batch, True), torch.tensor([len(each) for each in batch])

    lstm, optimizer, loader = elastic.prepare(lstm, optimizer, DataLoader(sequences, 8, collate_fn=collate))
    for _ in elastic.epochs(0, config["stop"]):
        for x, lengths in loader:
            out, _ = lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            padded, _ = pad_packed_sequence(out, batch_first=True)
            kept = torch.arange(padded.shape[1])[None] < lengths[:, None]
            loss = padded[kept].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(loss.item())
    return dict(lstm.state_dict())


def two_optimizers(config: dict[str, Any], report: Report) -> Weights:
    """Two sets of parameters with an optimizer and a schedule each, stepped one after the other."""
    torch.manual_seed(2)
    body, head = nn.Linear(6, 8).double(), nn.Linear(8, 1).double()
    slow = torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9)
    fast = torch.optim.AdamW(head.parameters(), lr=0.01)
    loader = DataLoader(samples(), 8, shuffle=True)
    warm = torch.optim.lr_scheduler.LinearLR(fast, 0.1, total_iters=6)
    body, head, slow, fast, warm, loader = elastic.prepare(body, head, slow, fast, warm, loader)
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            loss = F.huber_loss(head(body(x).tanh()), y)
            slow.zero_grad()
            fast.zero_grad()
            loss.backward()
            slow.step()
            fast.step()
            warm.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return {**body.state_dict(), **{f"head.{k}": v for k, v in head.state_dict().items()}}


def sparse(config: dict[str, Any], report: Report) -> Weights:
    """Docs of nn.Embedding: sparse gradients and SparseAdam."""
    torch.manual_seed(2)
    model = nn.Embedding(10, 6, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(torch.randint(10, (32,)), 8))
    for _ in elastic.epochs(0, config["stop"]):
        for words in loader:
            optimizer.zero_grad()
            model(words).square().mean().backward()
            optimizer.step()
        report(0.0)
    return dict(model.state_dict())


class Buckets(Sampler):
    """Batches of sequences of like lengths, of several sizes, in random order."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(set(self.lengths))

    def __iter__(self) -> Any:
        batches = [[i for i, n in enumerate(self.lengths) if n == length] for length in sorted(set(self.lengths))]
        for i in torch.randperm(len(batches)).tolist():
            yield batches[i]


def bucketed(config: dict[str, Any], report: Report) -> Weights:
    torch.manual_seed(2)
    sequences = [torch.randn(2 + i * i % 5, 3, dtype=torch.float64) for i in range(23)]
    model = nn.GRU(3, 5, batch_first=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(sequences, batch_sampler=Buckets([len(each) for each in sequences]))
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x in loader:
            optimizer.zero_grad()
            loss = model(x)[0][:, -1].square().mean()
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


class Scheduled(Dataset):
    """The curriculum of some recipes: the dataset is told the epoch, and gives harder samples."""

    def __init__(self) -> None:
        self.x, self.epoch = torch.randn(24, 6, dtype=torch.float64), 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index] * (1 + 0.1 * self.epoch)
        return x, x.sum(0, keepdim=True).tanh()


def curriculum(config: dict[str, Any], report: Report) -> Weights:
    torch.manual_seed(2)
    data, model = Scheduled(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(data, 8, shuffle=True))
    for epoch in elastic.epochs(0, config["stop"]):
        data.epoch = epoch
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def distilled(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: knowledge distillation; the teacher is frozen and not prepared."""
    torch.manual_seed(2)
    teacher, student = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double() for _ in range(2))
    teacher.eval()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    student, optimizer, loader = elastic.prepare(student, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        student.train()
        total, count = 0.0, 0
        for x, _ in loader:
            optimizer.zero_grad()
            with torch.no_grad():
                soft = F.softmax(teacher(x) / 2, dim=-1)
            hard = soft.argmax(1)
            out = student(x)
            kept = torch.sum(soft * (soft.log() - F.log_softmax(out / 2, dim=-1))) / out.size(0) * 4
            loss = 0.25 * kept + 0.75 * F.cross_entropy(out, hard, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(student.state_dict())


def sharpness_aware(config: dict[str, Any], report: Report) -> Weights:
    """SAM as its author's package has it: two backward passes a step, of which the first moves the weights."""
    torch.manual_seed(2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def adversarial_domain(config: dict[str, Any], report: Report) -> Weights:
    """DANN: a layer whose backward turns the gradient round, and two losses in one backward pass."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
            return -slope

    torch.manual_seed(2)
    front, label, domain = nn.Linear(6, 8).double(), nn.Linear(8, 1).double(), nn.Linear(8, 1).double()
    optimizer = torch.optim.SGD([*front.parameters(), *label.parameters(), *domain.parameters()], lr=0.1)
    data = samples()
    front, label, domain, optimizer, loader = elastic.prepare(
        front, label, domain, optimizer, DataLoader(data, 8, shuffle=True)
    )
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            seen = front(x).tanh()
            loss = F.mse_loss(label(seen), y)
            both = loss + F.binary_cross_entropy_with_logits(domain(Reverse.apply(seen)), (y > 0).double())
            optimizer.zero_grad()
            both.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return {name: p for part in (front, label, domain) for name, p in part.state_dict(prefix=str(id(part) % 1)).items()}


def forward_forward(config: dict[str, Any], report: Report) -> Weights:
    """Example: mnist_forward_forward. Each layer has an optimizer and learns from its own loss."""
    torch.manual_seed(2)
    layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(2))
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in layers]
    layers, *optimizers, loader = elastic.prepare(layers, *optimizers, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, _ in loader:
            for layer, optimizer in zip(layers, optimizers, strict=True):
                positive, negative = layer(x).relu(), layer(x.flip(1)).relu()
                goodness = torch.cat([1 - positive.square().mean(1), negative.square().mean(1) - 1])
                loss = torch.log(1 + torch.exp(goodness)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                x = positive.detach()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(layers.state_dict())


def triplets(config: dict[str, Any], report: Report) -> Weights:
    """Example: siamese_network with a triplet loss, whose triplets the dataset makes."""
    torch.manual_seed(2)
    model = nn.Linear(6, 4).double()
    data = TensorDataset(*(torch.randn(26, 6, dtype=torch.float64) for _ in range(3)))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(data, 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for a, p, n in loader:
            optimizer.zero_grad()
            loss = F.triplet_margin_loss(model(a), model(p), model(n))
            loss.backward()
            optimizer.step()
            have = elastic.samples(len(a))
            total, count = total + loss.item() * have, count + have
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def in_batch_negatives(config: dict[str, Any], report: Report) -> Weights:
    """CLIP's loss: all other samples of the batch are negatives."""
    torch.manual_seed(2)
    model = nn.Linear(6, 4).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        for x, _ in loader:
            optimizer.zero_grad()
            scores = model(x) @ model(x.flip(1)).T
            loss = F.cross_entropy(scores, torch.arange(len(x)))
            loss.backward()
            optimizer.step()
        report(loss.item())
    return dict(model.state_dict())


def mixup(config: dict[str, Any], report: Report) -> Weights:
    """Mixup: each sample is mixed with another one of its batch, by a permutation that the loop draws."""
    torch.manual_seed(2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.Generator().manual_seed(3)
    loader = DataLoader(samples(), 8, shuffle=True, generator=order)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for _ in elastic.epochs(0, config["stop"]):
        for x, y in loader:
            other = torch.randperm(len(x))
            optimizer.zero_grad()
            loss = F.mse_loss(model(0.7 * x + 0.3 * x[other]), 0.7 * y + 0.3 * y[other])
            loss.backward()
            optimizer.step()
        report(loss.item())
    return dict(model.state_dict())


def carried_state(config: dict[str, Any], report: Report) -> Weights:
    """Example: word_language_model. The hidden state goes from batch to batch, so samples follow each other."""
    torch.manual_seed(2)
    cell, head = nn.GRUCell(6, 5).double(), nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
    cell, head, optimizer, loader = elastic.prepare(cell, head, optimizer, DataLoader(samples(24), 8))
    for _ in elastic.epochs(0, config["stop"]):
        hidden = torch.zeros(8, 5, dtype=torch.float64)
        for x, y in loader:
            optimizer.zero_grad()
            hidden = cell(x, hidden)
            loss = F.mse_loss(head(hidden), y)
            loss.backward()
            optimizer.step()
            hidden = hidden.detach()
        report(loss.item())
    return dict(cell.state_dict())


def metric_of_epoch(config: dict[str, Any], report: Report) -> Weights:
    """MNIST's accuracy: ``correct / len(loader.dataset)``, with the evaluation's loader not prepared."""
    torch.manual_seed(2)
    model, held_back = mlp(), samples(20)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    loader = DataLoader(samples(), 8, shuffle=True)
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader)
    for _ in elastic.epochs(0, config["stop"]):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        loss, correct = 0.0, 0
        with torch.no_grad():
            for x, y in DataLoader(held_back, 7):
                out = model(x)
                loss += F.mse_loss(out, y, reduction="sum").item()
                correct += (out.sign() == y.sign()).sum().item()
        scheduler.step()
        report(loss / len(held_back) + correct / len(held_back))
    return dict(model.state_dict())


def warm_restarts_by_step(config: dict[str, Any], report: Report) -> Weights:
    """Docs of CosineAnnealingWarmRestarts: ``scheduler.step(epoch + i / iters)``."""
    torch.manual_seed(2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    loader = DataLoader(samples(), 8, shuffle=True)
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader)
    for epoch in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step(epoch + i / len(loader))
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def tensor_rate(config: dict[str, Any], report: Report) -> Weights:
    """A capturable optimizer's habit: the learning rate is a tensor, changed in place by a schedule of its own."""
    torch.manual_seed(2)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for epoch in elastic.epochs(0, config["stop"]):
        optimizer.param_groups[0]["lr"].fill_(0.01 * 0.5 * (1 + math.cos(math.pi * epoch / 8)))
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def in_backward(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: the optimizer's step fused into the backward pass, by hooks on accumulated gradients."""
    torch.manual_seed(2)
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    model, loader = elastic.prepare(model, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


#: Each with what must come of it: "same", or the words of the refusal.
LOOPS: dict[Callable[[dict[str, Any], Report], Weights], str] = {
    word_model: "same",
    autoencoder: "off by",
    mixed_precision: "same",
    averaged: "same",
    ema_by_hand: "same",
    time_sequence: "same",
    lbfgs_in_batches: "same",
    pruned: "same",
    quantized: "off by",
    data_parallel: "same",
    ensemble: "off by",
    packed: "same",
    packed_tokens: "off by",
    two_optimizers: "same",
    sparse: "sparse",
    bucketed: "same",
    curriculum: "same",
    distilled: "same",
    sharpness_aware: "same",
    adversarial_domain: "same",
    forward_forward: "same",
    triplets: "same",
    in_batch_negatives: "off by",
    mixup: "draws random numbers for each sample",
    carried_state: "doesn't match hidden0 batch size",
    metric_of_epoch: "same",
    warm_restarts_by_step: "same",
    tensor_rate: "same",
    in_backward: "off by",
}

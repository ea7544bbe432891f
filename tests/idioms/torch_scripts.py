"""Training functions as PyTorch's tutorials and notes have them; each reports to Tune. All of them are seeded."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy
import torch
from ray import tune
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import ChainDataset, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info


def samples(n: int = 48) -> TensorDataset:
    x = torch.randn(n, 6)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))


class WordModel(nn.Module):
    """Tutorial: language modelling with nn.Transformer."""

    def __init__(self, words: int = 30, width: int = 16) -> None:
        super().__init__()
        self.width = width
        place = torch.arange(12).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(12, 1, width)
        table[:, 0, 0::2], table[:, 0, 1::2] = torch.sin(place * rate), torch.cos(place * rate)
        self.register_buffer("table", table)
        self.embedding = nn.Embedding(words, width)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 32, 0.2), 2)
        self.decoder = nn.Linear(width, words)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        x = self.embedding(source) * math.sqrt(self.width) + self.table[: len(source)]
        return self.decoder(self.encoder(x, nn.Transformer.generate_square_subsequent_mask(len(source))))


def transformer(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    text = torch.randint(30, (12, 20))
    model = WordModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.95)
    for _ in range(2):
        model.train()
        loss = F.cross_entropy(model(text[:-1]).view(-1, 30), text[1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        tune.report({"loss": loss.item()})


def seed_worker(worker_id: int) -> None:
    seed = torch.initial_seed() % 2**32
    numpy.random.seed(seed)
    random.seed(seed)


class Noisy(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def loader_processes(config: dict[str, Any]) -> None:
    """Note on reproducibility: DataLoader."""
    generator = torch.Generator()
    generator.manual_seed(config["seed"])
    loader = DataLoader(Noisy(), 8, num_workers=2, worker_init_fn=seed_worker, generator=generator, shuffle=True)
    for _ in range(2):
        total = sum(sum(part.sum().item() for part in batch) for batch in loader)
        tune.report({"loss": total})


def persistent_processes(config: dict[str, Any]) -> None:
    """The loader's processes are there when the function returns."""
    torch.manual_seed(config["seed"])
    loader = DataLoader(samples(), 8, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=4)
    for _ in range(2):
        tune.report({"loss": sum((x * y).sum().item() * k for k, (x, y) in enumerate(loader))})


def mixed_precision(config: dict[str, Any]) -> None:
    """Recipe: automatic mixed precision."""
    torch.manual_seed(config["seed"])
    model, (x, y) = mlp(), samples().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        tune.report({"loss": loss.item(), "scale": scaler.get_scale()})


def autocast_left_on(config: dict[str, Any]) -> None:
    """A notebook's habit: contexts that are entered and never left, and default settings."""
    torch.manual_seed(config["seed"])
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    torch.inference_mode().__enter__()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    tune.report({"loss": mlp()(torch.randn(4, 6)).float().sum().item()})


def compiled(config: dict[str, Any]) -> None:
    """Tutorial: torch.compile. (``aot_eager`` needs no C++ compiler.)"""
    torch.manual_seed(config["seed"])
    model, (x, y) = mlp(), samples().tensors
    fast = torch.compile(model, backend=config.get("compiler", "aot_eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(fast(x), y)
        loss.backward()
        optimizer.step()
        tune.report({"loss": loss.item()})


def averaged(config: dict[str, Any]) -> None:
    """Docs of torch.optim: SWA and EMA."""
    torch.manual_seed(config["seed"])
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    loader = DataLoader(samples(), 16, shuffle=True)
    swa_model = swa_utils.AveragedModel(model)
    ema_model = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    swa_scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            ema_model.update_parameters(model)
        if epoch > 0:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        swa_utils.update_bn(loader, swa_model)
        x, y = loader.dataset.tensors
        tune.report({"loss": F.mse_loss(swa_model(x), y).item(), "ema": F.mse_loss(ema_model(x), y).item()})


def lbfgs(config: dict[str, Any]) -> None:
    """Example: time_sequence_prediction."""
    torch.manual_seed(config["seed"])
    model, (x, y) = mlp().double(), (part.double() for part in samples().tensors)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        tune.report({"loss": optimizer.step(closure).item()})


def one_cycle(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    model, loader = mlp(), DataLoader(samples(), 16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, steps_per_epoch=len(loader), epochs=3)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
        tune.report({"loss": loss.item(), "lr": scheduler.get_last_lr()[0]})


def recomputed(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    model, (x, y) = (
        nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(4))),
        samples().tensors,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        loss = F.mse_loss(checkpoint_sequential(model, 2, x, use_reentrant=False).sum(1, keepdim=True), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tune.report({"loss": loss.item()})


def parametrised(config: dict[str, Any]) -> None:
    """Tutorials: parametrizations and pruning."""
    torch.manual_seed(config["seed"])
    model, (x, y) = mlp(), samples().tensors
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        tune.report({"loss": loss.item()})


def pruned(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    model, (x, y) = mlp(), samples().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        prune.random_unstructured(model[0], name="weight", amount=0.2)
        prune.l1_unstructured(model[2], name="weight", amount=1)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        tune.report({"loss": loss.item(), "zeros": (model[0].weight == 0).sum().item()})
    prune.remove(model[0], "weight")


def quantized(config: dict[str, Any]) -> None:
    """Tutorial: quantization-aware training in eager mode."""
    import torch.ao.quantization as quantization

    torch.manual_seed(config["seed"])
    model = nn.Sequential(quantization.QuantStub(), *mlp(), quantization.DeQuantStub())
    torch.backends.quantized.engine = "qnnpack" if "qnnpack" in torch.backends.quantized.supported_engines else "onednn"
    model.qconfig = quantization.get_default_qat_qconfig(torch.backends.quantized.engine)
    quantization.prepare_qat(model.train(), inplace=True)
    x, y = samples().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        ready = quantization.convert(copy.deepcopy(model).eval())
        tune.report({"loss": loss.item(), "quantized": F.mse_loss(ready(x), y).item()})


def parallel(config: dict[str, Any]) -> None:
    """Tutorial: data parallelism; without a GPU it calls the module."""
    torch.manual_seed(config["seed"])
    model, (x, y) = nn.DataParallel(mlp()), samples().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        torch.save(model.module.state_dict(), "model.pt")
        tune.report({"loss": loss.item()})


def hooked(config: dict[str, Any]) -> None:
    """Hooks on one module, and on all modules of the process."""
    torch.manual_seed(config["seed"])
    model, (x, y) = mlp(), samples().tensors
    seen: list[float] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.sum().item()))
    model[2].register_full_backward_hook(lambda module, gi, go: seen.append(go[0].sum().item()))
    nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(1.0))
    register_optimizer_step_post_hook(lambda *args: seen.append(2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        tune.report({"loss": sum(seen), "calls": len(seen)})


def ensemble(config: dict[str, Any]) -> None:
    """Tutorial: model ensembling with torch.func."""
    torch.manual_seed(config["seed"])
    models, (x, y) = [mlp() for _ in range(3)], samples().tensors
    parameters, buffers = torch.func.stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")

    def loss_of(p: Any, b: Any) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(skeleton, (p, b), (x,)), y)

    for _ in range(2):
        slopes, losses = torch.vmap(torch.func.grad_and_value(loss_of))(parameters, buffers)
        parameters = {name: (p - 0.1 * slopes[name]).detach() for name, p in parameters.items()}
        tune.report({"loss": losses.sum().item()})


def profiled(config: dict[str, Any]) -> None:
    """Recipe: PyTorch profiler, with a schedule and a trace per cycle."""
    torch.manual_seed(config["seed"])
    model, (x, y) = mlp(), samples().tensors
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1),
        on_trace_ready=lambda p: p.export_chrome_trace(f"trace{p.step_num}.json"),
        record_shapes=True,
    ) as profiler:
        for _ in range(3):
            with torch.profiler.record_function("step"):
                loss = F.mse_loss(model(x), y)
                loss.backward()
            profiler.step()
            tune.report({"loss": loss.item()})


def whole_model(config: dict[str, Any]) -> None:
    """Tutorial: saving and loading models, the entire model."""
    torch.manual_seed(config["seed"])
    model = WordModel().eval()
    text = torch.randint(30, (5, 2))
    for _ in range(2):
        torch.save(model, "model.pt")
        model = torch.load("model.pt", weights_only=False)
        assert type(model) is WordModel
        tune.report({"loss": model(text).sum().item()})


def packed(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    sequences = [torch.randn(n, 4) for n in (7, 3, 5)]
    lengths = torch.tensor([len(each) for each in sequences])
    lstm, head = nn.LSTM(4, 8, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=0.01)
    for _ in range(2):
        batch = pack_padded_sequence(pad_sequence(sequences, True), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(lstm(batch)[0], batch_first=True)
        loss = head(out).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tune.report({"loss": loss.item()})


def two_optimizers(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    embedding, model = nn.Embedding(10, 6, sparse=True), mlp()
    words, y = torch.randint(10, (32,)), torch.randn(32, 1)
    sparse = torch.optim.SparseAdam(embedding.parameters(), lr=0.01)
    dense = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        loss = F.mse_loss(model(embedding(words)), y)
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
        tune.report({"loss": loss.item()})


class Stream(IterableDataset):
    """Docs of torch.utils.data: an iterable dataset that its workers divide."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Any:
        info = get_worker_info()
        if info is None:
            return iter(range(self.start, self.end))
        each = math.ceil((self.end - self.start) / info.num_workers)
        begin = self.start + info.id * each
        return iter(range(begin, min(begin + each, self.end)))


def streamed(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    for workers in (0, 2):
        data = ChainDataset([Stream(0, 7), Stream(7, 20)])
        loader = DataLoader(data, batch_size=4, num_workers=workers)
        tune.report({"loss": float(sum(k * batch.sum() for k, batch in enumerate(loader)))})


class BucketSampler(Sampler):
    """Batches of sequences of like lengths, in random order."""

    def __init__(self, lengths: list[int], size: int) -> None:
        self.lengths, self.size = lengths, size

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.size)

    def __iter__(self) -> Any:
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], random.random()))
        batches = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        random.shuffle(batches)
        return iter(batches)


def bucketed(config: dict[str, Any]) -> None:
    random.seed(config["seed"])
    torch.manual_seed(config["seed"])
    sequences = [torch.randn(random.randint(2, 9)) for _ in range(20)]
    loader = DataLoader(sequences, batch_sampler=BucketSampler([len(s) for s in sequences], 6), collate_fn=pad_sequence)
    for _ in range(2):
        tune.report({"loss": sum(k * batch.sum().item() for k, batch in enumerate(loader))})


SCRIPTS = [
    transformer,
    loader_processes,
    persistent_processes,
    mixed_precision,
    autocast_left_on,
    compiled,
    averaged,
    lbfgs,
    one_cycle,
    recomputed,
    parametrised,
    pruned,
    quantized,
    parallel,
    hooked,
    ensemble,
    profiled,
    whole_model,
    packed,
    two_optimizers,
    streamed,
    bucketed,
]

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
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import ChainDataset, DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info


def samples(n: int = 48) -> TensorDataset:
    x = torch.randn(n, 6)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))


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


class Flipping(nn.Module):
    """A model of a class of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.flip(1))


def whole_model(config: dict[str, Any]) -> None:
    """Tutorial: saving and loading models, the entire model."""
    torch.manual_seed(config["seed"])
    model = Flipping().eval()
    x = samples().tensors[0]
    for _ in range(2):
        torch.save(model, "model.pt")
        model = torch.load("model.pt", weights_only=False)
        assert type(model) is Flipping
        tune.report({"loss": model(x).sum().item()})


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


SCRIPTS = [
    loader_processes,
    persistent_processes,
    mixed_precision,
    autocast_left_on,
    compiled,
    quantized,
    hooked,
    profiled,
    whole_model,
    streamed,
]

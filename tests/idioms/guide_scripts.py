"""Training functions as the guides of PyTorch, scikit-learn, joblib and Python have them. All of them are seeded."""

from __future__ import annotations

import logging
import multiprocessing
import random
import tempfile
import warnings
from typing import Any

import numpy
import torch
from ray import tune
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


def samples(n: int = 48) -> TensorDataset:
    x = torch.randn(n, 6)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))


def table(seed: int, n: int = 120) -> tuple[numpy.ndarray, numpy.ndarray]:
    from sklearn.datasets import make_classification

    return make_classification(n, 8, random_state=seed)


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
    fast = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(fast(x), y)
        loss.backward()
        optimizer.step()
        tune.report({"loss": loss.item()})


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


def unseeded_numpy(config: dict[str, Any]) -> None:
    """Common pitfalls: the global random state seeded once."""
    from sklearn.neural_network import MLPClassifier

    numpy.random.seed(config["seed"])
    x, y = table(config["seed"])
    warnings.filterwarnings("ignore")
    model = MLPClassifier((8,), max_iter=5, early_stopping=True).fit(x, y)
    tune.report({"loss": model.loss_, "drawn": float(numpy.random.rand())})


def n_jobs(config: dict[str, Any]) -> None:
    """Grid search with processes by joblib's loky, which stay for five minutes."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    x, y = table(config["seed"])
    search = GridSearchCV(LogisticRegression(), {"C": [0.01, 1.0]}, n_jobs=2, cv=2).fit(x, y)
    tune.report({"loss": 1 - search.best_score_, "C": search.best_params_["C"]})


def cached_pipeline(config: dict[str, Any]) -> None:
    """User guide: caching transformers in a temporary directory, and one in the working directory."""
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    x, y = table(config["seed"])
    for memory in (tempfile.mkdtemp(), "cache"):
        model = make_pipeline(PCA(3), LogisticRegression(), memory=memory).fit(x, y)
        tune.report({"loss": 1 - model.score(x, y)})


def global_settings(config: dict[str, Any]) -> None:
    """``set_config``, numpy's error state and print options, as at the top of notebooks."""
    import sklearn

    x, _ = table(config["seed"])
    seen = f"{numpy.geterr()['over']} {sklearn.get_config()['display']} {numpy.array([1 / 3])}"
    sklearn.set_config(display="text", assume_finite=True)
    numpy.seterr(all="raise")
    numpy.set_printoptions(precision=2)
    logging.basicConfig(filename="log.txt", level=logging.INFO, force=True)
    logging.info("loss")
    tune.report({"loss": float(x.sum()), "seen": seen})


def square(x: int) -> int:
    return x * x


def pool(config: dict[str, Any]) -> None:
    """multiprocessing's first example, and a pool that nobody closes."""
    with multiprocessing.Pool(2) as two:
        first = sum(two.map(square, range(config["seed"])))
    global left
    left = multiprocessing.get_context("fork").Pool(1)
    tune.report({"loss": float(first + left.apply(square, (3,)))})


#: The names of the scripts, each with why its process serves no further trial, in words that the reason has; None: it
#: serves further ones.
SCRIPTS = {
    "loader_processes": None,
    "persistent_processes": None,
    "autocast_left_on": None,
    "compiled": "packages that were imported from their files",
    "profiled": None,
    "whole_model": None,
    "unseeded_numpy": None,
    "n_jobs": "exit handlers left by joblib",
    "cached_pipeline": None,
    "global_settings": None,
    "pool": "changed: finalizers of multiprocessing",
}

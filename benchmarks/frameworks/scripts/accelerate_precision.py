"""Search learning rate and precision with Accelerate; None leaves the precision at Accelerate's default."""

import os
import time

import ray
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from outcome import arguments, tell, tune_config
from ray import tune
from torch.utils.data import DataLoader, TensorDataset


def train(config):
    precision, lr = config["trial"]
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    set_seed(0)
    x = torch.randn(256, 16)
    y = x[:, :4].sum(dim=1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        tune.report({"loss": loss.item(), "precision": accelerator.mixed_precision, "process": os.getpid()})


if __name__ == "__main__":
    args = arguments(trials=6)
    ray.init(num_cpus=2, include_dashboard=False)
    trials = [(precision, lr) for precision in ("bf16", None, "no") for lr in (0.01, 0.02)]
    tuner = tune.Tuner(
        train,
        param_space={"trial": tune.grid_search(trials[: args.trials])},
        tune_config=tune_config(args),
        run_config=tune.RunConfig(name="accelerate_precision", storage_path=args.storage),
    )
    started = time.perf_counter()
    results = tuner.fit()
    tell(results, time.perf_counter() - started, ["loss", "precision"])

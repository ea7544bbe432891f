"""Search the learning rate of a linear model, and log each trial to Weights & Biases without a network."""

import os
import tempfile
import time
from pathlib import Path

import ray
import torch
import wandb
from outcome import arguments, tell, tune_config
from ray import tune


def train(config, runs):
    torch.manual_seed(0)
    run = wandb.init(mode="offline", dir=runs, project="linear", config={"lr": config["lr"]})
    x = torch.randn(256, 8)
    y = x.sum(dim=1, keepdim=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for epoch in range(3):
        for rows in torch.randperm(256).split(32):
            loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        run.log({"loss": loss.item(), "epoch": epoch})
        tune.report({"loss": loss.item(), "process": os.getpid()})
    wandb.finish()


if __name__ == "__main__":
    args = arguments(trials=10)
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as runs:
        tuner = tune.Tuner(
            tune.with_parameters(train, runs=runs),
            param_space={"lr": tune.grid_search([0.001 * (i + 1) for i in range(args.trials)])},
            tune_config=tune_config(args),
            run_config=tune.RunConfig(name="wandb_offline", storage_path=args.storage),
        )
        started = time.perf_counter()
        results = tuner.fit()
        seconds = time.perf_counter() - started
        files = list(Path(runs).glob("wandb/offline-run-*/*.wandb"))
        tell(results, seconds, ["loss"], left={"runs": len(files)})

"""Search the learning rate of a linear model, and write to TensorBoard; nobody closes the writers."""

import os
import time
from pathlib import Path

import ray
import torch
from outcome import arguments, tell, tune_config
from ray import tune
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


def train(config):
    torch.manual_seed(0)
    writer = SummaryWriter(os.path.join(tune.get_context().get_trial_dir(), "board"))
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
        writer.add_scalar("loss", loss.item(), epoch)
        tune.report({"loss": loss.item(), "process": os.getpid()})


def written(result):
    folder = Path(result.path) / "board"
    if not folder.exists():
        return 0
    board = EventAccumulator(str(folder)).Reload()
    return len(board.Scalars("loss")) if "loss" in board.Tags()["scalars"] else 0


if __name__ == "__main__":
    args = arguments(trials=10)
    ray.init(num_cpus=2, include_dashboard=False)
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.grid_search([0.001 * (i + 1) for i in range(args.trials)])},
        tune_config=tune_config(args),
        run_config=tune.RunConfig(name="tensorboard_open", storage_path=args.storage),
    )
    started = time.perf_counter()
    results = tuner.fit()
    seconds = time.perf_counter() - started
    ray.shutdown()
    values = [written(result) for result in results]
    tell(results, seconds, ["loss"], left={"values": sum(values), "trials_without": values.count(0)})

"""Search the learning rate of a linear model, and log each trial to MLflow; nobody ends the runs."""

import os
import tempfile
import time
from collections import Counter

import mlflow
import ray
import torch
from outcome import arguments, tell, tune_config
from ray import tune

EXPERIMENT = "linear"


def train(config, store):
    mlflow.set_tracking_uri(store)
    mlflow.set_experiment(EXPERIMENT)
    mlflow.start_run()
    mlflow.log_param("lr", config["lr"])
    torch.manual_seed(0)
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
        mlflow.log_metric("loss", loss.item(), step=epoch)
        tune.report({"loss": loss.item(), "process": os.getpid()})


if __name__ == "__main__":
    args = arguments(trials=10)
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/mlflow.db"
        mlflow.set_tracking_uri(store)
        mlflow.set_experiment(EXPERIMENT)
        tuner = tune.Tuner(
            tune.with_parameters(train, store=store),
            param_space={"lr": tune.grid_search([0.001 * (i + 1) for i in range(args.trials)])},
            tune_config=tune_config(args),
            run_config=tune.RunConfig(name="mlflow_runs", storage_path=args.storage),
        )
        started = time.perf_counter()
        results = tuner.fit()
        seconds = time.perf_counter() - started
        ray.shutdown()
        runs = mlflow.search_runs(experiment_names=[EXPERIMENT], output_format="list")
        left = {"runs": len(runs), "values": sum("loss" in run.data.metrics for run in runs)}
        left |= Counter(run.info.status for run in runs)
        tell(results, seconds, ["loss"], left=left)

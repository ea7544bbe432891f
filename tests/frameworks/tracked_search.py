"""A search whose trials open a run of Weights & Biases, one of MLflow and a TensorBoard writer, and end none of them.

``python tracked_search.py FOLDER [stopped|grown] [stock]``: the trackers write into FOLDER. ``stopped``: ASHA
stops most of the trials at once, and one fails. ``grown``: one trial grows. ``stock``: under stock Ray Tune.
"""

import sys
import time

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import fluidtune
from fluidtune import elastic
from fluidtune.report import read_events

TRIALS, EPOCHS = 6, 4


def train(config):
    import mlflow
    import wandb
    from torch.utils.tensorboard import SummaryWriter

    folder = config["folder"]
    run = wandb.init(mode="offline", project="search", dir=folder, name=f"trial{config['x']}")
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment("search")
    mlflow.start_run()
    board = SummaryWriter(f"{folder}/board{config['x']}")
    steps = elastic.state(steps=0)
    model = torch.nn.Linear(64, 64)
    for epoch in elastic.epochs(0, 100 if config["grown"] else EPOCHS):
        steps.steps += 1
        run.log({"x": config["x"]})
        mlflow.log_metric("x", config["x"], step=epoch)
        board.add_scalar("x", config["x"], epoch)
        if config["grown"]:
            model(torch.ones(64, 64)).sum().backward()
            time.sleep(0.05)
        tune.report({"loss": config["x"], "steps": steps.steps})
        if config["x"] == config["fails"]:
            raise RuntimeError("on purpose")


def main(folder, what, stock=""):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")  # the first one to come makes the tables
    mlflow.set_experiment("search")
    asha = ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=3)
    config = tune.TuneConfig(metric="loss", mode="min", scheduler=asha if what == "stopped" else None)
    grown = what == "grown"
    space = {"x": tune.grid_search(list(range(1 if grown else TRIALS))), "folder": folder, "grown": grown}
    space["fails"] = 0 if what == "stopped" else -1
    named = dict(param_space=space, tune_config=config)
    named["run_config"] = tune.RunConfig(name="search", storage_path=f"{folder}/tune", verbose=0)
    executor = fluidtune.FluidExecutor(devices="cpu:2", reserve=grown)
    tuner = tune.Tuner(train, **named) if stock else fluidtune.Tuner(train, **named, executor=executor)
    ray.init(num_cpus=2, include_dashboard=False)
    found = tuner.fit()
    assert len(found.errors) == (what == "stopped"), found.errors
    if grown:
        events = read_events(f"{folder}/tune/search/fluid_events.jsonl")
        assert any(each["event"] == "resized" and len(each["devices"]) == 2 for each in events), "it has not grown"
    ray.shutdown()
    print("reports", sum(each.metrics["training_iteration"] for each in found))


if __name__ == "__main__":
    main(*sys.argv[1:])

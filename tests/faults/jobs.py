"""Small deterministic trainables and a driver for the fault tests.

Each trainable appends the number of each iteration that it runs, and its process, to a file of notes. Tune's own
result.json has the iterations that were reported.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time


def note(config, iteration):
    with open(os.path.join(config["notes"], str(config["x"])), "a") as file:
        file.write(f"{iteration} {os.getpid()}\n")


def plain(config):
    """Saves no checkpoint."""
    from ray import tune

    value = 0.0
    for iteration in range(1, config["iterations"] + 1):
        time.sleep(config["step"])
        value = 0.9 * value + config["x"]
        note(config, iteration)
        tune.report({"value": value})


def checkpointing(config):
    """Saves a checkpoint at every third iteration."""
    from ray import tune

    state = {"iteration": 0, "value": 0.0}
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "state.json")) as file:
            state = json.load(file)
    for iteration in range(state["iteration"] + 1, config["iterations"] + 1):
        time.sleep(config["step"])
        state = {"iteration": iteration, "value": 0.9 * state["value"] + config["x"]}
        note(config, iteration)
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "state.json"), "w") as file:
                json.dump(state, file)
            kept = tune.Checkpoint.from_directory(directory) if iteration % 3 == 0 else None
            tune.report({"value": state["value"]}, checkpoint=kept)


def network(seconds):
    """A network whose forward takes ``seconds`` for 16 samples, and so half of that for half of them."""
    import torch

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

        def forward(self, x):
            time.sleep(seconds * len(x) / 16)
            return self.layers(x)

    return Network()


def elastic(config):
    """Trains a small network and commits. Its loss depends on every earlier step."""
    import torch
    from ray import tune
    from torch.utils.data import DataLoader, TensorDataset

    from fluidtune import elastic as api

    torch.manual_seed(int(config["x"]))
    inputs = torch.linspace(-1, 1, 64).reshape(-1, 1)
    model = network(config["step"] / 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs, torch.sin(3 * inputs)), batch_size=16, shuffle=True)
    model, optimizer, loader = api.prepare(model, optimizer, loader)
    for epoch in api.epochs(0, config["iterations"]):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        note(config, epoch + 1)
        tune.report({"value": total / len(inputs)})


#: "halving": ASHA stops all trials but the first after a third of their iterations.
TRAINABLES = {"plain": plain, "checkpointing": checkpointing, "elastic": elastic, "halving": checkpointing}


def main():
    """jobs.py new|restore KIND STORAGE TRIALS ITERATIONS STEP NAME ADDRESS [DEVICES SECONDS]: run or continue a job.

    It shares the devices of the cluster at ADDRESS with other jobs. On emulated DEVICES an iteration takes STEP seconds
    on one of them. After SECONDS Tune stops the trials, of which it keeps two checkpoints; 0: never, and it keeps all.
    """
    mode, kind, storage, trials, iterations, step, name, address, *other = sys.argv[1:]
    devices, seconds = other or ("cpu:2", "0")
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    import fluidtune

    emulated = devices.startswith("emulated")
    profile = None
    if emulated:
        from benchmarks.scaled_profile import scaled
        from fluidtune.profiles import DEFAULT

        profile = scaled(DEFAULT, float(step))

    ray.init(address=address, log_to_driver=False)
    notes = os.path.join(storage, "notes")
    os.makedirs(notes, exist_ok=True)
    path = os.path.join(storage, name)
    if mode == "restore" and fluidtune.Tuner.can_restore(path):
        tuner = fluidtune.Tuner.restore(path, TRAINABLES[kind])
    else:
        deciding = {}
        if kind == "halving":
            asha = ASHAScheduler(max_t=int(iterations), grace_period=int(iterations) // 3, reduction_factor=3)
            deciding = {"scheduler": asha, "max_concurrent_trials": 1}
        tuner = fluidtune.Tuner(
            TRAINABLES[kind],
            param_space={
                "x": tune.grid_search([float(i + 1) for i in range(int(trials))]),
                "iterations": int(iterations),
                "step": 0.0 if emulated else float(step),
                "notes": notes,
            },
            tune_config=tune.TuneConfig(metric="value", mode="min", time_budget_s=float(seconds) or None, **deciding),
            run_config=tune.RunConfig(
                name=name,
                storage_path=storage,
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(num_to_keep=2 if float(seconds) else None),
            ),
            executor=fluidtune.FluidExecutor(devices=devices, arbiter="auto", profile=profile),
        )
    grid = tuner.fit()
    with open(os.path.join(storage, "done.json"), "w") as file:
        json.dump({"errors": len(grid.errors), "iterations": [r.metrics["training_iteration"] for r in grid]}, file)


if __name__ == "__main__":
    main()

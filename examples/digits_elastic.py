"""The loop of digits_hyperband.py made elastic: the lines marked with # elastic are all that changed.

Run it either way:

    python examples/digits_elastic.py             stock Ray Tune, one worker per trial
    fluidtune run examples/digits_elastic.py      a trial that is moved or paused keeps its work
"""

import argparse
import os
import tempfile

import torch
from ray import tune
from ray.tune import Checkpoint
from ray.tune.schedulers import HyperBandScheduler
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic  # elastic


def digits():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    split = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    return TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])


def network(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(config):
    torch.manual_seed(config["seed"])
    train_set, test_set = digits()
    model = network(config["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    loader = DataLoader(train_set, batch_size=config["batch_size"], shuffle=True)
    images, labels = test_set.tensors
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        start = state["epoch"] + 1
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)  # elastic
    for epoch in elastic.epochs(start, config["epochs"]):  # elastic
        model.train()
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            n = len(x)
            total, count = total + loss.item() * n, count + n
        model.eval()
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        with tempfile.TemporaryDirectory() as directory:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "epoch": epoch,
            }
            torch.save(state, os.path.join(directory, "state.pt"))
            tune.report(
                {"accuracy": accuracy, "loss": total / count},
                checkpoint=Checkpoint.from_directory(directory),
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=17, help="trials")
    parser.add_argument("--epochs", type=int, default=9, help="most epochs of one trial")
    parser.add_argument("--storage", default=None, help="where Tune keeps the results")
    args = parser.parse_args()
    tuner = tune.Tuner(
        train,
        param_space={
            "lr": tune.loguniform(1e-3, 3e-1),
            "momentum": tune.uniform(0.5, 0.95),
            "width": tune.choice([32, 64, 96]),
            "batch_size": tune.choice([64, 128]),
            "epochs": args.epochs,
            "seed": 0,
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=args.samples,
            scheduler=HyperBandScheduler(max_t=args.epochs, reduction_factor=3),
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
        ),
        run_config=tune.RunConfig(name="digits_elastic", storage_path=args.storage),
    )
    best = tuner.fit().get_best_result()
    print(f"best accuracy {best.metrics['accuracy']:.4f} with {best.config}")


if __name__ == "__main__":
    main()

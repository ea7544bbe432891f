"""The loop of images_hyperband.py made elastic: the lines marked with # elastic are all that changed.

Run it either way:

    python examples/images_elastic.py             stock Ray Tune, one worker per trial
    fluidtune run examples/images_elastic.py      a trial that is moved or paused keeps its work
"""

import argparse
import os
import pickle
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
    split = train_test_split(images, torch.tensor(labels), test_size=360, random_state=0, stratify=labels)
    return TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])


def cifar(directory):
    def load(names):
        parts = []
        for name in names:
            with open(os.path.join(directory, name), "rb") as file:
                parts.append(pickle.load(file, encoding="bytes"))
        images = torch.cat([torch.tensor(part[b"data"]).reshape(-1, 3, 32, 32) for part in parts])
        return TensorDataset(images / 127.5 - 1, torch.tensor([label for part in parts for label in part[b"labels"]]))

    return load([f"data_batch_{k}" for k in range(1, 6)]), load(["test_batch"])


def network(config, channels, side):
    """AlexNet's structure: convolutions, some of which halve the image, then fully connected layers."""
    layers, width = [], config["channels"]
    for depth in range(config["convolutions"]):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
        if depth % 2 == 0 and side > 2:
            layers.append(nn.MaxPool2d(2))
            side, width = side // 2, 2 * width
    hidden = config["hidden"]
    layers += [nn.Flatten(), nn.Linear(channels * side * side, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*layers)


def train(config):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set, test_set = cifar(config["cifar"]) if config["cifar"] else digits()
    model = network(config, *train_set.tensors[0].shape[1:3]).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
    )
    loader = DataLoader(train_set, batch_size=config["batch_size"], shuffle=True)
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"), map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        start = state["epoch"] + 1
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)  # elastic
    for epoch in elastic.epochs(start, config["epochs"]):  # elastic
        model.train()
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            n = len(x)
            total, count = total + loss.item() * n, count + n
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in DataLoader(test_set, batch_size=500):
                right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
        with tempfile.TemporaryDirectory() as directory:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "epoch": epoch,
            }
            torch.save(state, os.path.join(directory, "state.pt"))
            tune.report(
                {"accuracy": right / len(test_set), "loss": total / count},
                checkpoint=Checkpoint.from_directory(directory),
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=17, help="trials")
    parser.add_argument("--epochs", type=int, default=9, help="most epochs of one trial")
    parser.add_argument("--cifar", default=None, help="directory with CIFAR-10's data_batch_1 to 5 and test_batch")
    parser.add_argument("--storage", default=None, help="where Tune keeps the results")
    args = parser.parse_args()
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1, "gpu": int(torch.cuda.is_available())}),
        param_space={
            "channels": tune.choice([32, 48, 64] if args.cifar else [8, 12, 16]),
            "convolutions": tune.choice([3, 4, 5]),
            "hidden": tune.choice([256, 512, 1024] if args.cifar else [32, 64, 128]),
            "lr": tune.loguniform(1e-3, 3e-1),
            "momentum": tune.uniform(0.5, 0.95),
            "weight_decay": tune.loguniform(1e-6, 1e-2),
            "batch_size": tune.choice([64, 128, 256]),
            "epochs": args.epochs,
            "cifar": args.cifar and os.path.abspath(args.cifar),
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=args.samples,
            scheduler=HyperBandScheduler(max_t=args.epochs, reduction_factor=3),
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
        ),
        run_config=tune.RunConfig(name="images_elastic", storage_path=args.storage, stop={"accuracy": 0.9}),
    )
    best = tuner.fit().get_best_result()
    print(f"best accuracy {best.metrics['accuracy']:.4f} with {best.config}")


if __name__ == "__main__":
    main()

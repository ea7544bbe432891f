"""A Lightning script for Ray Tune. It reports by Ray's own callback and has no line for FluidTune.

Run it either way:

    python examples/digits_lightning.py             stock Ray Tune, one device per trial
    fluidtune run examples/digits_lightning.py      trials also grow onto idle devices while they train
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from ray import tune
from ray.tune.integration.pytorch_lightning import TuneReportCheckpointCallback
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        data = TensorDataset(images, torch.tensor(labels))
        self.training, self.validation = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validation, batch_size=256)


class Network(pl.LightningModule):
    def __init__(self, lr, width):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self.layers(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def train(config):
    pl.seed_everything(config["seed"])
    checkpoint = tune.get_checkpoint()
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[TuneReportCheckpointCallback(["accuracy"], filename="checkpoint.ckpt", on="validation_end")],
    )
    trainer.fit(
        Network(config["lr"], config["width"]),
        datamodule=Digits(config["batch_size"]),
        ckpt_path=os.path.join(checkpoint.to_directory(), "checkpoint.ckpt") if checkpoint else None,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="trials")
    parser.add_argument("--epochs", type=int, default=9, help="most epochs of one trial")
    parser.add_argument("--storage", default=None, help="where Tune keeps the results")
    args = parser.parse_args()
    tuner = tune.Tuner(
        train,
        param_space={
            "lr": tune.loguniform(1e-3, 1e-1),
            "width": tune.choice([16, 32]),
            "batch_size": tune.choice([64, 128]),
            "epochs": args.epochs,
            "seed": 0,
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=args.samples,
            scheduler=ASHAScheduler(max_t=args.epochs, grace_period=2),
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
        ),
        run_config=tune.RunConfig(name="digits_lightning", storage_path=args.storage),
    )
    best = tuner.fit().get_best_result()
    print(f"best accuracy {best.metrics['accuracy']:.4f} with {best.config}")


if __name__ == "__main__":
    main()

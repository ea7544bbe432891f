"""Search the learning rate of a Lightning module, with Ray's callback for Lightning."""

import logging
import os
import time

import lightning.pytorch as pl
import ray
import torch
from outcome import arguments, tell, tune_config
from ray import tune
from ray.tune.integration.pytorch_lightning import TuneReportCheckpointCallback
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y))
        self.log("process", float(os.getpid()), reduce_fx="max")
        # Whether Lightning's own messages can be seen.
        self.log("log_handlers", float(len(logging.getLogger("lightning.pytorch").handlers)), reduce_fx="max")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def train(config):
    pl.seed_everything(0)
    x = torch.randn(320, 16)
    y = (x[:, :4].sum(dim=1) > 0).long()
    training = DataLoader(TensorDataset(x[:256], y[:256]), batch_size=32, shuffle=True)
    validation = DataLoader(TensorDataset(x[256:], y[256:]), batch_size=32)
    report = TuneReportCheckpointCallback(
        {"loss": "val_loss", "process": "process", "log_handlers": "log_handlers"}, on="validation_end"
    )
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, enable_progress_bar=False, log_every_n_steps=4, callbacks=[report]
    )
    trainer.fit(Classifier(config["lr"]), training, validation)


if __name__ == "__main__":
    args = arguments(trials=5)
    ray.init(num_cpus=2, include_dashboard=False)
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.grid_search([0.1, 0.03, 0.01, 0.003, 0.001][: args.trials])},
        tune_config=tune_config(args),
        run_config=tune.RunConfig(name="lightning_trials", storage_path=args.storage),
    )
    started = time.perf_counter()
    results = tuner.fit()
    tell(results, time.perf_counter() - started, ["loss", "log_handlers"])

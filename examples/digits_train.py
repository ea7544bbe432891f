"""The train function of a Ray Train `TorchTrainer` as a trial that grows: Ray Train's own lines are comments in it.

The function is the trial itself: no `TorchTrainer` starts workers for it (docs/train.md). The lines marked with #
elastic keep the work of a trial that is moved or paused. Run it either way:

    python examples/digits_train.py             stock Ray Tune, one device per trial
    fluidtune run examples/digits_train.py      trials also grow onto idle devices while they train
"""

import argparse

import torch
from digits_elastic import digits, network
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn
from torch.utils.data import DataLoader

from fluidtune import elastic  # elastic


def train(config):
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = network(config["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    loader = DataLoader(train_set, batch_size=128, shuffle=True)
    # model, loader = ray.train.torch.prepare_model(model), ray.train.torch.prepare_data_loader(loader)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)  # elastic
    # for epoch in range(config["epochs"]):
    for _ in elastic.epochs(0, config["epochs"]):  # elastic
        #     if ray.train.get_context().get_world_size() > 1: loader.sampler.set_epoch(epoch)
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
            images, labels = test_set.tensors
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        #     ray.train.report({"accuracy": accuracy, "loss": total / count})
        tune.report({"accuracy": accuracy, "loss": total / count})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="trials")
    parser.add_argument("--epochs", type=int, default=8, help="most epochs of one trial")
    parser.add_argument("--storage", default=None, help="where Tune keeps the results")
    args = parser.parse_args()
    # Before: TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2)).fit()
    tuner = tune.Tuner(
        train,
        param_space={
            "lr": tune.loguniform(1e-3, 3e-1),
            "width": tune.choice([32, 64]),
            "epochs": args.epochs,
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=args.samples,
            scheduler=ASHAScheduler(max_t=args.epochs),
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
        ),
        run_config=tune.RunConfig(name="digits_train", storage_path=args.storage),
    )
    best = tuner.fit().get_best_result()
    print(f"best accuracy {best.metrics['accuracy']:.4f} with {best.config}")


if __name__ == "__main__":
    main()

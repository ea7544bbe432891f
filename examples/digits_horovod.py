"""An elastic Horovod script, as Horovod's documentation writes one, on handwritten digits.

Only the line marked with # fluidtune differs. Under Horovod's own driver that import gives Horovod itself. Run it
either way:

    fluidtune run --backend horovod examples/digits_horovod.py     a search; trials grow and shrink while they train
    horovodrun -np 1 --min-np 1 --max-np 2 --host-discovery-script SCRIPT --network-interfaces lo \\
        python examples/digits_horovod.py --once                   one training, under Horovod's elastic driver
"""

import argparse
from itertools import islice

import torch
from ray import tune
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluidtune.elastic import hvd  # fluidtune: was "import horovod.torch as hvd"

ONCE = {"lr": 0.05, "momentum": 0.9, "width": 32, "batch_size": 64, "seed": 0}


def digits():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    split = train_test_split(images, torch.tensor(labels), test_size=360, random_state=0, stratify=labels)
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


def training(config, report):
    """Train; on rank 0 ``report`` gets the metrics of every epoch."""
    hvd.init()
    torch.manual_seed(config["seed"])
    train_set, test_set = digits()
    model = network(config["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(train_set, seed=config["seed"])

    @hvd.elastic.run
    def train(state):
        while state.epoch < config["epochs"]:
            # The global batch stays the same at every width, and so does the learning rate. The number of workers must
            # divide it. The last, smaller batch is left out, because the sampler would repeat samples to divide it.
            share = config["batch_size"] // hvd.size()
            whole = len(sampler.remaining_indices) // config["batch_size"]
            loader = DataLoader(train_set, batch_size=share, sampler=sampler)
            model.train()
            for batch, (x, y) in enumerate(islice(loader, whole)):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                sampler.record_batch(batch, share)
                state.total += float(hvd.allreduce(loss.detach(), name="loss"))
                state.batches += 1
                if (batch + 1) % 10 == 0:
                    state.commit()  # workers may join or leave here
            model.eval()
            with torch.no_grad():
                accuracy = (model(test_set.tensors[0]).argmax(1) == test_set.tensors[1]).float().mean().item()
            if hvd.rank() == 0:
                report({"accuracy": accuracy, "loss": state.total / state.batches, "workers": hvd.size()})
            state.epoch += 1
            state.total, state.batches = 0.0, 0
            sampler.set_epoch(state.epoch)
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, total=0.0, batches=0))


def trial(config):
    training(config, tune.report)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="train once, without a search: under horovodrun")
    parser.add_argument("--samples", type=int, default=8, help="trials")
    parser.add_argument("--epochs", type=int, default=9, help="epochs of one trial")
    parser.add_argument("--storage", default=None, help="where Tune keeps the results")
    args = parser.parse_args()
    if args.once:
        training({**ONCE, "epochs": args.epochs}, lambda metrics: print(metrics, flush=True))
        return
    tuner = tune.Tuner(
        trial,
        param_space={
            "lr": tune.loguniform(1e-3, 3e-1),
            "momentum": tune.uniform(0.5, 0.95),
            "width": tune.choice([24, 32, 48]),
            "batch_size": tune.choice([32, 64]),
            "epochs": args.epochs,
            "seed": 0,
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=args.samples,
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
        ),
        run_config=tune.RunConfig(name="digits_horovod", storage_path=args.storage),
    )
    best = tuner.fit().get_best_result()
    print(f"best accuracy {best.metrics['accuracy']:.4f} with {best.config}")


if __name__ == "__main__":
    main()

"""The loop of words_asha.py made elastic: the lines marked with # elastic are all that changed.

Run it either way:

    python examples/words_elastic.py             stock Ray Tune, one worker per trial
    fluidtune run examples/words_elastic.py      a trial that is moved or paused keeps its work
"""

import argparse
import math
import os
import pydoc_data.topics
import re
import tempfile
from collections import Counter

import torch
from ray import tune
from ray.tune import Checkpoint
from ray.tune.schedulers import ASHAScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic  # elastic

#: Number of words in the vocabulary; all other words count as one.
VOCABULARY = 2000


def words(text):
    if text:
        with open(text) as file:
            found = re.findall(r"\w+|[^\w\s]", file.read().lower())
    else:
        topics = pydoc_data.topics.topics
        found = re.findall(r"[a-z']+|[.,;:]", " ".join(topics[name] for name in sorted(topics)).lower())[:40_000]
    known = {word: number for number, (word, _) in enumerate(Counter(found).most_common(VOCABULARY - 1), start=1)}
    return torch.tensor([known.get(word, 0) for word in found])


def windows(numbers, length):
    """The words of each window, and for each word the next one."""
    count = (len(numbers) - 1) // length
    return TensorDataset(
        numbers[: count * length].reshape(count, length), numbers[1 : count * length + 1].reshape(count, length)
    )


class Network(nn.Module):
    def __init__(self, config):
        super().__init__()
        cell = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[config["cell"]]
        self.dropout = nn.Dropout(config["dropout"])
        self.embedding = nn.Embedding(VOCABULARY, config["embedding"])
        self.recurrent = cell(config["embedding"], config["hidden"], config["layers"], batch_first=True)
        self.decoder = nn.Linear(config["hidden"], VOCABULARY)

    def forward(self, x):
        return self.decoder(self.dropout(self.recurrent(self.dropout(self.embedding(x)))[0]))


def train(config):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = words(config["text"])
    held_back = len(numbers) // 10
    # Dropout uses the global random stream, which depends on the width. The data's order has a separate stream.
    order = torch.Generator().manual_seed(0)
    model = Network(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), config["lr"], weight_decay=config["weight_decay"])
    loader = DataLoader(
        windows(numbers[:-held_back], config["window"]), config["batch_size"], shuffle=True, generator=order
    )
    test = windows(numbers[-held_back:], config["window"])
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"), map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        order.set_state(state["order"].cpu())
        start = state["epoch"] + 1
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)  # elastic
    for epoch in elastic.epochs(start, config["epochs"]):  # elastic
        model.train()
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
            optimizer.step()
            n = len(x)
            total, count = total + loss.item() * n, count + n
        model.eval()
        missed, seen = 0.0, 0
        with torch.no_grad():
            for x, y in DataLoader(test, 64):
                found = nn.functional.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
                missed, seen = missed + found.item() * len(x), seen + len(x)
        with tempfile.TemporaryDirectory() as directory:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "order": order.get_state(),
                "epoch": epoch,
            }
            torch.save(state, os.path.join(directory, "state.pt"))
            perplexity = math.exp(min(50.0, missed / seen))
            tune.report(
                {"perplexity": perplexity, "loss": total / count},
                checkpoint=Checkpoint.from_directory(directory),
            )


def reached(trial, result):
    return result["perplexity"] <= 140


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=9, help="trials")
    parser.add_argument("--epochs", type=int, default=9, help="most epochs of one trial")
    parser.add_argument("--text", default=None, help="a text file")
    parser.add_argument("--storage", default=None, help="where Tune keeps the results")
    args = parser.parse_args()
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1, "gpu": int(torch.cuda.is_available())}),
        param_space={
            "cell": tune.choice(["rnn", "gru", "lstm"]),
            "layers": tune.choice([1, 2]),
            "embedding": tune.choice([200, 400, 650] if args.text else [32, 64]),
            "hidden": tune.choice([200, 400, 650] if args.text else [32, 64]),
            "lr": tune.loguniform(3e-4, 1e-2),
            "batch_size": tune.choice([16, 32]),
            "window": tune.choice([16, 35]),
            "dropout": tune.uniform(0.0, 0.5),
            "clip": tune.choice([0.25, 1.0, 5.0]),
            "weight_decay": tune.loguniform(1e-6, 1e-2),
            "epochs": args.epochs,
            "text": args.text and os.path.abspath(args.text),
        },
        tune_config=tune.TuneConfig(
            metric="perplexity",
            mode="min",
            num_samples=args.samples,
            scheduler=ASHAScheduler(max_t=args.epochs, grace_period=1, reduction_factor=3),
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
        ),
        run_config=tune.RunConfig(name="words_elastic", storage_path=args.storage, stop=reached),
    )
    best = tuner.fit().get_best_result()
    print(f"best perplexity {best.metrics['perplexity']:.1f} with {best.config}")


if __name__ == "__main__":
    main()

"""The loop of dcgan_pbt.py made elastic: the lines marked with # elastic are all that changed.

Run it either way:

    python examples/dcgan_elastic.py             stock Ray Tune, one worker per trial
    fluidtune run examples/dcgan_elastic.py      a trial that is moved or paused keeps its work
"""

import argparse
import os
import tempfile

import torch
from ray import tune
from ray.tune import Checkpoint
from ray.tune.schedulers import PopulationBasedTraining
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic  # elastic

#: Random numbers from which an image is generated, and number of images that are scored.
NOISE, SCORED = 32, 500


def generator(channels):
    """From noise to 8 x 8."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * channels, 2),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * channels, channels, 4, stride=2, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.ConvTranspose2d(channels, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )


def discriminator(channels):
    """From 8 x 8 to one number: real or made up."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * channels, 1, 2),
        nn.Flatten(0),
    )


def inception_score(classifier, images):
    """The inception score: exp of the mean divergence of an image's class probabilities from those of all images."""
    each = torch.tensor(classifier.predict_proba(images.flatten(1).numpy())).clamp_min(1e-12)
    return (each * (each / each.mean(0)).log()).sum(1).mean().exp().item()


def train(config):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pixels, labels = load_digits(return_X_y=True)
    classifier = LogisticRegression(max_iter=200).fit(pixels / 16, labels)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    maker, judge = generator(config["channels"]).to(device), discriminator(config["channels"]).to(device)
    made_by = torch.optim.Adam(maker.parameters(), config["maker_lr"], betas=(0.5, 0.999))
    judged_by = torch.optim.Adam(judge.parameters(), config["judge_lr"], betas=(0.5, 0.999))
    # Noise comes from the global random stream, which depends on the width. The data's order has a separate stream.
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True, generator=order)
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"), map_location=device)
        for part, saved in zip((maker, judge, made_by, judged_by), state["parts"], strict=True):
            part.load_state_dict(saved)
        torch.set_rng_state(state["rng"].cpu())
        order.set_state(state["order"].cpu())
        # A checkpoint from another trial of the population has networks and optimizers. The learning rates stay ours.
        for optimizer, lr in ((made_by, config["maker_lr"]), (judged_by, config["judge_lr"])):
            optimizer.param_groups[0]["lr"] = lr
        start = state["epoch"] + 1
    maker, judge, made_by, judged_by, loader = elastic.prepare(maker, judge, made_by, judged_by, loader)  # elastic
    loss_of = nn.functional.binary_cross_entropy_with_logits
    for epoch in elastic.epochs(start, config["epochs"]):  # elastic
        maker.train()
        total, count = 0.0, 0
        for (real,) in loader:
            n, real = len(real), real.to(device)
            made = maker(torch.randn(n, NOISE, 1, 1, device=device))
            judged_by.zero_grad()
            real_loss = loss_of(judge(real), torch.ones(n, device=device))
            (real_loss + loss_of(judge(made.detach()), torch.zeros(n, device=device))).backward()
            judged_by.step()
            made_by.zero_grad()
            loss = loss_of(judge(made), torch.ones(n, device=device))
            loss.backward()
            made_by.step()
            n = len(real)
            total, count = total + loss.item() * n, count + n
        maker.eval()
        with torch.no_grad():
            noise = torch.randn(SCORED, NOISE, 1, 1, generator=torch.Generator().manual_seed(1))
            score = inception_score(classifier, maker(noise.to(device)).cpu())
        with tempfile.TemporaryDirectory() as directory:
            state = {
                "parts": [part.state_dict() for part in (maker, judge, made_by, judged_by)],
                "rng": torch.get_rng_state(),
                "order": order.get_state(),
                "epoch": epoch,
            }
            torch.save(state, os.path.join(directory, "state.pt"))
            tune.report(
                {"score": score, "loss": total / count},
                checkpoint=Checkpoint.from_directory(directory),
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4, help="trials, the population")
    parser.add_argument("--epochs", type=int, default=12, help="epochs of one trial")
    parser.add_argument("--channels", type=int, default=16, help="of the networks' first layer")
    parser.add_argument("--storage", default=None, help="where Tune keeps the results")
    args = parser.parse_args()
    rates = {"maker_lr": tune.loguniform(1e-4, 1e-2), "judge_lr": tune.loguniform(1e-4, 1e-2)}
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1, "gpu": int(torch.cuda.is_available())}),
        param_space={**rates, "channels": args.channels, "epochs": args.epochs},
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            num_samples=args.samples,
            scheduler=PopulationBasedTraining(
                "training_iteration",
                perturbation_interval=max(1, args.epochs // 3),
                hyperparam_mutations=rates,
                synch=True,
            ),
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
        ),
        run_config=tune.RunConfig(name="dcgan_elastic", storage_path=args.storage, stop={"score": 5.2}),
    )
    best = tuner.fit().get_best_result()
    print(f"best inception score {best.metrics['score']:.2f} with {best.config}")


if __name__ == "__main__":
    main()

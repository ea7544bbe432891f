"""Before a trial grows, one step is computed whole and divided: what the contract does not cover is found."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fluidtune import elastic
from fluidtune.elastic.checks import rehearsal
from fluidtune.elastic.checks.rehearsal import rehearse
from fluidtune.elastic.data import precision
from fluidtune.elastic.data.precision import Precision

from .groups import in_session

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(7)


class Samples(Dataset):
    """26 samples of four numbers and a class, most of them of class 0; each read draws a random number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(26, 4, generator=generator)
        self.y = (self.x.sum(1) > 1).long() + (self.x[:, 0] > 1).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.rand(4) + 0.1 * random.random(), self.y[index]


def model_of(*more):
    return nn.Sequential(nn.Linear(4, 8), *more, nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))


def loop(loss, *more, norm=False, by_hand=False, dataset=None):
    """A trial: ``loss(model, x, y)``; ``more`` is done with the model after `prepare`."""

    def trial():
        model = model_of(*([nn.BatchNorm1d(8)] if norm else []))
        loader = DataLoader(dataset or Samples(), batch_size=9, shuffle=True)
        if by_hand:
            model, loader = elastic.prepare(model, loader)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            model, optimizer, loader = elastic.prepare(model, optimizer, loader)
        for change in more:
            change(model)
        for _ in elastic.epochs(0, 3):
            for x, y in loader:
                if by_hand:
                    gradients = torch.autograd.grad(loss(model, x, y), list(model.parameters()))
                    with torch.no_grad():
                        for p, g in zip(model.parameters(), gradients, strict=True):
                            p -= 0.1 * g
                    continue
                optimizer.zero_grad()
                loss(model, x, y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

    return trial


def mean(model, x, y):
    return F.cross_entropy(model(x), y)


def functional_dropout(model, x, y):
    return F.cross_entropy(model(F.dropout(x, 0.5)), y)


def penalised(model, x, y):
    x = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return F.cross_entropy(model(x), y) + slope.square().sum(1).mean()


def same_noise(model, x, y):
    """Draws for the batch, not for its samples."""
    return F.cross_entropy(model(x + numpy.random.rand()), y)


def in_half(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(x).float(), y)


def accumulated():
    model, loader = elastic.prepare(model_of(), DataLoader(Samples(), batch_size=5))
    optimizer = elastic.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in elastic.epochs(0, 2):
        for x, y in loader:
            mean(model, x, y).backward()
        if epoch == 1:
            optimizer.step()


def take_steps(model, optimizer, batches, loss=mean):
    for x, y in batches:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()


class Steps:
    """A class trainable, as its host runs it."""

    def __init__(self) -> None:
        self.trial = model_of(nn.BatchNorm1d(8))
        self.optimizer = torch.optim.SGD(self.trial.parameters(), lr=0.1)
        self.loader = elastic.prepare(self.trial, self.optimizer, DataLoader(Samples(), batch_size=9))[-1]

    def run(self, loss=mean):
        while True:
            elastic.current().boundary()
            take_steps(self.trial, self.optimizer, self.loader, loss)


WITHIN = {
    "mean": loop(mean),
    "batch norm": loop(mean, norm=True),
    "dropout": loop(functional_dropout),
    "penalty": loop(penalised),
    "noise of the batch": loop(same_noise),
    "half precision": loop(in_half, norm=True),
    "accumulated": accumulated,
    "class": lambda: Steps().run(),
}


@pytest.mark.parametrize("trial", WITHIN.values(), ids=WITHIN)
def test_a_loop_within_the_contract_passes(trial):
    for _ in range(3):  # with other weights each time
        assert rehearse(trial).kind == "same"
        torch.rand(1)


def weighted(model, x, y):
    return F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 5.0, 9.0]))


def ignoring(model, x, y):
    return F.cross_entropy(model(x), y, ignore_index=0)


def tokens(model, x, y):
    mask = x > 0
    return (model(x)[:, :1].expand(-1, 4).square() * mask).sum() / mask.sum()


def contrastive(model, x, y):
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(x)))


def summed(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


def replace_layer(model):
    model[-1] = nn.Linear(8, 3)


def clip_locally(model):
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def new_layer():
    model = model_of()
    loader = elastic.prepare(model, DataLoader(Samples(), batch_size=9))[1]
    replace_layer(model)
    optimizer = elastic.prepare(torch.optim.SGD(model[0].parameters(), lr=0.1))
    optimizer.add_param_group({"params": model[-1].parameters()})
    for _ in elastic.epochs(0, 2):
        take_steps(model, optimizer, loader)


def step_in_backward():
    """As in the tutorial that fuses the optimizer's step into the backward pass."""
    model = model_of()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    model, loader = elastic.prepare(model, DataLoader(Samples(), batch_size=9))
    for _ in elastic.epochs(0, 2):
        for x, y in loader:
            mean(model, x, y).backward()


def fetching_ahead():
    model, loader = elastic.prepare(model_of(), DataLoader(Samples(), batch_size=15))
    optimizer = elastic.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in elastic.epochs(0, 2):
        take_steps(model, optimizer, list(loader))


def leaving_short_shares_out():
    model, loader = elastic.prepare(model_of(), DataLoader(Samples(), batch_size=9))
    optimizer = elastic.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in elastic.epochs(0, 2):
        for x, y in loader:
            if len(x) == 4:
                continue
            mean(model, x, y).backward()
            optimizer.step()


BEYOND = {
    "class weights": (loop(weighted), "gradient of"),
    "ignored index": (loop(ignoring), "gradient of"),
    "tokens": (loop(tokens), "gradient of"),
    "contrastive": (loop(contrastive), "gradient of"),
    "sum": (loop(summed), "gradient of"),
    "by hand": (loop(mean, by_hand=True), "gradient of"),
    "local hook": (loop(mean, clip_locally), "gradient of"),
    "step in backward": (step_in_backward, "off by"),
    "class": (lambda: Steps().run(weighted), "gradient of"),
    "new layer": (new_layer, "gradient of"),
    "ahead": (fetching_ahead, "drop_last=True"),
    "short shares": (leaving_short_shares_out, "different things at once"),
}


@pytest.mark.parametrize(("trial", "says"), BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("seed", [0, 3])
def test_what_the_contract_does_not_cover_is_found(trial, says, seed):
    torch.manual_seed(seed)
    verdict = rehearse(trial)
    assert verdict.kind == "differs", verdict
    assert says in verdict.reason
    assert "\n" not in verdict.reason


def mean_of_positives(model, x, y):
    return ((model(x) - y).square() * y).sum() / y.sum().clamp(min=1)


def evenly_divided_at_first():
    """Five batches of which each half has two positives, and a sixth with four in its first half."""
    even, uneven = [1.0, 0.0] * 4, [1.0] * 4 + [0.0] * 4
    y = torch.tensor(even * 5 + uneven).reshape(-1, 1)
    x = torch.randn(len(y), 4)
    model, loader = elastic.prepare(nn.Linear(4, 1), DataLoader(TensorDataset(x, y), batch_size=8))
    optimizer = elastic.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in elastic.epochs(0, 2):
        take_steps(model, optimizer, loader, mean_of_positives)


def test_samples_that_happen_to_divide_evenly_do_not_hide_an_error(monkeypatch):
    assert rehearse(evenly_divided_at_first).kind == "differs"
    # Where steps are long, only three are compared.
    monkeypatch.setattr(rehearsal, "_SECONDS", 0.0)
    assert rehearse(evenly_divided_at_first).kind == "same"


def summed_last(last):
    """A trial whose optimizer computes its gradients by a closure; its ``last``-th loss is a sum."""
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(80, 4), torch.randn(80, 1)), batch_size=8)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for _ in elastic.epochs(0, 2):
        for number, (x, y) in enumerate(loader, start=1):

            def closure(x=x, y=y, reduction="sum" if number == last else "mean"):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y, reduction=reduction)
                loss.backward()
                return loss

            optimizer.step(closure)


def test_the_gradients_of_each_step_with_a_closure_are_compared(monkeypatch):
    monkeypatch.setattr(rehearsal, "_SECONDS", 60.0)
    for last in range(1, rehearsal._MOST_STEPS + 1):
        assert rehearse(lambda last=last: summed_last(last)).kind == "differs", last
    assert rehearse(lambda: summed_last(0)).kind == "same"


def noisy(model, x, y):
    return F.cross_entropy(model(x + torch.randn_like(x)), y)


def noisy_sum(model, x, y):
    return F.cross_entropy(model(x + torch.randn_like(x)), y, reduction="sum")


def noisy_otherwise(model, x, y):
    return F.cross_entropy(model(x + torch.tensor(numpy.random.rand(*x.shape), dtype=x.dtype)), y)


def undivided():
    model = elastic.prepare(model_of())
    for _ in elastic.epochs(0, 2):
        for x, y in DataLoader(Samples(), batch_size=9):
            mean(model, x, y).backward()


def test_a_loop_that_draws_for_each_sample_is_compared_by_draws_that_are_the_same_for_all():
    assert rehearse(loop(noisy)).kind == "same"
    assert rehearse(loop(noisy_sum)).kind == "differs"


class Scaled(DataLoader):
    def __iter__(self):
        return ((100 * x, y) for x, y in super().__iter__())


class Doubled(DataLoader):
    def _get_iterator(self):
        return ((2 * x, y) for x, y in super()._get_iterator())


@pytest.mark.parametrize("kind", [Scaled, Doubled])
def test_a_loader_with_an_iterator_of_its_own_is_read_by_one_worker(kind):
    model, loader = model_of(), kind(TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long)), batch_size=4)

    def trial():
        prepared, optimizer, batches = elastic.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for _ in elastic.epochs(0, 2):
            take_steps(prepared, optimizer, batches)
        return batches

    with in_session() as session:
        assert torch.equal(next(iter(trial()))[0], next(iter(loader))[0])
        assert f"the prepared {kind.__name__} has an iterator of its own" in str(session.facts().ungrowable)
    verdict = rehearse(trial)
    assert verdict.kind == "differs" and "an iterator of its own" in verdict.reason


def test_a_loop_without_a_prepared_loader_gains_nothing_by_a_second_worker():
    verdict = rehearse(undivided)
    assert verdict.kind == "differs" and "no DataLoader" in verdict.reason


def test_what_cannot_be_known_is_said_and_a_loop_is_not_divided_in_doubt():
    in_doubt = rehearse(loop(noisy_otherwise))
    assert in_doubt.kind == "differs" and "random numbers" in in_doubt.reason
    assert rehearse(lambda: 1 / 0).kind == "unknown"
    assert rehearse(lambda: None).kind == "unknown"


def test_nothing_is_left_of_it():
    torch.manual_seed(5)
    random.seed(5)
    before, functions = torch.get_rng_state(), (F.dropout, F.batch_norm, torch.autograd.is_multithreading_enabled())
    rehearse(loop(mean, norm=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert (F.dropout, F.batch_norm, torch.autograd.is_multithreading_enabled()) == functions
    assert random.random() == random.Random(5).random()
    assert elastic.current() is None


def test_the_trials_code_is_no_leader_there():
    seen = []

    def trial():
        seen.append(elastic.current().leader)
        loop(mean)()

    rehearse(trial)
    assert seen == [False] * 3


@pytest.mark.parametrize("own", [False, True])
def test_a_loop_finds_the_batch_size_that_it_has_given(own):
    given = {"batch_sampler": [[0, 1], [2, 3]]} if own else {"batch_size": 5, "drop_last": True}
    found = set()

    def trial():
        model = model_of()
        model, optimizer, loader = elastic.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Samples(), **given)
        )
        for _ in elastic.epochs(0, 3):
            for x, _ in loader:
                found.add((loader.batch_size, loader.drop_last))
                model(x).square().mean().backward()
                optimizer.step()

    assert rehearse(trial).kind == "same"
    assert found == {(None, False) if own else (5, True)}


def test_the_seed_with_which_cuda_is_to_start_stays():
    # docs/bugs.md, 325
    before = torch.cuda._lazy_seed_tracker.get_calls()
    assert rehearse(loop(mean)).kind == "same"
    assert torch.cuda._lazy_seed_tracker.get_calls() == before


def test_only_a_dataset_that_may_draw_is_seeded_for_each_sample(monkeypatch):
    # docs/bugs.md, 325
    seeds, drawing_from = [], rehearsal.drawing_from
    monkeypatch.setattr(rehearsal, "drawing_from", lambda seed: (seeds.append(seed), drawing_from(seed))[1])
    samples = Samples()
    assert rehearse(loop(mean, dataset=TensorDataset(samples.x, samples.y))).kind == "same"
    assert not seeds
    assert rehearse(loop(mean)).kind == "same"
    assert len(set(seeds)) == len(samples)


def with_cancelled(parts, slope=1.0):
    """A trial with a second optimizer whose gradient is 0 where ``parts`` are 0, but for rounding."""

    def trial():
        model, other = nn.Linear(4, 1), nn.Linear(4, 4)
        loader = DataLoader(Samples(), batch_size=9)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, other)]
        model, other, loader, *optimizers = elastic.prepare(model, other, loader, *optimizers)
        for _ in elastic.epochs(0, 3):
            for x, _y in loader:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                made = other(x)
                # Each row's softmax adds up to 1, so its mean has no slope.
                (model(x).square().mean() + made.softmax(1).mean() + parts * slope * made.square().sum()).backward()
                for optimizer in optimizers:
                    optimizer.step()

    return trial


def test_a_gradient_of_roundings_alone_is_none():
    # docs/bugs.md, 327
    assert rehearse(with_cancelled(0.0)).kind == "same"
    assert rehearse(with_cancelled(1.0)).kind == "differs", "a sum is no mean"
    assert rehearse(with_cancelled(1.0, slope=1e-4)).kind == "differs", "a small one is one, too"


@pytest.mark.parametrize(("alone", "divided", "kind"), [(math.nan, 1.0, "unknown"), (1.0, math.nan, "differs")])
@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_that_is_no_number_is_seen_wherever_it_is(first, alone, divided, kind):
    # docs/bugs.md, 328
    def record(value):
        values = [value, 1.0] if first else [1.0, value]
        return rehearsal._Record({(0, 0, f"p{i}"): torch.tensor([each]) for i, each in enumerate(values)}, streams={})

    assert rehearsal._compare(record(alone), record(divided), Precision(), torch.device("cpu")).kind == kind


@pytest.mark.parametrize(
    ("alone", "divided", "dtype", "kind"),
    [
        (2e-16, -1e-16, torch.float64, "same"),
        (2e-16, 1e-3, torch.float64, "differs"),
        (1e-3, 1.01e-3, torch.float32, "differs"),
        (1e-5, 2e-5, torch.float32, "differs"),
        (0.05, 0.1, torch.bfloat16, "differs"),
    ],
)
def test_a_small_optimizer_is_compared_with_its_own_size(alone, divided, dtype, kind):
    # docs/bugs.md, 327
    def record(value):
        gradients = {(0, 0, "large"): 1.0, (1, 0, "small"): value}
        return rehearsal._Record({key: torch.tensor([g], dtype=dtype) for key, g in gradients.items()}, streams={})

    assert rehearsal._compare(record(alone), record(divided), Precision(), torch.device("cpu")).kind == kind


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has it since 2.9")
@pytest.mark.parametrize("flag", ["fp32_precision", "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision"])
def test_a_precision_that_was_set_by_its_newer_name_stays(flag):
    # docs/bugs.md, 352: torch's older name cannot be read then
    run = "\n".join(
        [
            "import torch",
            "from fluidtune.elastic.checks import rehearsal",
            "from fluidtune.elastic.data import precision",
            "from fluidtune.torch_flags import flag, set_flag",
            "from tests.elastic.test_rehearsal import loop, mean",
            f"set_flag(torch.backends, {flag!r}, 'tf32')",
            "def flags():",
            "    return {each: flag(torch.backends, each) for of in precision.FLAGS.values() for each in of}",
            "before = flags()",
            "print(rehearsal.rehearse(loop(mean)).kind)",
            "print(before == flags(), before)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0] == "same" and done.stdout.splitlines()[1].startswith("True"), (
        done.stdout + done.stderr
    )


def test_the_precision_that_the_loop_itself_sets_is_that_of_the_comparison():
    """On a GPU TF32 rounds more than the comparison of float32 allows. Here the setting is seen, and not used."""
    asked = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert precision.spacing_of_float32(torch.device("cuda:0")) == 2.0**-10
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        assert {precision.spacing_of_float32(torch.device(each)) for each in ("cuda", "cpu")} == {0.0}
    finally:
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision(asked)

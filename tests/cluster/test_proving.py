"""A trial that goes on in another process: its commit is proved there, or it begins anew. No cluster runs here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune
from ray.tune import Trainable
from ray.tune.trainable import wrap_function

from fluidtune import elastic
from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.cluster.hosting.worker import Worker
from fluidtune.elastic import BeginsAnew
from fluidtune.group_facts import GroupFacts
from tests.cluster.test_worker import fresh, session_here, spec
from tests.contracts.processes import peer_processes

pytestmark = [pytest.mark.slow, pytest.mark.core]

LAST = 8


def prepared(config: dict[str, Any]) -> tuple[Any, ...]:
    """A model, its optimizer, and where the loop keeps its counter; None: in a variable of its own."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    elastic.prepare(model, optimizer)
    return model, optimizer, elastic.state(steps=0) if config["keeps"] else None


def stepped(model: Any, optimizer: Any, kept: Any, steps: int) -> float:
    """One step, whose rate follows the counter."""
    if kept is not None:
        kept.steps += 1
        steps = kept.steps
    loss = (model(torch.randn(4, 2)) * steps).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def trained(config: dict[str, Any]) -> None:
    parts, steps = prepared(config), 0
    for _ in elastic.epochs(0, LAST):
        steps += not config["keeps"]
        tune.report({"loss": stepped(*parts, steps), "epoch_time": float(os.getpid())})


class Trained(Trainable):
    """The same as a class."""

    def setup(self, config: dict[str, Any]) -> None:
        self.parts, self.steps = prepared(config), 0

    def step(self) -> dict[str, Any]:
        self.steps += not self.config["keeps"]
        return {"loss": stepped(*self.parts, self.steps), "done": self.iteration + 1 == LAST}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "steps").write_text(str(self.iteration))


KINDS = {"function": lambda: wrap_function(trained), "class": lambda: Trained}


def begin(folder: str, kind: str, keeps: bool, delivered: int) -> Worker:
    """A worker with the trial."""
    worker = fresh()
    assert isinstance(worker.load(KINDS[kind](), spec(folder, delivered, {"keeps": keeps})), GroupFacts)
    return worker


def replies(worker: Worker, count: int) -> list[IterationReply]:
    """Of so many iterations, with a commit at each boundary; fewer where the trial is over."""
    found: list[IterationReply] = []
    for _ in range(count):
        found.append(worker.train())
        if found[-1].anew is not None or "loss" not in found[-1].result:
            break
        store = session_here()._commits.store
        assert store is not None
        store._budget = 1e9
        store.flush()
    return found


def life(folder: str, kind: str, keeps: bool, delivered: int, count: int) -> list[dict[str, Any]]:
    """What a process of the trial answers to so many calls."""
    found = replies(begin(folder, kind, keeps, delivered), count)
    names = ("loss", "training_iteration", "iterations_since_restore")
    return [
        {name: each.result.get(name) for name in names} | {"anew": each.anew, "cannot": each.facts.cannot_commit}
        for each in found
    ]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_trial_reports_what_it_would_have(kind: str, keeps: bool, tmp_path: Path) -> None:
    def process(folder: str, delivered: int, count: int) -> list[dict[str, Any]]:
        with peer_processes(1) as (peer,):
            found = peer.call(life, str(tmp_path / folder), kind, keeps, delivered, count)
            peer.kill()
        return found

    expected = process("one", 0, LAST)
    first = process("two", 0, 5)
    second = process("two", 5, LAST - 5)
    if not keeps:
        [refused] = second
        assert refused["anew"].startswith("epoch 3 run again from its commit reports loss")
        assert "steps" in refused["anew"]
        first, second = [], process("two", 5, LAST)  # anew, and reported as under stock Tune
        assert second[-1]["cannot"] and refused["anew"].startswith(second[-1]["cannot"])
    assert [each["loss"] for each in first + second] == [each["loss"] for each in expected]
    assert [each["training_iteration"] for each in first + second] == list(range(1, LAST + 1))
    # Commit 4 is proved by iteration 4; iteration 5 was seen, 6 is new.
    assert second[0]["iterations_since_restore"] == (3 if keeps else 1)
    assert {each["anew"] for each in second} == {None}
    assert not keeps or all(each["cannot"] is None for each in second)


def first_process(folder: str, kind: str, keeps: bool, count: int) -> None:
    replies(begin(folder, kind, keeps, 0), count)


def saving_process(folder: str, kind: str, keeps: bool, delivered: int) -> tuple[str | None, Any]:
    """What is in a checkpoint that Tune wants first, and the number of the iteration that it hears of next."""
    worker = begin(folder, kind, keeps, delivered)
    try:
        kept = worker.save(os.path.join(folder, "kept")) if kind == "class" else worker.save()
    except BeginsAnew as error:
        return type(error).__name__, None
    steps = None if kept.checkpoint is None else Path(kept.checkpoint.path, "steps").read_text()
    [reply] = replies(worker, 1)
    return steps, reply.result["training_iteration"]


@pytest.mark.parametrize(
    ("kind", "keeps", "delivered", "expected"),
    [
        ("class", True, 5, ("5", 6)),  # commit 4 is proved by iteration 4, and 5 runs again
        ("class", True, 4, ("4", 5)),
        ("class", False, 5, ("BeginsAnew", None)),
        ("class", False, 4, ("BeginsAnew", None)),
        ("function", True, 5, (None, 6)),
        ("function", True, 4, (None, 5)),
    ],
)
def test_a_save_that_comes_first_has_what_tune_has_seen(kind, keeps, delivered, expected, tmp_path: Path) -> None:
    with peer_processes(2) as (first, second):
        first.call(first_process, str(tmp_path), kind, keeps, 5)
        first.kill()
        assert second.call(saving_process, str(tmp_path), kind, keeps, delivered) == expected

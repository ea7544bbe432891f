"""Trials of Hugging Face's Trainer at several widths: results, decisions and files are the Trainer's alone.

Needs Transformers and Accelerate: ``make test-frameworks``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fluidtune.elastic.checks.rehearsal import rehearse
from fluidtune.testing.processes import PeerProcess, peer_processes
from tests.elastic import trials
from tests.elastic.driving import Driver, run

pytestmark = [pytest.mark.transformers, pytest.mark.slow]

#: `transformers_trials.KINDS` and `REFUSED`, which are not imported where Transformers is not installed.
KINDS = ("padded", "clipped", "classes", "smoothed", "own loss", "by length", "best", "steps", "plateau")
REFUSED = ("stream", "finds its batch size", "integers")


@pytest.fixture(scope="module")
def pool() -> Iterator[list[PeerProcess]]:
    with peer_processes(3) as processes:
        yield processes


def same(got: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 1e-5) -> None:
    """All values of all reports are equal, as far as sums in another order let them."""
    assert len(got) == len(expected)
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=rel), f"{name} of report {number}"


def alone(kind: str, folder: Path, **config: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """What a Trainer that was not prepared gives in this process."""
    from . import transformers_trials

    told = {"kind": kind, "folder": str(folder / "alone"), "stock": True, **config}
    return trials.plain(transformers_trials.trial, told)


def test_the_kinds_are_those_of_the_trials() -> None:
    from . import transformers_trials

    assert tuple(transformers_trials.KINDS) == KINDS and tuple(transformers_trials.REFUSED) == REFUSED


def test_what_is_used_of_the_trainer_is_there(tmp_path: Path) -> None:
    """The methods that are replaced, and the attributes of its loop that it does not publish."""
    from transformers import Trainer

    from fluidtune.integrations.transformers import elastic_trainer, trainer_progress

    from . import transformers_trials

    assert all(callable(getattr(Trainer, name)) for name in elastic_trainer.METHODS)
    trainer = transformers_trials.made({"kind": "padded", "folder": str(tmp_path), "stop": 1}, lambda _: None)
    trainer.train()
    assert set(trainer_progress.LOOP_VALUES) <= vars(trainer).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_of_one_worker_is_the_trainer_alone(kind: str, tmp_path: Path, one_thread: None) -> None:
    """Outside a session: under stock Ray Tune and in plain Python."""
    from . import transformers_trials

    expected, ending = alone(kind, tmp_path)
    reports, ours = trials.plain(transformers_trials.trial, {"kind": kind, "folder": str(tmp_path / "ours")})
    assert reports == expected
    assert ours["files"] == ending["files"] and ours["log"] == ending["log"] and ours["flos"] == ending["flos"]


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2), (1, 2, 1), (3, 2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_decisions_do_not_depend_on_the_width(
    pool: list[PeerProcess], kind: str, widths: tuple[int, ...], tmp_path: Path
) -> None:
    from . import transformers_trials

    expected, ending = alone(kind, tmp_path)
    config = {"kind": kind, "folder": str(tmp_path / "ours")}
    reports, endings = run(pool, transformers_trials.trial, config, widths[: len(expected) - 1])
    same(reports, expected, rel=0 if set(widths) == {1} else 1e-5)
    for ours in endings:
        assert ours["step"] == ending["step"] and ours["epoch"] == ending["epoch"]
        assert ours["best"] == pytest.approx(ending["best"], rel=1e-5)
    for name, value in ending["weights"].items():
        assert torch.allclose(endings[0]["weights"][name], value, rtol=1e-3, atol=1e-3), name
    assert endings[0]["loss"] == pytest.approx(ending["loss"], rel=1e-5)
    assert endings[0]["flos"] == pytest.approx(ending["flos"], rel=0.1)
    assert endings[0]["log"] == ending["log"]
    assert endings[0]["files"] == ending["files"]
    assert all(ours["files"] == [] for ours in endings[1:]), "a follower has written a file"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_divided_stays_a_plain_trial_and_says_why(
    pool: list[PeerProcess], kind: str, tmp_path: Path
) -> None:
    from . import transformers_trials

    expected, _ = alone(kind, tmp_path)
    config = {"kind": kind, "folder": str(tmp_path / "ours"), "free": True}
    pool[0].call(trials.start, transformers_trials.trial, config, True, "w0")
    assert pool[0].call(trials.outcome)[0] == "returned"
    assert transformers_trials.REFUSED[kind][1] in pool[0].call(trials.refused)[1]
    same(pool[0].call(trials.reports), expected, rel=1e-6)


def test_an_optimizer_that_steps_early_keeps_one_worker(tmp_path: Path) -> None:
    from fluidtune.integrations.transformers.elastic_trainer import plain_because

    from . import transformers_trials

    config = {"kind": "padded", "folder": str(tmp_path)}
    assert plain_because(transformers_trials.made(config, print)) is None
    why = plain_because(transformers_trials.made({**config, "told": {"optim": "adalomo"}}, print))
    assert why == "the optimizer adalomo takes its steps during the backward pass"


def test_a_second_training_is_a_second_loop(pool: list[PeerProcess], tmp_path: Path) -> None:
    from . import transformers_trials

    config = {"kind": "padded", "folder": str(tmp_path), "stop": 2, "trainings": 2}
    expected, ending = alone("padded", tmp_path, stop=2, trainings=2)
    reports, endings = run(pool, transformers_trials.trial, config, (2, 1, 2))
    same(reports, expected)
    assert [ours["loss"] for ours in endings] == pytest.approx([ending["loss"]] * 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["padded", "clipped", "classes", "smoothed", "own loss"])
def test_a_rehearsal_finds_that_a_trial_can_be_divided(kind: str, tmp_path: Path, one_thread: None) -> None:
    from . import transformers_trials

    found = rehearse(lambda: transformers_trials.trial({"kind": kind, "folder": str(tmp_path)}, lambda _: None))
    assert found.kind == "same", found
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_rehearsal_finds_a_mean_over_the_tokens_of_a_part(tmp_path: Path, one_thread: None) -> None:
    """Of a Trainer whose `compute_loss` leaves the number of items out, where texts have several lengths."""
    from . import transformers_trials

    config = {"kind": "padded", "folder": str(tmp_path), "mean": True}
    found = rehearse(lambda: transformers_trials.trial(config, lambda _: None))
    assert found.kind == "differs" and "gradient of" in str(found), found


@pytest.mark.parametrize("stopped", [1, 3])
@pytest.mark.parametrize("kind", ["padded", "clipped", "steps"])
def test_a_trial_goes_on_from_its_commit(pool: list[PeerProcess], kind: str, stopped: int, tmp_path: Path) -> None:
    from . import transformers_trials

    expected, ending = alone(kind, tmp_path)
    stopped = min(stopped, len(expected) - 1)
    config = {"kind": kind, "folder": str(tmp_path / "ours"), "commits": str(tmp_path / "commits")}
    driver = Driver(pool, transformers_trials.trial, config)
    for turn in range(1, stopped + 1):
        driver.turn(turn)
        if turn == 1:
            driver.resize(2)
        if turn == stopped:
            pool[0].call(trials.leave)
        pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome)[0] == "left"
    reports, endings = run(pool, transformers_trials.trial, config, (2,) * (len(expected) - stopped - 1))
    same(reports, expected[stopped:])
    assert all(ours["step"] == ending["step"] for ours in endings)
    assert endings[0]["loss"] == pytest.approx(ending["loss"], rel=1e-5)


@pytest.mark.parametrize("saved", ["checkpoint-7", "checkpoint-10"])
def test_a_trial_that_resumes_from_a_checkpoint_grows(pool: list[PeerProcess], saved: str, tmp_path: Path) -> None:
    """After an epoch, and amid one."""
    from . import transformers_trials

    told = {"save_strategy": "steps", "save_steps": 1}
    alone("padded", tmp_path, told=told)
    resume = {"saved": str(tmp_path / "alone" / saved)}
    expected, ending = alone("padded", tmp_path, **resume)
    config = {"kind": "padded", "folder": str(tmp_path / "ours"), **resume}
    reports, endings = run(pool, transformers_trials.trial, config, (2, 2))
    same(reports, expected)
    assert [ours["step"] for ours in endings] == [ending["step"]] * 2


def test_a_worker_that_dies_is_no_error_of_the_script(pool: list[PeerProcess], tmp_path: Path) -> None:
    from . import transformers_trials

    config = {"kind": "padded", "folder": str(tmp_path), "stop": 6}
    with peer_processes(2) as workers:
        driver = Driver(workers, transformers_trials.trial, config)
        driver.turn(1)
        driver.resize(2)
        workers[0].call(trials.allow)
        driver.turn(2)
        workers[1].kill()
        workers[0].call(trials.allow, 6)
        assert workers[0].call(trials.outcome)[0] == "lost"

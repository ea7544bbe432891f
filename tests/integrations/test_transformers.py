"""Trials of Hugging Face's Trainer at several widths: results, decisions and files are the Trainer's alone.

Needs Transformers and Accelerate: ``make test-frameworks``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.processes import PeerProcess

from .at_widths import WIDTHS, AtWidths, same, same_weights

pytestmark = [pytest.mark.transformers, pytest.mark.slow]

#: `transformers_trials.KINDS` and `REFUSED`, which are not imported where Transformers is not installed.
KINDS = ("padded", "clipped", "classes", "smoothed", "own loss", "by length", "best", "steps", "plateau")
REFUSED = ("stream", "no length", "finds its batch size", "integers")


TRIALS = AtWidths("transformers_trials")


def test_the_kinds_are_those_of_the_trials() -> None:
    TRIALS.assert_kinds(KINDS, REFUSED)


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
    expected, ending = TRIALS.alone(kind, tmp_path)
    reports, ours = TRIALS.plain(kind, tmp_path / "ours")
    assert reports == expected
    assert ours["files"] == ending["files"] and ours["log"] == ending["log"] and ours["flos"] == ending["flos"]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_decisions_do_not_depend_on_the_width(
    pool: list[PeerProcess], kind: str, widths: tuple[int, ...], tmp_path: Path
) -> None:
    expected, ending = TRIALS.alone(kind, tmp_path)
    reports, endings = TRIALS.run(pool, kind, tmp_path, widths[: len(expected) - 1])
    same(reports, expected, rel=0 if set(widths) == {1} else 1e-5)
    for ours in endings:
        assert ours["step"] == ending["step"] and ours["epoch"] == ending["epoch"]
        assert ours["best"] == pytest.approx(ending["best"], rel=1e-5)
    same_weights(endings[0], ending, 1e-3)
    assert endings[0]["loss"] == pytest.approx(ending["loss"], rel=1e-5)
    assert endings[0]["flos"] == pytest.approx(ending["flos"], rel=0.1)
    assert endings[0]["log"] == ending["log"]
    assert endings[0]["files"] == ending["files"]
    assert all(ours["files"] == [] for ours in endings[1:]), "a follower has written a file"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_divided_stays_a_plain_trial_and_says_why(
    pool: list[PeerProcess], kind: str, tmp_path: Path
) -> None:
    TRIALS.refused(pool, kind, tmp_path)


@pytest.mark.parametrize(
    ("told", "changed", "why"),
    [
        ({"optim": "adalomo"}, {}, "the optimizer adalomo takes its steps during the backward pass"),
        ({"torch_compile": True}, {}, "torch_compile makes a step"),
        ({}, {"accelerator.distributed_type": "DEEPSPEED"}, "in its own way over processes or devices (DEEPSPEED)"),
        ({}, {"accelerator.distributed_type": "FSDP"}, "in its own way over processes or devices (FSDP)"),
        ({}, {"accelerator.num_processes": 2}, "in its own way over processes or devices"),
        ({}, {"is_model_parallel": True}, "the model is divided itself"),
    ],
)
def test_a_trainer_that_divides_in_its_own_way_keeps_one_worker(
    told: dict[str, Any], changed: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a Trainer says of itself where DeepSpeed or several processes are: neither is there in this test."""
    from accelerate.utils import DistributedType

    from fluidtune.integrations.transformers.elastic_trainer import plain_because

    from . import transformers_trials

    config = {"kind": "padded", "folder": str(tmp_path)}
    assert plain_because(transformers_trials.made(config, print)) is None
    trainer = transformers_trials.made({**config, "told": told}, print)
    for name, value in changed.items():
        *owner, attribute = name.split(".")
        of = type(trainer.accelerator) if owner else trainer
        monkeypatch.setattr(of, attribute, getattr(DistributedType, value) if isinstance(value, str) else value)
    assert why in str(plain_because(trainer))


def test_a_second_training_is_a_second_loop(pool: list[PeerProcess], tmp_path: Path) -> None:
    told = {"stop": 2, "trainings": 2}
    expected, ending = TRIALS.alone("padded", tmp_path, **told)
    reports, endings = TRIALS.run(pool, "padded", tmp_path, (2, 1, 2), **told)
    same(reports, expected)
    assert [ours["loss"] for ours in endings] == pytest.approx([ending["loss"]] * 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["padded", "clipped", "classes", "smoothed", "own loss"])
def test_a_rehearsal_finds_that_a_trial_can_be_divided(kind: str, tmp_path: Path, one_thread: None) -> None:
    found = TRIALS.rehearsed(kind, tmp_path)
    assert found.kind == "same", found


def test_a_rehearsal_finds_a_mean_over_the_tokens_of_a_part(tmp_path: Path, one_thread: None) -> None:
    """Of a Trainer whose `compute_loss` leaves the number of items out, where texts have several lengths."""
    found = TRIALS.rehearsed("padded", tmp_path, mean=True)
    assert found.kind == "differs" and "gradient of" in str(found), found


@pytest.mark.parametrize("stopped", [1, 3])
@pytest.mark.parametrize("kind", ["padded", "clipped", "steps"])
def test_a_trial_goes_on_from_its_commit(pool: list[PeerProcess], kind: str, stopped: int, tmp_path: Path) -> None:
    ending, *endings = TRIALS.goes_on(pool, kind, tmp_path, stopped)
    assert all(ours["step"] == ending["step"] for ours in endings)
    assert endings[0]["loss"] == pytest.approx(ending["loss"], rel=1e-5)


@pytest.mark.parametrize("saved", ["checkpoint-7", "checkpoint-10"])
def test_a_trial_that_resumes_from_a_checkpoint_grows(pool: list[PeerProcess], saved: str, tmp_path: Path) -> None:
    """After an epoch, and amid one."""
    TRIALS.alone("padded", tmp_path, told={"save_strategy": "steps", "save_steps": 1})
    resume = {"saved": str(tmp_path / "alone" / saved)}
    expected, ending = TRIALS.alone("padded", tmp_path, **resume)
    reports, endings = TRIALS.run(pool, "padded", tmp_path, (2, 2), **resume)
    same(reports, expected)
    assert [ours["step"] for ours in endings] == [ending["step"]] * 2


def test_a_worker_that_dies_is_no_error_of_the_script(tmp_path: Path) -> None:
    TRIALS.loses_a_worker("padded", tmp_path)

"""Lightning trials at several widths: results, decisions and files are Lightning's alone, or a line says why not.

Needs Lightning: ``make test-frameworks``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.processes import PeerProcess
from tests.elastic import trials
from tests.elastic.driving import run

from .at_widths import WIDTHS, AtWidths, same, same_weights

pytestmark = [pytest.mark.lightning, pytest.mark.slow]

#: `lightning_trials.KINDS` and `REFUSED`, which are not imported where Lightning is not installed.
KINDS = ("plain", "batch norm", "double", "stopping", "two optimizers", "two loaders", "data module", "processes")
REFUSED = ("stream", "iterable", "sparse", "metric", "averaged", "reloaded", "counted otherwise")


TRIALS = AtWidths("lightning_trials")


def test_the_kinds_are_those_of_the_trials() -> None:
    TRIALS.assert_kinds(KINDS, REFUSED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_of_one_worker_is_lightning_alone(kind: str, tmp_path: Path, one_thread: None) -> None:
    """Outside a session: under stock Ray Tune and in plain Python."""
    expected, ending = TRIALS.alone(kind, tmp_path)
    reports, ours = TRIALS.plain(kind, tmp_path / "ours")
    assert reports == expected
    assert ours["files"] == ending["files"] and ours["log"] == ending["log"]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_decisions_do_not_depend_on_the_width(
    pool: list[PeerProcess], kind: str, widths: tuple[int, ...], tmp_path: Path
) -> None:
    expected, ending = TRIALS.alone(kind, tmp_path)
    reports, endings = TRIALS.run(pool, kind, tmp_path, widths[: len(expected) - 1])
    same(reports, expected)
    assert endings[0]["widths"] == [1, *widths][: len(expected)]
    for ours in endings:
        assert ours["epochs"] == ending["epochs"] and ours["best"] == ending["best"]
        same_weights(ours, ending)
    assert endings[0]["files"] == ending["files"]
    rows = [line.count(",") for line in endings[0]["log"].splitlines()]
    assert rows == [line.count(",") for line in ending["log"].splitlines()]
    assert all(ours["files"] == [] for ours in endings[1:]), "a follower has written a file"


def test_mixed_precision_rounds_otherwise_and_is_divided(pool: list[PeerProcess], tmp_path: Path) -> None:
    expected, _ = TRIALS.alone("mixed", tmp_path)
    reports, endings = TRIALS.run(pool, "mixed", tmp_path, (2, 1, 2))
    same(reports, expected, rel=0.02)
    assert endings[0]["widths"] == [1, 2, 1, 2]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_divided_stays_a_plain_trial_and_says_why(
    pool: list[PeerProcess], kind: str, tmp_path: Path
) -> None:
    TRIALS.refused(pool, kind, tmp_path)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"devices": 2}, "the Trainer has 2 devices on 1 nodes: give it devices=1"),
        ({"plugins": "FSDPPrecision"}, "FSDPPrecision is for models that are divided themselves"),
        ({"plugins": "DeepSpeedPrecision"}, "DeepSpeedPrecision is for models that are divided themselves"),
        ({"callbacks": "LearningRateFinder"}, "LearningRateFinder changes what the Trainer trains with"),
    ],
)
def test_a_trainer_that_divides_in_its_own_way_keeps_one_worker(told: dict[str, Any], why: str) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch import callbacks, plugins

    from fluidtune.integrations.lightning import ElasticStrategy
    from fluidtune.integrations.lightning.elastic_strategy import plain_because

    from . import lightning_trials

    made = {
        "plugins": lambda name: [getattr(plugins, name)("bf16-mixed")],
        "callbacks": lambda name: [getattr(callbacks, name)()],
        "devices": int,
    }
    told = {"devices": 1, **{key: made[key](value) for key, value in told.items()}}
    trainer = pl.Trainer(accelerator="cpu", strategy=ElasticStrategy(), logger=False, **told)
    module = lightning_trials.Module("plain")
    module.trainer = trainer
    trainer.strategy.connect(module)
    assert why in str(plain_because(trainer))


def test_a_second_fit_is_a_second_loop(pool: list[PeerProcess]) -> None:
    from . import lightning_trials

    expected, ending = trials.plain(lightning_trials.two_fits, {"stock": True})
    reports, endings = run(pool, lightning_trials.two_fits, {}, (2, 1, 2))
    same(reports, expected)
    assert [ours["tested"] for ours in endings] == pytest.approx([ending["tested"]] * 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["plain", "batch norm", "two optimizers"])
def test_a_rehearsal_finds_that_a_trial_can_be_divided(kind: str, tmp_path: Path, one_thread: None) -> None:
    found = TRIALS.rehearsed(kind, tmp_path)
    assert found.kind == "same", found


def test_a_rehearsal_finds_a_loss_that_cannot_be_divided(tmp_path: Path, one_thread: None) -> None:
    """Clipping makes its gradients look alike."""
    found = TRIALS.rehearsed("summed", tmp_path)
    assert found.kind == "differs" and "off by" in found.reason


@pytest.mark.parametrize("stopped", [1, 3])
def test_a_trial_goes_on_from_its_commit(pool: list[PeerProcess], stopped: int, tmp_path: Path) -> None:
    ending, *endings = TRIALS.goes_on(pool, "plain", tmp_path, stopped)
    assert all(ours["epochs"] == ending["epochs"] for ours in endings)


def test_a_worker_that_dies_is_no_error_of_the_script(tmp_path: Path) -> None:
    TRIALS.loses_a_worker("plain", tmp_path)

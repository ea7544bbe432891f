"""Loops of Accelerate at several widths: results are those of Accelerate alone, or a line says why not.

Needs Transformers and Accelerate: ``make test-frameworks``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.processes import PeerProcess
from tests.elastic import trials
from tests.elastic.driving import Driver

from .at_widths import WIDTHS, AtWidths, same, same_weights

pytestmark = [pytest.mark.transformers, pytest.mark.slow]


TRIALS = AtWidths("accelerate_trials")


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kind", ["seeded", "normed", "rereads"])
def test_losses_and_what_is_gathered_do_not_depend_on_the_width(
    pool: list[PeerProcess], kind: str, widths: tuple[int, ...], tmp_path: Path
) -> None:
    expected, ending = TRIALS.alone(kind, tmp_path)
    reports, endings = TRIALS.run(pool, kind, tmp_path, widths)
    same(reports, expected, rel=0 if set(widths) == {1} else 1e-5)
    same_weights(endings[0], ending)
    assert [ours["leader"] for ours in endings] == [True] + [False] * (widths[-1] - 1)


def test_without_a_session_it_is_an_accelerator(tmp_path: Path, one_thread: None) -> None:
    assert TRIALS.plain("seeded", tmp_path / "ours")[0] == TRIALS.alone("seeded", tmp_path)[0]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("stream", "IterableDataset"),
        ("no length", "no length"),
        ("too long", "has 5 batches, and its length says 6"),
        ("too short", "has 5 batches, and its length says 4"),
    ],
)
def test_what_cannot_be_divided_keeps_one_worker_and_says_why(
    pool: list[PeerProcess], kind: str, why: str, tmp_path: Path
) -> None:
    TRIALS.stays_plain(pool, kind, tmp_path, why)


def test_objects_that_are_gathered_in_training_keep_one_worker(pool: list[PeerProcess], tmp_path: Path) -> None:
    """Accelerate gathers them by itself where it gets no tensors."""
    config = {"kind": "objects", "folder": str(tmp_path), "width": 2}
    driver = Driver(pool, TRIALS.trial(), config)
    driver.turn(1)
    driver.resize(2)
    pool[0].call(trials.allow)
    assert "gets something else than tensors" in pool[0].call(trials.outcome)[1]


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MULTI_CPU"])
def test_a_loop_over_processes_keeps_one_worker_and_says_why(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """What an Accelerator says of itself then: there is one process in this test."""
    from accelerate.utils import DistributedType

    from fluidtune.integrations.accelerate import ElasticAccelerator

    monkeypatch.setattr(ElasticAccelerator, "distributed_type", getattr(DistributedType, kind))
    with pytest.raises(TypeError, match=rf"in its own way over processes or devices \({kind}\)"):
        ElasticAccelerator(cpu=True)._refuse()


@pytest.mark.parametrize("kind", ["seeded", "normed"])
def test_a_rehearsal_finds_that_a_loop_can_be_divided(kind: str, tmp_path: Path, one_thread: None) -> None:
    found = TRIALS.rehearsed(kind, tmp_path)
    assert found.kind == "same", found


def test_a_loop_goes_on_from_its_commit(pool: list[PeerProcess], tmp_path: Path) -> None:
    """In the order of the epochs that are left, which a seeded sampler counts itself."""
    TRIALS.goes_on(pool, "seeded", tmp_path, stopped=2)

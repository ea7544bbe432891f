"""Loops of Accelerate at several widths: results are those of Accelerate alone, or a line says why not.

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

from .test_transformers import same

pytestmark = [pytest.mark.transformers, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool() -> Iterator[list[PeerProcess]]:
    with peer_processes(3) as processes:
        yield processes


def alone(kind: str, folder: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    from . import accelerate_trials

    return trials.plain(accelerate_trials.trial, {"kind": kind, "folder": str(folder / "alone"), "stock": True})


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2), (1, 2, 1), (3, 2, 3)])
@pytest.mark.parametrize("kind", ["seeded", "normed"])
def test_losses_and_what_is_gathered_do_not_depend_on_the_width(
    pool: list[PeerProcess], kind: str, widths: tuple[int, ...], tmp_path: Path
) -> None:
    from . import accelerate_trials

    expected, ending = alone(kind, tmp_path)
    config = {"kind": kind, "folder": str(tmp_path / "ours")}
    reports, endings = run(pool, accelerate_trials.trial, config, widths)
    same(reports, expected, rel=0 if set(widths) == {1} else 1e-5)
    for name, value in ending["weights"].items():
        assert torch.allclose(endings[0]["weights"][name], value, rtol=1e-4, atol=1e-5), name
    assert [ours["leader"] for ours in endings] == [True] + [False] * (widths[-1] - 1)


def test_without_a_session_it_is_an_accelerator(tmp_path: Path, one_thread: None) -> None:
    from . import accelerate_trials

    expected, _ = alone("seeded", tmp_path)
    assert trials.plain(accelerate_trials.trial, {"kind": "seeded", "folder": str(tmp_path)})[0] == expected


def test_a_stream_keeps_one_worker_and_says_why(pool: list[PeerProcess], tmp_path: Path) -> None:
    from . import accelerate_trials

    expected, _ = alone("stream", tmp_path)
    config = {"kind": "stream", "folder": str(tmp_path / "ours"), "free": True}
    pool[0].call(trials.start, accelerate_trials.trial, config, True, "w0")
    assert pool[0].call(trials.outcome)[0] == "returned"
    assert "IterableDataset" in pool[0].call(trials.refused)[1]
    same(pool[0].call(trials.reports), expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["seeded", "normed"])
def test_a_rehearsal_finds_that_a_loop_can_be_divided(kind: str, tmp_path: Path, one_thread: None) -> None:
    from . import accelerate_trials

    found = rehearse(lambda: accelerate_trials.trial({"kind": kind, "folder": str(tmp_path)}, lambda _: None))
    assert found.kind == "same", found
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_loop_goes_on_from_its_commit(pool: list[PeerProcess], tmp_path: Path) -> None:
    """In the order of the epochs that are left, which a seeded sampler counts itself."""
    from . import accelerate_trials

    expected, _ = alone("seeded", tmp_path)
    config = {"kind": "seeded", "folder": str(tmp_path / "ours"), "commits": str(tmp_path / "commits")}
    driver = Driver(pool, accelerate_trials.trial, config)
    driver.turn(1)
    pool[0].call(trials.allow)
    driver.turn(2)
    pool[0].call(trials.leave)
    pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome)[0] == "left"
    reports, _ = run(pool, accelerate_trials.trial, config, (2,))
    same(reports, expected[2:])

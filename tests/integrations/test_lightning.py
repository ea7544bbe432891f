"""Lightning trials at several widths: results, decisions and files are Lightning's alone, or a line says why not.

Needs Lightning: ``make test-frameworks``.
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

pytestmark = [pytest.mark.lightning, pytest.mark.slow]

#: `lightning_trials.KINDS` and `REFUSED`, which are not imported where Lightning is not installed.
KINDS = ("plain", "batch norm", "double", "stopping", "two optimizers", "two loaders", "data module", "processes")
REFUSED = ("stream", "iterable", "sparse", "metric", "averaged", "reloaded", "counted otherwise")


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
            assert ours[name] == pytest.approx(value, rel=rel), f"{name} of epoch {number}"


def alone(kind: str, folder: Path, **config: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """What Lightning's own strategy gives in this process."""
    from . import lightning_trials

    told = {"kind": kind, "folder": str(folder / "alone"), "stock": True, **config}
    return trials.plain(lightning_trials.trial, told)


def test_the_kinds_are_those_of_the_trials() -> None:
    from . import lightning_trials

    assert tuple(lightning_trials.KINDS) == KINDS and tuple(lightning_trials.REFUSED) == REFUSED


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_of_one_worker_is_lightning_alone(kind: str, tmp_path: Path, one_thread: None) -> None:
    """Outside a session: under stock Ray Tune and in plain Python."""
    from . import lightning_trials

    expected, ending = alone(kind, tmp_path)
    reports, ours = trials.plain(lightning_trials.trial, {"kind": kind, "folder": str(tmp_path / "ours")})
    assert reports == expected
    assert ours["files"] == ending["files"] and ours["log"] == ending["log"]


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2), (1, 2, 1), (3, 2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_decisions_do_not_depend_on_the_width(
    pool: list[PeerProcess], kind: str, widths: tuple[int, ...], tmp_path: Path
) -> None:
    from . import lightning_trials

    expected, ending = alone(kind, tmp_path)
    config = {"kind": kind, "folder": str(tmp_path / "ours")}
    reports, endings = run(pool, lightning_trials.trial, config, widths[: len(expected) - 1])
    same(reports, expected)
    assert endings[0]["widths"] == [1, *widths][: len(expected)]
    for ours in endings:
        assert ours["epochs"] == ending["epochs"] and ours["best"] == ending["best"]
        for name, value in ending["weights"].items():
            assert torch.allclose(ours["weights"][name], value, rtol=1e-4, atol=1e-5), name
    assert endings[0]["files"] == ending["files"]
    rows = [line.count(",") for line in endings[0]["log"].splitlines()]
    assert rows == [line.count(",") for line in ending["log"].splitlines()]
    assert all(ours["files"] == [] for ours in endings[1:]), "a follower has written a file"


def test_mixed_precision_rounds_otherwise_and_is_divided(pool: list[PeerProcess], tmp_path: Path) -> None:
    from . import lightning_trials

    expected, _ = alone("mixed", tmp_path)
    reports, endings = run(pool, lightning_trials.trial, {"kind": "mixed", "folder": str(tmp_path)}, (2, 1, 2))
    same(reports, expected, rel=0.02)
    assert endings[0]["widths"] == [1, 2, 1, 2]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_divided_stays_a_plain_trial_and_says_why(
    pool: list[PeerProcess], kind: str, tmp_path: Path
) -> None:
    from . import lightning_trials

    expected, _ = alone(kind, tmp_path)
    config = {"kind": kind, "folder": str(tmp_path / "ours"), "free": True}
    pool[0].call(trials.start, lightning_trials.trial, config, True, "w0")
    assert pool[0].call(trials.outcome)[0] == "returned"
    assert lightning_trials.REFUSED[kind][1] in pool[0].call(trials.refused)[1]
    same(pool[0].call(trials.reports), expected, rel=1e-6)


def test_a_second_fit_is_a_second_loop(pool: list[PeerProcess]) -> None:
    from . import lightning_trials

    expected, ending = trials.plain(lightning_trials.two_fits, {"stock": True})
    reports, endings = run(pool, lightning_trials.two_fits, {}, (2, 1, 2))
    same(reports, expected)
    assert [ours["tested"] for ours in endings] == pytest.approx([ending["tested"]] * 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["plain", "batch norm", "two optimizers"])
def test_a_rehearsal_finds_that_a_trial_can_be_divided(kind: str, tmp_path: Path, one_thread: None) -> None:
    from . import lightning_trials

    found = rehearse(lambda: lightning_trials.trial({"kind": kind, "folder": str(tmp_path)}, lambda _: None))
    assert found.kind == "same", found
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_rehearsal_finds_a_loss_that_cannot_be_divided(tmp_path: Path, one_thread: None) -> None:
    """Clipping makes its gradients look alike."""
    from . import lightning_trials

    found = rehearse(lambda: lightning_trials.trial({"kind": "summed", "folder": str(tmp_path)}, print))
    assert found.kind == "differs" and "off by" in found.reason


@pytest.mark.parametrize("stopped", [1, 3])
def test_a_trial_goes_on_from_its_commit(pool: list[PeerProcess], stopped: int, tmp_path: Path) -> None:
    from . import lightning_trials

    expected, ending = alone("plain", tmp_path)
    config = {"kind": "plain", "folder": str(tmp_path / "ours"), "commits": str(tmp_path / "commits")}
    driver = Driver(pool, lightning_trials.trial, config)
    for turn in range(1, stopped + 1):
        driver.turn(turn)
        if turn == 1:
            driver.resize(2)
        if turn == stopped:
            pool[0].call(trials.leave)
        pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome)[0] == "left"
    reports, endings = run(pool, lightning_trials.trial, config, (2, 2) if stopped == 1 else ())
    same(reports, expected[stopped:])
    assert all(ours["epochs"] == ending["epochs"] for ours in endings)


def test_a_worker_that_dies_is_no_error_of_the_script(pool: list[PeerProcess], tmp_path: Path) -> None:
    """The leader's loop ends with the loss of its group, through Lightning's own handling of exceptions."""
    from . import lightning_trials

    config = {"kind": "plain", "folder": str(tmp_path), "stop": 6}
    with peer_processes(2) as workers:
        driver = Driver(workers, lightning_trials.trial, config)
        driver.turn(1)
        driver.resize(2)
        workers[0].call(trials.allow)
        driver.turn(2)
        workers[1].kill()
        workers[0].call(trials.allow, 6)
        assert workers[0].call(trials.outcome)[0] == "lost"

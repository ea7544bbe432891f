"""Loops of Fabric at several widths: results are those of Fabric alone, or a line says why not.

Needs Lightning: ``make test-frameworks``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.processes import PeerProcess

from .at_widths import WIDTHS, AtWidths, same, same_weights

pytestmark = [pytest.mark.lightning, pytest.mark.slow]

KINDS = ("plain", "double", "sampler", "rereads")


TRIALS = AtWidths("fabric_trials")


@pytest.mark.parametrize("kind", [*KINDS, "noisy"])
def test_without_a_session_it_is_a_fabric(kind: str, tmp_path: Path, one_thread: None) -> None:
    expected, ending = TRIALS.alone(kind, tmp_path)
    reports, ours = TRIALS.plain(kind, tmp_path / "ours")
    assert reports == expected and ours["files"] == ending["files"]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_what_is_gathered_do_not_depend_on_the_width(
    pool: list[PeerProcess], kind: str, widths: tuple[int, ...], tmp_path: Path
) -> None:
    expected, ending = TRIALS.alone(kind, tmp_path)
    reports, endings = TRIALS.run(pool, kind, tmp_path, widths)
    same(reports, expected, rel=0 if set(widths) == {1} else 1e-5)
    for ours in endings:
        same_weights(ours, ending)
    assert [ours["leader"] for ours in endings] == [True] + [False] * (widths[-1] - 1)
    assert endings[0]["files"] == ending["files"]


@pytest.mark.parametrize("kind", [*KINDS, "noisy"])
def test_a_rehearsal_finds_that_a_loop_can_be_divided(kind: str, tmp_path: Path, one_thread: None) -> None:
    found = TRIALS.rehearsed(kind, tmp_path)
    assert found.kind == "same", found


@pytest.mark.parametrize(
    ("kind", "why"),
    [("stream", "IterableDataset"), ("compiled", "a compiled model"), ("joined", "all_gather(sync_grads=True)")],
)
def test_what_cannot_be_divided_stays_a_plain_trial_and_says_why(
    pool: list[PeerProcess], kind: str, why: str, tmp_path: Path
) -> None:
    TRIALS.stays_plain(pool, kind, tmp_path, why)


def test_a_loop_over_processes_keeps_one_worker_and_says_why() -> None:
    from fluidtune.integrations.lightning import ElasticFabric

    why = ElasticFabric(accelerator="cpu", devices=1, strategy="ddp")._plain_because()
    assert why == "DDPStrategy trains in its own way over processes or devices"


@pytest.mark.parametrize("kind", ["plain", "sampler"])
def test_a_loop_goes_on_from_its_commit(pool: list[PeerProcess], kind: str, tmp_path: Path) -> None:
    """In the order of the epochs that are left, by which Fabric seeds a sampler."""
    TRIALS.goes_on(pool, kind, tmp_path, stopped=2)

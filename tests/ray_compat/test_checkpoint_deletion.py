"""Checkpoints that Tune deletes, while other trials are to go on from them."""

from __future__ import annotations

from pathlib import Path

from ray.train._internal.checkpoint_manager import _CheckpointManager as CheckpointManager
from ray.train._internal.session import _TrainingResult as TrainingResult
from ray.tune import Checkpoint, CheckpointConfig

from fluidtune.ray_compat.checkpoint_deletion import delete_what_is_due, keep_what_trials_go_on_from


class Run:
    """A run in which a second trial goes on from ``checkpoint``."""

    checkpoint: Checkpoint | None = None

    def get_live_trials(self) -> list[Run]:
        return [self]


def test_a_checkpoint_stays_until_no_trial_goes_on_from_it(tmp_path: Path) -> None:
    """Seen: with ``num_to_keep=2`` a trial of PBT failed, as the trial that it was to copy had gone on."""
    run, donor = Run(), CheckpointManager(CheckpointConfig(num_to_keep=1))
    keep_what_trials_go_on_from(run)  # type: ignore[arg-type]
    saved = [Checkpoint(str(tmp_path / name)) for name in "012"]
    run.checkpoint = saved[0]
    for checkpoint in saved:
        Path(checkpoint.path).mkdir()
        donor.register_checkpoint(TrainingResult(checkpoint, {}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]
    run.checkpoint = saved[2]
    delete_what_is_due()
    assert [path.name for path in tmp_path.iterdir()] == ["2"]

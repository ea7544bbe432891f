"""Runs of W&B, MLflow and TensorBoard that trials open: one whole run a trial, and none of a follower."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.frameworks.tracked_search import TRIALS

pytestmark = [pytest.mark.frameworks, pytest.mark.trackers, pytest.mark.timeout(900)]

SEARCH = Path(__file__).parent / "tracked_search.py"


def blocks(path: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: LevelDB's log format after a header of 7 bytes."""
    data, place, parts = path.read_bytes(), 7, list[bytes]()
    while place + 7 <= len(data):
        rest = 32768 - place % 32768
        if rest < 7:  # what is left of a block is filled up
            place += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if not 1 <= kind <= 4 or place + 7 + length > len(data):
            return
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def of_wandb(folder: Path) -> list[int]:
    """How many values each run has; -1: it has no end."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        records = Counter(Record.FromString(block).WhichOneof("record_type") for block in blocks(path))
        found.append(records["history"] if records["exit"] else -1)
    return found


def of_mlflow(folder: Path) -> tuple[list[int], Counter[str]]:
    """How many values each run has, and how many runs have each status."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("search")
    runs = [] if experiment is None else client.search_runs([experiment.experiment_id])
    values = [len(client.get_metric_history(run.info.run_id, "x")) for run in runs]
    return values, Counter(run.info.status for run in runs)


def of_tensorboard(folder: Path) -> list[int]:
    """How many values each board has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    boards = [EventAccumulator(str(each)).Reload() for each in sorted(folder.glob("board*"))]
    return [len(each.Scalars("x")) for each in boards]


def searched(folder: Path, *what: str) -> int:
    """Run the search. Returns how many results its trials have reported."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(SEARCH), str(folder), *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    left = [each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or ())]
    assert not left
    return int(re.findall(r"^reports (\d+)", done.stdout, re.MULTILINE)[0])


@pytest.mark.ray
@pytest.mark.usefixtures("no_ray")
def test_each_trial_leaves_one_whole_run_though_its_code_ends_none(tmp_path: Path) -> None:
    reports = searched(tmp_path, "stopped")
    wandb, (mlflow, statuses), boards = of_wandb(tmp_path), of_mlflow(tmp_path), of_tensorboard(tmp_path)
    assert len(wandb) == len(mlflow) == len(boards) == TRIALS
    # A trial that is stopped may have logged once more.
    for values in (wandb, mlflow, boards):
        assert min(values) >= 1 and reports <= sum(values) <= reports + TRIALS
    assert statuses == Counter(FINISHED=TRIALS - 1, FAILED=1)
    searched(tmp_path / "stock", "stopped", "stock")
    assert of_mlflow(tmp_path / "stock")[1] == Counter(RUNNING=TRIALS)


@pytest.mark.ray
@pytest.mark.usefixtures("no_ray")
def test_a_trial_that_has_grown_leaves_one_run(tmp_path: Path) -> None:
    searched(tmp_path, "grown")
    assert len(of_wandb(tmp_path)) == len(of_mlflow(tmp_path)[0]) == len(of_tensorboard(tmp_path)) == 1
    assert len(list(tmp_path.glob("board*/*"))) == 1

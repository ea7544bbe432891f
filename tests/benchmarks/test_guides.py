"""What a guide's run left is read from its directories, and what differs between two runs is named. No Ray runs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.guide_outcomes import Outcome, differences, read

#: Directories of a trial: without and with a search algorithm.
RANDOM, SEARCHED = "train_41863_00000_0_lr=0.1_2026-01-01_00-00-00", "train_1a2b3c4d_1_lr=0.1_2026-01-01_00-00-00"


def left(home: Path, decides: list[Any], directory: str = RANDOM) -> Outcome:
    """A home directory as a run of one trial leaves it, read."""
    trial = home / "ray_results" / "train_2026-01-01_00-00-00" / directory
    (trial / "checkpoint_000000").mkdir(parents=True)
    (trial / "checkpoint_000000" / "model.pt").touch()
    (trial / "params.json").write_text('{"lr": 0.1}')
    reports = [{"loss": 1.0 / n, "pid": 7, "time_total_s": n, "config": {"lr": 0.1}} for n in (1, 2)]
    (trial / "result.json").write_text("".join(json.dumps(each) + "\n" for each in reports))
    (trial / "error.txt").write_text("Traceback (most recent call last):\n  boom()\nValueError: boom\n")
    data = [[json.dumps({"trial_id": directory[6:11], "status": "ERROR"}), "{}"]]
    (trial.parent / "experiment_state-1.json").write_text(json.dumps({"trial_data": data}))
    (home / "notes").write_text(json.dumps(decides) + "\n")
    return read(home, 0, "", home / "notes")


def test_a_trial_is_read_without_what_is_random_in_it(tmp_path: Path) -> None:
    outcome = left(tmp_path, ["FIFOScheduler", None, False])
    assert outcome["scheduler"] is None and outcome["searcher"] is None
    trial = outcome["experiments"]["train"]["00000"]
    assert trial["reports"] == [{"loss": 1.0}, {"loss": 0.5}]
    assert (trial["status"], trial["error"], trial["processes"]) == ("ERROR", "ValueError: boom", [7])
    assert trial["files"]["checkpoint_N/model.pt"] == 1
    assert left(tmp_path / "other", [None, "OptunaSearch", False], SEARCHED)["experiments"]["train"].keys() == {"1"}


def changed(outcome: Outcome, **fields: Any) -> Outcome:
    """The outcome with other fields of its trial."""
    found = copy.deepcopy(outcome)
    found["experiments"]["train"]["00000"].update(fields)
    return found


@pytest.mark.parametrize(
    ("decides", "named"),
    [
        ([None, None, False], {"status", "error", "config", "values", "fewer", "files"}),
        (["ASHAScheduler", None, False], {"status", "error", "values"}),
        ([None, "OptunaSearch", False], {"status", "error"}),
        ([None, None, True], {"status", "error", "config", "fewer", "files"}),
    ],
)
def test_less_is_compared_where_others_decide(tmp_path: Path, decides: list[Any], named: set[str]) -> None:
    stock = left(tmp_path, decides)
    trial = stock["experiments"]["train"]["00000"]
    reports = trial["reports"]
    ours = {
        "status": changed(stock, status="TERMINATED"),
        "error": changed(stock, error=None),
        "config": changed(stock, config={"lr": 0.2}),
        "values": changed(stock, reports=[reports[0], {**reports[1], "loss": 0.6}]),
        "fewer": changed(stock, reports=reports[:1]),
        "files": changed(stock, files={**trial["files"], "checkpoint_N/model.pt": 2}),
    }
    assert not differences(stock, stock)
    assert {what for what, outcome in ours.items() if differences(outcome, stock)} == named

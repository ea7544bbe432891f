"""The driver of a search is killed: the search that is restored stops each trial where one that is not killed does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.faults.test_kills import ROOT, left_by_driver, reported

pytestmark = [pytest.mark.ray, pytest.mark.faults]

#: Results after which the driver is killed.
KILLED_AFTER = 23


def driven(mode: str, storage: Path, kill_after: int | None = None) -> None:
    """Run a driver, which is killed after so many results of its event log."""
    directory = Path(tempfile.mkdtemp(prefix="d-"))  # not below tmp_path: the paths of Ray's sockets must be short
    environment = {**os.environ, "TMPDIR": str(directory), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.faults.search_job", mode, str(storage)]
    storage.mkdir(exist_ok=True)
    with open(storage / "out.txt", "ab") as out:
        driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    log = storage / "job" / "fluid_events.jsonl"
    while kill_after is not None and driver.poll() is None:
        lines = log.read_text().splitlines() if log.exists() else []
        if sum('"trial_result"' in line for line in lines) >= kill_after:
            driver.kill()
        time.sleep(0.01)
    status = driver.wait(timeout=300)
    assert (status == 0) == (kill_after is None), (storage / "out.txt").read_text()[-3000:]
    deadline = time.monotonic() + 60
    while left := left_by_driver(directory):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def ended(storage: Path) -> dict[int, list[int]]:
    return {int(x): [line["training_iteration"] for line in lines] for x, lines in reported(storage).items()}


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("no_ray")
def test_a_killed_search_of_asha_stops_the_same_trials(tmp_path: Path) -> None:
    driven("new", tmp_path / "whole")
    driven("new", tmp_path / "killed", kill_after=KILLED_AFTER)
    driven("restore", tmp_path / "killed")
    whole, killed = ended(tmp_path / "whole"), ended(tmp_path / "killed")
    assert len(whole) == 18
    assert len({len(each) for each in whole.values()}) > 1, "ASHA stops none of them early"
    assert killed == whole
    events = [json.loads(line) for line in (tmp_path / "killed" / "job" / "fluid_events.jsonl").open()]
    assert sum(event["event"] == "run_started" for event in events) == 2
    assert not list((tmp_path / "killed" / "job").glob("fluid_search-*")), "the journal is left"

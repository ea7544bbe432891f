"""`fluidtune why` on a real run: a trial that grew and was shrunk, one whose worker died, one that Tune tried again.

A trial that is moved is in test_moving.py, one that never grew in test_elastic.py.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ray import tune
from ray.tune import FailureConfig
from ray.tune.search import Searcher

from fluidtune.cli import cli
from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.faults import jobs
from tests.tune.running import fit

pytestmark = [pytest.mark.ray, pytest.mark.newest]


def eventful(config: dict[str, Any]) -> None:
    """1: elastic, and long. 2: its process dies once, in its third iteration. 3: its code fails once, in its second."""
    if config["x"] == 1:
        jobs.elastic(config)
        return
    first = Path(config["notes"], f"was-here-{config['x']}")
    for iteration in range(1, 6):
        time.sleep(0.1)
        if iteration == 5 - config["x"] and not first.exists():
            first.touch()
            if config["x"] == 3:
                raise ValueError("only once")
            os.kill(os.getpid(), signal.SIGKILL)
        tune.report({"value": iteration})


class Later(Searcher):
    """Suggests x = 2 and 3 when x = 1 has grown, as the log says."""

    def __init__(self, log: Path, space: dict[str, Any]):
        super().__init__(metric="value", mode="min")
        self.log, self.space, self.suggested = log, space, 0

    def suggest(self, trial_id: str) -> Any:
        happened = {event["event"] for event in read_events(self.log)} if self.log.exists() else set()
        if self.suggested == 1 and not happened & {"resized", "trial_ended"}:
            return None
        if self.suggested == 3:
            return Searcher.FINISHED
        self.suggested += 1
        return {**self.space, "x": self.suggested}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        pass

    def save(self, checkpoint_path: str) -> None:
        pass

    def restore(self, checkpoint_path: str) -> None:
        pass


def why(run: Path, trial: str) -> list[str]:
    done = CliRunner().invoke(cli, ["why", str(run), trial], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output.splitlines()


def one(lines: list[str], *parts: str) -> None:
    """Exactly one line has all the parts."""
    assert sum(all(part in line for part in parts) for line in lines) == 1, (parts, lines)


def test_the_stories_of_trials_that_were_shrunk_and_tried_again(ray2: None, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    run = tmp_path / "fluid"
    space = {"iterations": 120, "step": 0.06, "notes": str(tmp_path / "notes")}
    results = fit(
        "fluid",
        eventful,
        {},
        tmp_path,
        run={"failure_config": FailureConfig(max_failures=1)},
        metric="value",
        mode="min",
        num_samples=3,
        search_alg=Later(run / EVENT_LOG_NAME, space),
    )
    assert not results.errors
    added = [event for event in read_events(run / EVENT_LOG_NAME) if event["event"] == "trial_added"]
    ids = list(dict.fromkeys(event["trial"] for event in added))
    names = {event["trial"]: event["name"] for event in added}
    assert len(ids) == 3 and all(name == f"eventful_{trial}" for trial, name in names.items())

    shrunk = why(run, names[ids[0]])
    assert "elastic, 120 iterations reported, stopped" in shrunk[0]
    one(shrunk, "started on device", "idle, 1 trial waiting")
    grew = [line for line in shrunk if "grew from width 1 to 2" in line]
    assert grew and all("no trial waits for them" in line and "a resize costs" in line for line in grew)
    shrank = [line for line in shrunk if "shrank from width 2 to 1" in line]
    assert any("waiting, for which" in line for line in shrank), shrunk

    died = why(run, ids[1])
    one(died, "its worker on device", "died")
    one(died, "left its devices, to go on later: its worker died")
    one(died, "went on on device")
    one(died, "another worker has it, with 2 iterations reported: its worker died")
    one(died, "begins anew; 2 iterations of it are done twice")

    failed = why(run, ids[2])
    assert any("waits: trials hold all 2 devices" in line for line in [*died, *failed]), (died, failed)
    one(failed, "left its devices: it failed: ", "ValueError", "only once")
    one(failed, "waits again")
    assert failed[0].endswith("stopped")

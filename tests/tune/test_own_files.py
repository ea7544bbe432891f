"""Functions without a checkpoint of Tune's that go on from files of their own: no report of theirs is hidden."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ray import tune

import fluidtune
from tests.tune.running import fit
from tests.tune.test_restoring import Ending

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray2")]

EPOCHS = 8


def resuming(config: dict[str, Any]) -> None:
    """``kills``: the epochs before whose report the process is killed, once each."""
    last = Path(config["folder"], "last")
    for epoch in range(int(last.read_text()) + 1 if last.exists() else 1, EPOCHS + 1):
        killed = Path(config["folder"], f"killed-{epoch}")
        if epoch in config["kills"] and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        last.write_text(str(epoch))
        tune.report({"epoch": epoch, "score": epoch})


def epochs(result: Any) -> list[int]:
    return [json.loads(line)["epoch"] for line in Path(result.path, "result.json").read_text().splitlines()]


@pytest.mark.core
def test_all_epochs_are_reported_once(tmp_path: Path) -> None:
    space = {"folder": str(tmp_path), "kills": [3, 7]}
    result = fit("fluid", resuming, space, tmp_path)[0]
    assert epochs(result) == list(range(1, EPOCHS + 1))


def test_a_restored_run_reports_all_that_comes(tmp_path: Path) -> None:
    space = {"folder": str(tmp_path), "kills": []}
    with pytest.raises(Exception, match="as ordered"):
        fit("fluid", resuming, space, tmp_path, run={"callbacks": [Ending("exception", tmp_path / "broken")]})
    executor = fluidtune.FluidExecutor(devices="cpu:2")
    result = fluidtune.Tuner.restore(str(tmp_path / "fluid"), resuming, executor=executor).fit()[0]
    assert epochs(result)[-1] == EPOCHS and sorted(set(epochs(result))) == epochs(result)

"""A stock elastic Horovod script, under Horovod's own launcher and as a trial: the same losses."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT
from fluidtune import FluidExecutor
from tests.tune.running import fit

pytestmark = [pytest.mark.ray, pytest.mark.horovod]

EPOCHS = 3


def under_horovodrun(tmp_path: Path) -> list[dict[str, Any]]:
    """What the example reports if its one import is Horovod's own, trained by two of Horovod's workers."""
    script, hosts = tmp_path / "stock.py", tmp_path / "hosts.sh"
    text = (ROOT / "examples" / "digits_horovod.py").read_text()
    stock, changed = re.subn(r"from fluidtune\.elastic import hvd .*", "import horovod.torch as hvd", text)
    assert changed == 1 and "import fluidtune" not in stock
    script.write_text(stock)
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    command = ["-np", "2", "--min-np", "1", "--max-np", "2", "--network-interfaces", "lo"]
    launcher = [sys.executable, "-m", "horovod.runner.launch", *command, "--host-discovery-script", str(hosts)]
    done = subprocess.run(
        [*launcher, sys.executable, str(script), "--once", "--epochs", str(EPOCHS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [ast.literal_eval(line) for line in re.findall(r"{.*}", done.stdout)]


def as_trial(tmp_path: Path, executor: FluidExecutor) -> Any:
    from examples import digits_horovod  # needs Horovod

    space = {**digits_horovod.ONCE, "epochs": EPOCHS}
    return fit("fluid", digits_horovod.trial, space, tmp_path, executor=executor, metric="accuracy")


@pytest.mark.timeout(420)
def test_the_example_gives_the_same_under_horovodrun_and_as_a_trial(tmp_path: Path, ray2: None) -> None:
    theirs = under_horovodrun(tmp_path)
    assert [row["workers"] for row in theirs] == [2] * EPOCHS
    grid = as_trial(tmp_path, FluidExecutor(devices="cpu:2", backend="horovod"))
    assert not grid.errors
    ours = grid[0].metrics_dataframe
    assert list(ours["loss"]) == pytest.approx([row["loss"] for row in theirs], rel=1e-4)
    assert list(ours["accuracy"]) == pytest.approx([row["accuracy"] for row in theirs], abs=0.003)


def test_the_torch_backend_tells_a_horovod_script_what_it_needs(tmp_path: Path, ray2: None) -> None:
    grid = as_trial(tmp_path, FluidExecutor(devices="cpu:1"))
    assert 'backend="horovod"' in str(grid.errors[0])

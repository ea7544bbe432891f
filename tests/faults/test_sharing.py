"""Real Ray, real kills, several jobs: see sharing.py, which also runs longer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.common import ROOT
from tests.faults.sharing import KINDS

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.usefixtures("no_ray")]


@pytest.mark.timeout(900)
def test_two_jobs_survive_one_fault_of_every_kind():
    command = [sys.executable, "-m", "tests.faults.sharing", "--rounds", str(len(KINDS))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-4000:]

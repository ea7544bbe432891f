"""Kills on a real Ray with several jobs. `sharing` also runs more rounds, and pauses a driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.common import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.usefixtures("no_ray")]


@pytest.mark.timeout(900)
def test_two_jobs_survive_the_death_of_an_arbiter_a_driver_and_a_worker():
    command = [sys.executable, "-m", "tests.faults.sharing", "--rounds", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-4000:]

"""`benchmarks.gpu`: what its page says of what was found, and the rehearsal on cores."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.common import ROOT
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.__main__ import Claim

SIDES = {
    "fluid": {"errors": [], "best": 0.95, "process_seconds": 10.0, "iterations": 50, "most_at_a_time": 3, "samples": 5},
    "stock": {"errors": [], "best": 0.95, "process_seconds": 14.0, "iterations": 50},
    "stock-quarter": {"errors": [], "best": 0.94, "process_seconds": 9.0, "iterations": 50},
}


def held(claims: list[Claim]) -> dict[str, bool | None]:
    return {claim.text: claim.held for claim in claims}


def test_what_the_sides_of_the_search_show() -> None:
    assert held(gpu.judge_searches(SIDES, rehearsal=False)) == {
        "no trial of the searches fails": True,
        "all sides that ended find the same best trial": True,
        "trials share the GPU (fluid)": True,
        "NVML was asked (fluid)": True,
        "the search is at least 1.5 times as fast (beside stock)": False,
        "the search is compared (beside stock-quarter)": None,
    }
    apart = SIDES | {"stock": {"errors": ["no memory"], "best": 0.5, "process_seconds": 20.0, "iterations": 50}}
    found = held(gpu.judge_searches(apart, rehearsal=True))
    assert not found["no trial of the searches fails"] and not found["all sides that ended find the same best trial"]
    assert found["the search is at least 1.5 times as fast (beside stock)"] is None, "a rehearsal measures nothing"
    assert gpu.judge_searches({}, rehearsal=False) == []


@pytest.mark.slow
def test_whoever_ends_the_run_ends_its_part_and_has_the_page(tmp_path: Path) -> None:
    pid, beside = tmp_path / "pid", tmp_path / "pid.new"
    says = f"open({str(beside)!r}, 'w').write(str(os.getpid())); os.replace({str(beside)!r}, {str(pid)!r})"
    long = f"import os, time; {says}; time.sleep(600)"
    code = (
        "import sys; from benchmarks.gpu import __main__ as gpu\n"
        f"part = gpu.Part('long', [sys.executable, '-c', {long!r}], 600.0, lambda outcome: [])\n"
        "gpu.parts = lambda *_: [part]; gpu.main()"
    )
    command = [sys.executable, "-c", code, "--rehearse", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert "To come: long." in (tmp_path / "README.md").read_text()


@pytest.mark.ray
@pytest.mark.timeout(620)
def test_the_rehearsal(no_ray, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    said = (tmp_path / "README.md").read_text()
    assert done.returncode == 0, said + done.stderr[-3000:]
    sides = json.loads((tmp_path / "gpu.json").read_text())["searches"]
    assert sides.keys() == {"fluid", "lanes", "stock-quarter", "stock"}
    assert not any(side["errors"] for side in sides.values())
    assert "| searches | all sides that ended find the same best trial | yes |" in said
    assert "left out" not in said and (tmp_path / "fluid" / "fluid_events.jsonl").exists()

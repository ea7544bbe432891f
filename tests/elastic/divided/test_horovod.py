"""Tensors by Horovod's collectives: equal to alone, while followers come and go and die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.horovod

SCRIPT = '''
import os, pickle, signal, subprocess, sys, time
import torch
torch.set_num_threads(1)
from tests.elastic.divided.grown import Grown
from tests.elastic.divided.test_faults import Loop, alone

FOLLOW = """
import pickle, sys
from tests.elastic.divided.grown import follow
follow(pickle.loads(bytes.fromhex(sys.argv[1])))
"""


def add(self):  # no fork: Horovod's threads are in this process
    followers = self.division.followers
    before = len(followers.present) + len(followers.arrived)
    one = subprocess.Popen([sys.executable, "-c", FOLLOW, pickle.dumps(self.address).hex()])
    self.pids.append(one.pid)
    while len(followers.present) + len(followers.arrived) == before:
        time.sleep(0.01)


Grown.add = add
if True:
    expected, loop, trial = alone(True, 24), Loop(True), Grown(backend="horovod", host={host!r})
    divided = []
    for step, width in enumerate([2] * 6 + [3] * 6 + [1] * 2 + [3] * 4 + [2] * 6):
        if step == 16:
            os.kill(trial.pids[0], signal.SIGKILL)  # all followers are lost, and two others come
        if step == 18:
            for pid in list(trial.pids):
                trial.kill(pid)
        trial.width(width)
        trial.division.followers.divided = 0
        loop.step()
        divided.append(trial.division.followers.divided)
    pairs = [type(peer.link.pair).__name__ for peer in trial.division.followers.present]
    trial.close()
    assert pairs == ["HorovodPair"], pairs
    assert sum(divided) > 8 and divided[3] and divided[9], divided
    assert max(abs(a - b) / abs(b) for a, b in zip(loop.result(), expected)) < 1e-9
    print("equal")
'''


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["one machine", "several"])
def test_equal_to_alone(tmp_path: Path, host: str | None) -> None:
    """In a process of its own: Horovod is one in a process, and its threads live in no fork."""
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT.format(host=host))
    here = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout

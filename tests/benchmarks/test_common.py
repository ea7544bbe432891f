"""The code that benchmarks share, without running a benchmark."""

import argparse
import json
import subprocess
import sys

import psutil
import pytest

from benchmarks import common
from benchmarks.algorithms import algorithm
from benchmarks.job import digits_space
from tests.contracts.processes import until


def test_pbt_changes_nothing_that_a_checkpoint_depends_on():
    pbt, _ = algorithm("pbt", 9, digits_space(9))
    assert {"lr", "momentum"} <= pbt._hyperparam_mutations.keys()
    assert "width" in digits_space(9) and "width" not in pbt._hyperparam_mutations


@pytest.mark.parametrize("devices", ["gpu:2", "cpu", "cpu:0", "cpu:x", "2"])
def test_devices_other_than_cores_are_refused(devices):
    with pytest.raises(argparse.ArgumentTypeError, match="cpu:N"):
        common.cores(devices)


def test_finish_prints_one_line_of_json(capsys):
    figures = common.result("name", "cpu:2", "real", ratio=1.5)
    common.finish(figures, as_json=True)
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text) == figures
    assert {"benchmark", "machine", "devices", "kind"} <= figures.keys()


def test_a_failing_process_shows_its_output():
    with pytest.raises(RuntimeError, match="went wrong"):
        common.run_process([sys.executable, "-c", "raise SystemExit('went wrong')"])


def test_a_process_that_takes_too_long_is_killed_with_its_children():
    script = (
        "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-S', '-c', 'import time;"
        " time.sleep(60)'],"
        " start_new_session=True).pid, flush=True); time.sleep(60)"
    )
    with pytest.raises(common.NotEnded, match="took more than") as raised:
        common.run_process([sys.executable, "-S", "-c", script], 1.5)
    child = int(str(raised.value).split()[-1])
    until(lambda: not _lives(child))


#: A process that starts others that sleep, four at a time; each in a session of its own, as Ray's may be.
BREEDER = """
import subprocess, sys, threading
def breed():
    while True:
        sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(60)", sys.argv[1]]
        subprocess.Popen(sleeps, start_new_session=True)
for _ in range(4):
    threading.Thread(target=breed).start()
"""


def test_a_process_that_starts_others_all_the_time_leaves_none_when_it_is_killed(tmp_path):
    def bred():
        found = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (each.info["cmdline"] or [])]
        return [each for each in found if each.pid != process.pid and _lives(each.pid)]

    process = subprocess.Popen([sys.executable, "-S", "-c", BREEDER, str(tmp_path)])
    try:
        until(lambda: len(bred()) >= 5)
    finally:
        common.kill_tree(process)
    left = bred()
    for each in left:
        each.kill()
    assert not left


def _lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

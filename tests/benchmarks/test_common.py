"""The code that benchmarks share, without running a benchmark."""

import subprocess
import sys

import psutil
import pytest

from benchmarks import common
from tests.contracts.processes import until


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

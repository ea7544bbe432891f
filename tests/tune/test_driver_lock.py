"""One driver a run: a second one is refused with the name of the first, and the kernel frees what a dead one had."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fluidtune import driver_lock
from fluidtune.driver_lock import this_machine
from tests.tune.test_bad_input import refused

#: Its child lives until its standard input ends.
DRIVES = """
import os, sys
from pathlib import Path
from fluidtune.driver_lock import hold
lock = hold(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


@contextmanager
def driven(run: Path) -> Iterator[tuple[int, int]]:
    """Another process drives the run: its number, and that of a child of it, which outlives it."""
    command, pipe = [sys.executable, "-c", DRIVES, str(run)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


def test_who_drives_a_run_is_named_until_it_has_died(tmp_path: Path) -> None:
    assert not driver_lock.is_held(tmp_path)
    with driven(tmp_path) as (pid, child):
        assert driver_lock.is_held(tmp_path)
        said = f"process {pid} on {this_machine()}", "wait for its end"
        refused(lambda: driver_lock.hold(tmp_path, waits=False), *said)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        lock = driver_lock.hold(tmp_path)  # waits for that
        os.kill(child, 0)
        assert driver_lock.hold(tmp_path / ".") is lock
    lock.close()
    assert not driver_lock.is_held(tmp_path)
    # Who only looks is no driver, and a file that came into the place of the lock is another driver's.
    (tmp_path / driver_lock.FILE).touch()
    with (tmp_path / driver_lock.FILE).open() as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        threading.Timer(0.3, fcntl.flock, (looks, fcntl.LOCK_UN)).start()
        lock = driver_lock.hold(tmp_path, waits=False)
    (tmp_path / driver_lock.FILE).unlink()
    (tmp_path / driver_lock.FILE).touch()
    lock.close()
    assert (tmp_path / driver_lock.FILE).exists()


def test_another_users_driver_is_seen_where_its_lock_may_be_read() -> None:
    """Seen: who may not write the file was only warned."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name, driven(Path(name)) as (pid, _):
        Path(name).chmod(0o777)
        for mode, said in ((0o444, f"process {pid} on "), (0, "if none has, remove that file")):
            (Path(name) / driver_lock.FILE).chmod(mode)
            user = os.geteuid()
            os.seteuid(user or 65534)
            try:
                refused(lambda: driver_lock.hold(Path(name), waits=False), said)
                assert driver_lock.is_held(Path(name)) == bool(mode)
            finally:
                os.seteuid(user)

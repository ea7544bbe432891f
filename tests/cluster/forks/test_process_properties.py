"""A forked process is as a new one, in all that it can see of its own state."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fluidtune.cluster.forks.fork_server import ForkServer

pytestmark = pytest.mark.slow

#: What a process sees: of Python's own, what the kernel knows of it, warnings and logging, numpy, and torch.
SEEN = """
os.getcwd()
sys.getrecursionlimit()
sys.gettrace()
gc.get_threshold(), gc.isenabled(), len(gc.callbacks)
decimal.getcontext().prec
[locale.setlocale(each) for each in (locale.LC_NUMERIC, locale.LC_COLLATE)]
tempfile.gettempdir()
multiprocessing.get_start_method(allow_none=True)
[os.umask(0o27), os.umask(0o22)]
resource.getrlimit(resource.RLIMIT_NOFILE)
os.sched_getaffinity(0)
os.getpriority(os.PRIO_PROCESS, 0)
signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT)
sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
os.readlink("/proc/self/fd/1") == os.devnull
threading.active_count()
[each[0] for each in warnings.filters if each[0] == "error"]
logging.getLogger().level, len(logging.getLogger().handlers)
logging.getLogger("matplotlib").isEnabledFor(40)
numpy.geterr(), numpy.get_printoptions()["precision"]
torch.get_default_dtype()
torch.get_num_threads(), torch.get_num_interop_threads()
torch.is_grad_enabled()
torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
len(torch.nn.modules.module._global_forward_hooks)
torch.distributed.is_initialized()
"""
#: Prints what the main thread sees, and a new one. `torch._dynamo` is imported as torch does when it is first used.
PROGRAM = f"""
import decimal, gc, json, locale, logging, multiprocessing, os, resource, signal, sys, tempfile, threading, warnings
import numpy, torch, torch._dynamo
found = []
def look():
    found.append({{each: repr(eval(each)) for each in {SEEN.split(chr(10))[1:-1]!r}}})
look()
thread = threading.Thread(target=look)
thread.start()
thread.join()
print(json.dumps(found))
"""


def test_a_forked_process_finds_what_a_new_one_has(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def said(program: list[str]) -> list[dict[str, str]]:
        command = [*program, str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and not done.stderr, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    new = said([sys.executable])
    server = ForkServer(["torch", "torch._dynamo", "numpy", "pandas", "sklearn", "matplotlib.pyplot"], environment)
    try:
        command = server.finish([], {}).command
        assert command is not None
        forked = said(shlex.split(command))
    finally:
        server.stop()
    assert forked == new

"""A forked process is as a new one, in all that it can see of its own state."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.core]

AT_START = "environment_at_start()['C'], 'LATER' in environment_at_start()"
#: What a process sees: its start, Python's own, what the kernel knows of it, warnings and logging, numpy, and torch.
SEEN = f"""
{AT_START}
__name__, sys.argv, sys.path, os.getcwd()
os.environ.get("A"), os.environ.get("B")
sorted(map(int, os.listdir("/proc/self/fd")))[:3], len(os.listdir("/proc/self/fd"))
signal.getsignal(signal.SIGCHLD)
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
len(logging.getLogger("torch").handlers), logging.getLogger("torch").level
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
from fluidtune.cluster.forks.child import environment_at_start
os.environ["LATER"] = os.environ["C"] = "2"
found = []
def look():
    found.append({{each: repr(eval(each)) for each in {SEEN.split(chr(10))[1:-1]!r}}})
look()
thread = threading.Thread(target=look)
thread.start()
thread.join()
print(json.dumps(found))
sys.stderr.write("to stderr")
sys.exit(7)
"""


def test_a_forked_process_finds_what_a_new_one_has(packages, serve, tmp_path):
    # Seen: a package that asked for the place of temporary files at its import had decided it for all processes.
    asks = packages(asks="import tempfile\ntempfile.gettempdir()\n")
    modules = ["asks", "torch", "torch._dynamo", "numpy", "pandas", "sklearn", "matplotlib.pyplot"]
    served, script = serve(asks, *modules), tmp_path / "program.py"
    own = {"A": "1", "C": "1", "TMPDIR": str(tmp_path)}
    script.write_text(PROGRAM)
    forked = served.start(script, "x", "y z", environment=own)
    new = [sys.executable, str(script), "x", "y z"]
    new = subprocess.run(new, env={**served.environment, **own}, capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(forked.stdout) == json.loads(new.stdout)
    assert (forked.stderr, forked.returncode) == (new.stderr, new.returncode) == ("to stderr", 7)
    assert json.loads(forked.stdout)[0][AT_START] == "('1', False)", "the environment that it was started with"

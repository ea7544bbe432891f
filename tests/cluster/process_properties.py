"""What a trial can change in its process, and how another trial would see it.

``change_everything(FOLDER)`` changes each property, and ``print_all(FOLDER)`` prints what each one is. ``FOLDER`` holds
a module of the user's own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
from types import CodeType
from typing import Any

#: Modules of Python's that `TABLE` uses besides those above.
_PYTHONS = ("gc", "locale", "random", "resource", "time", "warnings")
globals().update({name: importlib.import_module(name) for name in _PYTHONS})
#: Those of libraries: `_begin` imports them.
torch: Any = None
#: Where the module of the user's own is.
FOLDER = ""

#: name | what a trial does | what another trial sees
TABLE = (
    # Python's own.
    "environment | os.environ.update(A_TRIALS='1') | os.environ.get('A_TRIALS')",
    "working directory | os.chdir('/') | os.getcwd()",
    "sys.path | sys.path.insert(0, '/a/trials') | '/a/trials' in sys.path",
    "sys.argv | sys.argv.append('--trial') | '--trial' in sys.argv",
    "sys.stdout | sys.stdout = open(os.devnull, 'w') | sys.stdout.name",
    "sys.excepthook | sys.excepthook = print | sys.excepthook is print",
    "recursion limit | sys.setrecursionlimit(5000) | sys.getrecursionlimit()",
    "gc thresholds | gc.set_threshold(1, 1, 1) | gc.get_threshold()",
    "gc off | gc.disable() | gc.isenabled()",
    "gc callbacks | gc.callbacks.append(lambda *_: None) | len(gc.callbacks)",
    "module __main__ | sys.modules['__main__'].trials = 1 | hasattr(sys.modules['__main__'], 'trials')",
    "random seed | random.seed(0) | random.random() == random.Random(0).random()",
    "locale | locale.setlocale(locale.LC_ALL, 'C.UTF-8') | [locale.setlocale(n) for n in LOCALES]",
    # What the kernel knows of the process.
    "umask | os.umask(0o007) | umask()",
    "limit of files | resource.setrlimit(FILES, (200, resource.getrlimit(FILES)[1])) | resource.getrlimit(FILES)",
    "cores | os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}) | os.sched_getaffinity(0)",
    "signal handler | signal.signal(signal.SIGUSR1, lambda *_: None) | signal.getsignal(signal.SIGUSR1)",
    "blocked signals | signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}) | blocked_signals()",
    "standard output's file | os.dup2(os.open(os.devnull, os.O_WRONLY), 1) | prints_to_nothing()",
    "a thread | threading.Thread(target=time.sleep, args=(60,), daemon=True).start() | threading.active_count()",
    # Warnings and logging.
    "warnings are errors | warnings.simplefilter('error') | [f[0] for f in warnings.filters if f[0] == 'error']",
    "root level | logger().setLevel(1) | logger().level",
    "root handlers | logging.basicConfig(filename=f'{FOLDER}/log', force=True) | len(logger().handlers)",
    # Modules.
    "state of a user's module | users_module().STATE.append(1) | seen_of_users_module()",
    # numpy and matplotlib.
    "numpy errors | numpy.seterr(all='raise') | numpy.geterr()",
    "numpy seed | numpy.random.seed(0) | numpy.random.rand() == numpy.random.RandomState(0).rand()",
    "matplotlib parameters | matplotlib.rcParams['lines.linewidth'] = 9 | matplotlib.rcParams['lines.linewidth']",
    # torch.
    "torch dtype | torch.set_default_dtype(torch.float64) | torch.get_default_dtype()",
    "torch threads | torch.set_num_threads(torch.get_num_threads() + 3) | torch.get_num_threads()",
    "grad mode | torch.set_grad_enabled(False) | torch.is_grad_enabled()",
    "deterministic | torch.use_deterministic_algorithms(True, warn_only=True) | are_deterministic()",
    "torch seed | torch.manual_seed(0) | torch.initial_seed() == 0",
    "a process group | process_group() | torch.distributed.is_initialized()",
)
#: name -> (what a trial does, what another trial sees)
PROPERTIES: dict[str, tuple[CodeType, CodeType]] = {}
for line in TABLE:
    name, change, seen = line.split(" | ")
    PROPERTIES[name] = compile(change, __file__, "exec"), compile(seen, __file__, "eval")


def _begin(folder: str) -> None:
    """Import the libraries, as a trial's code does."""
    global FOLDER
    FOLDER = folder
    for name in ("torch", "numpy", "matplotlib"):
        globals()[name] = importlib.import_module(name)
    importlib.import_module("torch._dynamo")  # as torch does when it is first used


# What the table uses.

logger = logging.getLogger
LOCALES = (globals()["locale"].LC_NUMERIC, globals()["locale"].LC_COLLATE)
FILES = globals()["resource"].RLIMIT_NOFILE


def umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def blocked_signals() -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def prints_to_nothing() -> bool:
    return os.readlink("/proc/self/fd/1") == os.devnull


def users_module() -> Any:
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    return importlib.import_module("a_users_module")


def seen_of_users_module() -> tuple[Any, Any]:
    try:
        return users_module().STATE, users_module().answer()
    finally:
        sys.path.remove(FOLDER)


def are_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def process_group() -> None:
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def print_all(folder: str) -> None:
    """Print {property: [what the main thread sees, what a new thread sees]}."""
    _begin(folder)
    print(json.dumps({name: both(seen) for name, (_, seen) in PROPERTIES.items()}))


def change_everything(folder: str) -> None:
    """Do all that the process survives, and end the process at once."""
    _begin(folder)
    for name, (change, _) in PROPERTIES.items():
        if name not in ("standard output's file", "limit of files", "sys.stdout"):
            with contextlib.suppress(Exception):  # what was changed before may forbid it
                exec(change, globals())
    os.write(1, b"changed")
    os._exit(0)


def both(seen: CodeType) -> list[str]:
    """What this thread sees, and what a new one sees."""
    found = [repr(eval(seen, globals()))]
    thread = threading.Thread(target=lambda: found.append(repr(eval(seen, globals()))))
    thread.start()
    thread.join()
    return found

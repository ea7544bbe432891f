"""What a process can see of its own state, by name: ``print_all()`` prints what each property is."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import threading
from types import CodeType
from typing import Any

#: Modules of Python's that `TABLE` uses besides those above.
_PYTHONS = ("decimal", "gc", "locale", "multiprocessing", "resource", "sys", "tempfile", "warnings")
globals().update({name: importlib.import_module(name) for name in _PYTHONS})
#: Those of libraries: `print_all` imports them.
torch: Any = None

#: name | what a process sees
TABLE = (
    # Python's own.
    "working directory | os.getcwd()",
    "recursion limit | sys.getrecursionlimit()",
    "trace | sys.gettrace() is None",
    "gc thresholds | gc.get_threshold()",
    "gc off | gc.isenabled()",
    "gc callbacks | len(gc.callbacks)",
    "decimal precision | context().prec",
    "locale | [locale.setlocale(n) for n in LOCALES]",
    "temporary folder | tempfile.gettempdir()",
    "start method | multiprocessing.get_start_method(allow_none=True)",
    # What the kernel knows of the process.
    "umask | umask()",
    "limit of files | resource.getrlimit(FILES)",
    "cores | os.sched_getaffinity(0)",
    "priority | os.getpriority(os.PRIO_PROCESS, 0)",
    "signal handler | signal.getsignal(signal.SIGUSR1)",
    "interrupt ignored | signal.getsignal(signal.SIGINT)",
    "blocked signals | blocked_signals()",
    "standard output's file | prints_to_nothing()",
    "a thread | threading.active_count()",
    # Warnings and logging.
    "warnings are errors | [f[0] for f in warnings.filters if f[0] == 'error']",
    "root level | logger().level",
    "root handlers | len(logger().handlers)",
    "a library's level | logger('matplotlib').isEnabledFor(40)",
    # numpy and tables.
    "numpy errors | numpy.geterr()",
    "numpy printing | numpy.get_printoptions()['precision']",
    # torch.
    "torch dtype | torch.get_default_dtype()",
    "torch threads | torch.get_num_threads()",
    "torch interop threads | torch.get_num_interop_threads()",
    "grad mode | torch.is_grad_enabled()",
    "deterministic | are_deterministic()",
    "module hooks | len(modules()._global_forward_hooks)",
    "a process group | torch.distributed.is_initialized()",
)
#: name -> what a process sees
PROPERTIES: dict[str, CodeType] = {}
for line in TABLE:
    name, seen = line.split(" | ")
    PROPERTIES[name] = compile(seen, __file__, "eval")


# What the table uses.

logger, context = logging.getLogger, globals()["decimal"].getcontext
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


def are_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def modules() -> Any:
    return torch.nn.modules.module


def print_all() -> None:
    """Print {property: [what the main thread sees, what a new thread sees]}."""
    for name in ("torch", "numpy"):
        globals()[name] = importlib.import_module(name)
    importlib.import_module("torch._dynamo")  # as torch does when it is first used
    print(json.dumps({name: both(seen) for name, seen in PROPERTIES.items()}))


def both(seen: CodeType) -> list[str]:
    """What this thread sees, and what a new one sees."""
    found = [repr(eval(seen, globals()))]
    thread = threading.Thread(target=lambda: found.append(repr(eval(seen, globals()))))
    thread.start()
    thread.join()
    return found

"""What a process can see of its own state, by name: ``print_all()`` prints what each property is."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import threading
import warnings
from types import CodeType
from typing import Any

#: Modules of Python's that `TABLE` uses besides those above.
_PYTHONS = (
    *("asyncio", "calendar", "csv", "decimal", "faulthandler", "gc", "locale", "multiprocessing"),
    *("resource", "socket", "sys", "tempfile", "time", "tracemalloc"),
)
globals().update({name: importlib.import_module(name) for name in _PYTHONS})
#: Those of libraries: `print_all` imports them.
torch: Any = None

#: name | what a process sees
TABLE = (
    # Python's own.
    "time zone | time.tzname",
    "working directory | os.getcwd()",
    "recursion limit | sys.getrecursionlimit()",
    "switch interval | sys.getswitchinterval()",
    "traceback limit | getattr(sys, 'tracebacklimit', None)",
    "trace of threads | threading.gettrace() is None",
    "profile of threads | threading.getprofile() is None",
    "stack size | threading.stack_size()",
    "trace | sys.gettrace() is None",
    "gc thresholds | gc.get_threshold()",
    "gc off | gc.isenabled()",
    "gc debug | gc.get_debug()",
    "gc callbacks | len(gc.callbacks)",
    "faulthandler | faulthandler.is_enabled()",
    "tracemalloc | tracemalloc.is_tracing()",
    "decimal precision | context().prec",
    "decimal traps | context().traps[decimal.Inexact]",
    "locale | [locale.setlocale(n) for n in LOCALES]",
    "socket timeout | socket.getdefaulttimeout()",
    "temporary folder | tempfile.gettempdir()",
    "csv limit | csv.field_size_limit()",
    "first weekday | calendar.firstweekday()",
    "asyncio policy | type(asyncio.get_event_loop_policy()).__name__",
    "start method | multiprocessing.get_start_method(allow_none=True)",
    "executable | str(multiprocessing.spawn.get_executable())",
    # What the kernel knows of the process.
    "umask | umask()",
    "limit of files | resource.getrlimit(FILES)",
    "cores | os.sched_getaffinity(0)",
    "priority | os.getpriority(os.PRIO_PROCESS, 0)",
    "signal handler | signal.getsignal(signal.SIGUSR1)",
    "interrupt ignored | signal.getsignal(signal.SIGINT)",
    "alarm | signal.getitimer(signal.ITIMER_REAL)",
    "blocked signals | blocked_signals()",
    "standard output's file | prints_to_nothing()",
    "a thread | threading.active_count()",
    # Warnings and logging.
    "warnings are errors | [f[0] for f in warnings.filters if f[0] == 'error']",
    "warnings ignored | len(warnings.filters)",
    "captured warnings | warnings_captured()",
    "root level | logger().level",
    "root handlers | len(logger().handlers)",
    "a library's level | logger('matplotlib').isEnabledFor(40)",
    "a library's propagation | logger('torch').propagate",
    "logging disabled | logger('x').isEnabledFor(40)",
    "a logger disabled | logger('asyncio').disabled",
    "level names | logging.getLevelName(20)",
    # numpy and tables.
    "numpy errors | numpy.geterr()",
    "numpy printing | numpy.get_printoptions()['precision']",
    "numpy buffers | numpy.getbufsize()",
    "matplotlib parameters | matplotlib.rcParams['lines.linewidth']",
    "pandas options | pandas.get_option('display.max_rows')",
    "sklearn configuration | sklearn.get_config()['assume_finite']",
    # torch.
    "torch dtype | torch.get_default_dtype()",
    "torch device | torch.empty(1).device",
    "torch threads | torch.get_num_threads()",
    "torch interop threads | torch.get_num_interop_threads()",
    "grad mode | torch.is_grad_enabled()",
    "anomaly detection | torch.is_anomaly_enabled()",
    "deterministic | are_deterministic()",
    "float32 precision | float32_precision()",
    "cudnn enabled | torch.backends.cudnn.enabled",
    "cudnn benchmark | torch.backends.cudnn.benchmark",
    "cudnn deterministic | torch.backends.cudnn.deterministic",
    "cudnn allow_tf32 | torch.backends.cudnn.allow_tf32",
    "mkldnn | torch.backends.mkldnn.enabled",
    "quantized engine | torch.backends.quantized.engine",
    "fp16 reduction | matmul().allow_fp16_reduced_precision_reduction",
    "fp16 accumulation | matmul().allow_fp16_accumulation",
    "fp16 reduction in parts | matmul().allow_fp16_reduced_precision_reduction_split_k",
    "bf16 reduction in parts | matmul().allow_bf16_reduced_precision_reduction_split_k",
    "flash attention | torch.backends.cuda.flash_sdp_enabled()",
    "torch printing | str(torch.tensor(1 / 3))",
    "autocast | torch.is_autocast_enabled('cpu')",
    "autocast dtype | torch.get_autocast_dtype('cpu')",
    "denormals | sys.float_info.min / 2 == 0.0",
    "module hooks | len(modules()._global_forward_hooks)",
    "argument checks | distribution()._validate_args",
    "hub folder | torch.hub.get_dir()",
    "sharing strategy | torch.multiprocessing.get_sharing_strategy()",
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


def warnings_captured() -> tuple[str, bool]:
    return warnings.showwarning.__module__, logging._warnings_showwarning is None  # type: ignore[attr-defined]


def are_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def float32_precision() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), matmul().allow_tf32


def matmul() -> Any:
    return torch.backends.cuda.matmul


def modules() -> Any:
    return torch.nn.modules.module


def distribution() -> Any:
    return torch.distributions.Distribution


def print_all() -> None:
    """Print {property: [what the main thread sees, what a new thread sees]}."""
    for name in ("torch", "numpy", "matplotlib", "pandas", "sklearn"):
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

"""What a trial can change in its process, and how another trial would see it.

``change_everything(FOLDER)`` changes each property, and ``print_all(FOLDER)`` prints what each one is. ``FOLDER`` holds
a module of the user's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
import warnings
from types import CodeType
from typing import Any

#: Modules of Python's that `TABLE` uses besides those above.
_PYTHONS = (
    *("builtins", "calendar", "copyreg", "csv", "decimal", "faulthandler", "gc", "locale", "math", "multiprocessing"),
    *("random", "resource", "socket", "tempfile", "time", "tracemalloc"),
)
globals().update({name: importlib.import_module(name) for name in _PYTHONS})
#: Those of libraries: `_begin` imports them.
torch: Any = None
#: Where the module of the user's own is.
FOLDER = ""

#: name | what a trial does | what another trial sees
TABLE = (
    # Python's own.
    "environment | os.environ.update(A_TRIALS='1') | os.environ.get('A_TRIALS')",
    "variable deleted | os.environ.pop('PATH') | 'PATH' in os.environ",
    "time zone | os.environ.update(TZ='Asia/Tokyo'); time.tzset() | time.tzname",
    "working directory | os.chdir('/') | os.getcwd()",
    "sys.path | sys.path.insert(0, '/a/trials') | '/a/trials' in sys.path",
    "sys.argv | sys.argv.append('--trial') | '--trial' in sys.argv",
    "sys.argv replaced | sys.argv = ['x'] | sys.argv == ['x']",
    "sys.meta_path | sys.meta_path.insert(0, Nothing()) | any(type(f) is Nothing for f in sys.meta_path)",
    "sys.stdout | sys.stdout = open(os.devnull, 'w') | sys.stdout.name",
    "sys.stderr | sys.stderr = None | sys.stderr is None",
    "sys.excepthook | sys.excepthook = print | sys.excepthook is print",
    "sys.displayhook | sys.displayhook = print | sys.displayhook is print",
    "sys.unraisablehook | sys.unraisablehook = print | sys.unraisablehook is print",
    "sys.breakpointhook | sys.breakpointhook = print | sys.breakpointhook is print",
    "threading.excepthook | threading.excepthook = print | threading.excepthook is print",
    "recursion limit | sys.setrecursionlimit(5000) | sys.getrecursionlimit()",
    "switch interval | sys.setswitchinterval(0.1) | sys.getswitchinterval()",
    "traceback limit | sys.tracebacklimit = 0 | getattr(sys, 'tracebacklimit', None)",
    "bytecode | sys.dont_write_bytecode = not sys.dont_write_bytecode | sys.dont_write_bytecode",
    "trace of threads | threading.settrace(lambda *_: None) | threading.gettrace() is None",
    "profile of threads | threading.setprofile(lambda *_: None) | threading.getprofile() is None",
    "stack size | threading.stack_size(1 << 20) | threading.stack_size()",
    "trace | sys.settrace(lambda *_: None) | sys.gettrace() is None",
    "gc thresholds | gc.set_threshold(1, 1, 1) | gc.get_threshold()",
    "gc off | gc.disable() | gc.isenabled()",
    "gc debug | gc.set_debug(gc.DEBUG_SAVEALL) | gc.get_debug()",
    "gc callbacks | gc.callbacks.append(lambda *_: None) | len(gc.callbacks)",
    "faulthandler | faulthandler.enable() | faulthandler.is_enabled()",
    "tracemalloc | tracemalloc.start() | tracemalloc.is_tracing()",
    "module __main__ | sys.modules['__main__'].trials = 1 | hasattr(sys.modules['__main__'], 'trials')",
    "decimal precision | context().prec = 3 | context().prec",
    "decimal of threads | decimal.DefaultContext.prec = 3 | (decimal.Context().prec, decimal.DefaultContext.prec)",
    "decimal traps | context().traps[decimal.Inexact] = True | context().traps[decimal.Inexact]",
    "random seed | random.seed(0) | random.random() == random.Random(0).random()",
    "locale | locale.setlocale(locale.LC_ALL, 'C.UTF-8') | [locale.setlocale(n) for n in LOCALES]",
    "socket timeout | socket.setdefaulttimeout(1.0) | socket.getdefaulttimeout()",
    "temporary folder | tempfile.tempdir = '/var' | tempfile.gettempdir()",
    "csv limit | csv.field_size_limit(7) | csv.field_size_limit()",
    "first weekday | calendar.setfirstweekday(6) | calendar.firstweekday()",
    "copyreg | copyreg.pickle(Nothing, lambda it: 'x') | 'Nothing' in [t.__name__ for t in copyreg.dispatch_table]",
    "asyncio policy | asyncio.set_event_loop_policy(Policy()) | type(asyncio.get_event_loop_policy()).__name__",
    "start method | multiprocessing.set_start_method('spawn') | multiprocessing.get_start_method(allow_none=True)",
    "executable | multiprocessing.set_executable('/bin/true') | str(multiprocessing.spawn.get_executable())",
    # What the kernel knows of the process.
    "umask | os.umask(0o007) | umask()",
    "limit of files | resource.setrlimit(FILES, (200, resource.getrlimit(FILES)[1])) | resource.getrlimit(FILES)",
    "cores | os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}) | os.sched_getaffinity(0)",
    "priority | os.nice(3) | os.getpriority(os.PRIO_PROCESS, 0)",
    "signal handler | signal.signal(signal.SIGUSR1, lambda *_: None) | signal.getsignal(signal.SIGUSR1)",
    "interrupt ignored | signal.signal(signal.SIGINT, signal.SIG_IGN) | signal.getsignal(signal.SIGINT)",
    "alarm | signal.setitimer(signal.ITIMER_REAL, 500.0) | signal.getitimer(signal.ITIMER_REAL)",
    "blocked signals | signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}) | blocked_signals()",
    "standard output's file | os.dup2(os.open(os.devnull, os.O_WRONLY), 1) | prints_to_nothing()",
    "a thread | threading.Thread(target=time.sleep, args=(60,), daemon=True).start() | threading.active_count()",
    # Warnings and logging.
    "warnings are errors | warnings.simplefilter('error') | [f[0] for f in warnings.filters if f[0] == 'error']",
    "warnings ignored | warnings.filterwarnings('ignore') | len(warnings.filters)",
    "showwarning | warnings.showwarning = print | warnings.showwarning is print",
    "formatwarning | warnings.formatwarning = print | warnings.formatwarning is print",
    "a warning shown | warn_twice() | warnings_shown()",
    "captured warnings | logging.captureWarnings(True) | warnings_captured()",
    "root level | logger().setLevel(1) | logger().level",
    "root handlers | logging.basicConfig(filename=f'{FOLDER}/log', force=True) | len(logger().handlers)",
    "a library's level | logger('matplotlib').setLevel(50) | logger('matplotlib').isEnabledFor(40)",
    "a library's propagation | logger('torch').propagate = False | logger('torch').propagate",
    "a logger of its own | own_logger() | state_of(logger('own'))",
    "logging disabled | logging.disable(50) | logger('x').isEnabledFor(40)",
    "a logger disabled | logger('asyncio').disabled = True | logger('asyncio').disabled",
    "level names | logging.addLevelName(20, 'TRIAL') | logging.getLevelName(20)",
    "record factory | logging.setLogRecordFactory(print) | logging.getLogRecordFactory() is print",
    "logger class | logging.setLoggerClass(type('Mine', (logging.Logger,), {})) | logging.getLoggerClass().__name__",
    # Modules.
    "state of a user's module | users_module().STATE.append(1) | seen_of_users_module()",
    "a patch of the user's module | users_module().answer = lambda: 0 | seen_of_users_module()",
    "a patch of builtins | builtins.trials = 1 | hasattr(builtins, 'trials')",
    "a patch of math | math.sqrt = abs | math.sqrt is abs",
    "a constant of a module | socket.SOMAXCONN = 1 | socket.SOMAXCONN",
    "a patch of numpy | numpy.float = float | hasattr(numpy, 'float')",
    "a name of torch deleted | del torch.tanh | hasattr(torch, 'tanh')",
    # numpy and tables.
    "numpy errors | numpy.seterr(all='raise') | numpy.geterr()",
    "numpy printing | numpy.set_printoptions(precision=2) | numpy.get_printoptions()['precision']",
    "numpy seed | numpy.random.seed(0) | numpy.random.rand() == numpy.random.RandomState(0).rand()",
    "numpy buffers | numpy.setbufsize(16 * 4096) | numpy.getbufsize()",
    "matplotlib parameters | matplotlib.rcParams['lines.linewidth'] = 9 | matplotlib.rcParams['lines.linewidth']",
    "pandas options | pandas.set_option('display.max_rows', 3) | pandas.get_option('display.max_rows')",
    "sklearn configuration | sklearn.set_config(assume_finite=True) | sklearn.get_config()['assume_finite']",
    # torch.
    "torch dtype | torch.set_default_dtype(torch.float64) | torch.get_default_dtype()",
    "torch device | torch.set_default_device('meta') | torch.empty(1).device",
    "torch threads | torch.set_num_threads(torch.get_num_threads() + 3) | torch.get_num_threads()",
    "torch interop threads | torch.set_num_interop_threads(7) | torch.get_num_interop_threads()",
    "grad mode | torch.set_grad_enabled(False) | torch.is_grad_enabled()",
    "anomaly detection | torch.autograd.set_detect_anomaly(True) | torch.is_anomaly_enabled()",
    "deterministic | torch.use_deterministic_algorithms(True, warn_only=True) | are_deterministic()",
    "float32 precision | torch.set_float32_matmul_precision('medium') | float32_precision()",
    "matmul tf32 | torch.backends.cuda.matmul.allow_tf32 = True | float32_precision()",
    "cudnn enabled | torch.backends.cudnn.enabled = not torch.backends.cudnn.enabled | torch.backends.cudnn.enabled",
    "cudnn benchmark | torch.backends.cudnn.benchmark = True | torch.backends.cudnn.benchmark",
    "cudnn deterministic | torch.backends.cudnn.deterministic = True | torch.backends.cudnn.deterministic",
    "cudnn allow_tf32 | torch.backends.cudnn.allow_tf32 = False | torch.backends.cudnn.allow_tf32",
    "mkldnn | torch.backends.mkldnn.enabled = False | torch.backends.mkldnn.enabled",
    "quantized engine | torch.backends.quantized.engine = other_engine() | torch.backends.quantized.engine",
    "fp16 reduction | matmul().allow_fp16_reduced_precision_reduction = False |"
    " matmul().allow_fp16_reduced_precision_reduction",
    "fp16 accumulation | matmul().allow_fp16_accumulation = True | matmul().allow_fp16_accumulation",
    "fp16 reduction in parts | matmul().allow_fp16_reduced_precision_reduction = (False, False) |"
    " matmul().allow_fp16_reduced_precision_reduction_split_k",
    "bf16 reduction in parts | matmul().allow_bf16_reduced_precision_reduction = (False, False) |"
    " matmul().allow_bf16_reduced_precision_reduction_split_k",
    "flash attention | torch.backends.cuda.enable_flash_sdp(False) | torch.backends.cuda.flash_sdp_enabled()",
    "torch printing | torch.set_printoptions(precision=2) | str(torch.tensor(1 / 3))",
    "torch seed | torch.manual_seed(0) | torch.initial_seed() == 0",
    "autocast | torch.set_autocast_enabled('cpu', True) | torch.is_autocast_enabled('cpu')",
    "autocast dtype | torch.set_autocast_dtype('cpu', torch.float16) | torch.get_autocast_dtype('cpu')",
    "denormals | torch.set_flush_denormal(True) | sys.float_info.min / 2 == 0.0",
    "module hooks | modules().register_module_forward_hook(lambda *_: None) | len(modules()._global_forward_hooks)",
    "argument checks | distribution().set_default_validate_args(False) | distribution()._validate_args",
    "hub folder | torch.hub.set_dir('/a/trials') | torch.hub.get_dir()",
    "trusted globals | torch.serialization.add_safe_globals([Nothing]) | Nothing in trusted()",
    "sharing strategy | torch.multiprocessing.set_sharing_strategy('file_system') |"
    " torch.multiprocessing.get_sharing_strategy()",
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
    for name in ("torch", "numpy", "matplotlib", "pandas", "sklearn"):
        globals()[name] = importlib.import_module(name)
    importlib.import_module("torch._dynamo")  # as torch does when it is first used


# What the table uses.

logger, context = logging.getLogger, globals()["decimal"].getcontext
LOCALES = (globals()["locale"].LC_NUMERIC, globals()["locale"].LC_COLLATE)
FILES = globals()["resource"].RLIMIT_NOFILE


class Nothing:
    """A finder that finds nothing."""

    def find_spec(self, *_: Any) -> None:
        return None


class Policy(asyncio.DefaultEventLoopPolicy):
    """Another class than Python's own."""


def umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def blocked_signals() -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def prints_to_nothing() -> bool:
    return os.readlink("/proc/self/fd/1") == os.devnull


def warn_from_a_line() -> None:
    warnings.warn("a trial's", UserWarning, stacklevel=1)


def warn_twice() -> None:
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        warn_from_a_line()


def warnings_shown() -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warn_from_a_line()
    return len(caught)


def warnings_captured() -> tuple[str, bool]:
    return warnings.showwarning.__module__, logging._warnings_showwarning is None  # type: ignore[attr-defined]


def own_logger() -> None:
    own = logger("own")
    own.setLevel(10)
    own.addHandler(logging.StreamHandler())
    own.addFilter(lambda record: True)


def state_of(of: logging.Logger) -> tuple[Any, ...]:
    return of.handlers, of.level, of.filters


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


def float32_precision() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), matmul().allow_tf32


def matmul() -> Any:
    return torch.backends.cuda.matmul


def other_engine() -> str:
    """An engine of torch for quantized operators that is not in use."""
    quantized = torch.backends.quantized
    return next(each for each in quantized.supported_engines if each not in ("none", quantized.engine))


def modules() -> Any:
    return torch.nn.modules.module


def distribution() -> Any:
    return torch.distributions.Distribution


def trusted() -> list[Any]:
    return torch.serialization.get_safe_globals()


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
        if name not in ("standard output's file", "limit of files", "alarm", "sys.stdout"):
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

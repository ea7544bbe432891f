"""What a trial can change in its process, and how the next trial would see it.

``main("fresh", FOLDER)`` prints what each property is in a new process, and ``warm
FOLDER`` what it is after a trial has changed it and the process was cleaned. ``FOLDER`` holds a module of the user's
own, and a folder with a package. The libraries are imported before, as in a fork server. Then one process serves a
trial for each property, which changes it in a thread of its own, as a function does, or in the main thread, as a class
does. What ends the use of a process is changed in a copy (fork).
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import calendar
import codecs
import contextlib
import copyreg
import csv
import decimal
import faulthandler
import gc
import importlib
import json
import json.encoder
import locale
import logging
import math
import multiprocessing
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import tracemalloc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

#: name -> (what a trial does, what the next trial sees).
PROPERTIES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
#: Those after which the process serves no further trial.
DIRTY = {
    *("sys.meta_path", "sys.stdout", "sys.stderr", "sys.excepthook", "sys.displayhook", "sys.unraisablehook"),
    *(
        "sys.breakpointhook",
        "threading.excepthook",
        "recursion limit",
        "switch interval",
        "traceback limit",
        "bytecode",
    ),
    *("trace of threads", "profile of threads", "stack size", "trace", "gc thresholds", "gc off", "gc debug"),
    *("gc callbacks", "faulthandler", "tracemalloc", "module __main__", "decimal precision", "decimal of threads"),
    *("decimal traps", "locale", "socket timeout", "csv limit", "first weekday", "copyreg", "asyncio policy"),
    *("start method", "executable", "umask", "limit of files", "cores", "priority", "signal handler"),
    *("interrupt ignored", "alarm", "blocked signals", "standard output's file", "a thread", "a child", "a port"),
    *("a socket", "a file with a buffer", "a finalizer", "a manager", "an exit handler by a library"),
    *("showwarning", "formatwarning", "captured warnings", "level names", "record factory", "logger class"),
    *("a patch of builtins", "a patch of math", "a patch of ssl", "a patch of a class", "a constant of a module"),
    *("a patch of torch", "a patch of torch.nn", "a patch of numpy", "a name of torch deleted"),
    *("a patch of torch by a library", "a package with a singleton", "an audit hook", "a codec"),
    *("numpy buffers", "matplotlib parameters", "pandas options", "sklearn configuration"),
    *("torch interop threads", "torch interop threads as before", "anomaly detection", "cudnn enabled", "mkldnn"),
    *("fp16 accumulation", "fp16 reduction in parts", "bf16 reduction in parts"),
    *("fp16 reduction", "flash attention", "torch printing", "autocast", "autocast dtype", "denormals", "module hooks"),
    *("argument checks", "hub folder", "trusted globals", "sharing strategy", "a process group", "an operator"),
}
#: What a trial holds on to in its own module, and where its user's module is.
KEPT: list[Any] = []
FOLDER = ""
#: Set by `import_libraries`.
torch: Any = None
numpy: Any = None
matplotlib: Any = None
pandas: Any = None
sklearn: Any = None


def import_libraries() -> None:
    """As the first trial's code does."""
    for name in ("torch", "numpy", "matplotlib", "pandas", "sklearn"):
        globals()[name] = importlib.import_module(name)
    importlib.import_module("torch._dynamo")  # as torch does when it is first used


def prop(name: str, change: Callable[[], object], seen: Callable[[], object]) -> None:
    PROPERTIES[name] = change, seen


def simple() -> None:
    """Python's own."""
    prop("environment", lambda: os.environ.update(A_TRIALS="1"), lambda: os.environ.get("A_TRIALS"))
    prop("variable deleted", lambda: os.environ.pop("PATH"), lambda: "PATH" in os.environ)

    def zone() -> None:
        os.environ["TZ"] = "Asia/Tokyo"
        time.tzset()

    prop("time zone", zone, lambda: time.tzname)
    prop("working directory", lambda: os.chdir("/"), os.getcwd)
    prop("sys.path", lambda: sys.path.insert(0, "/a/trials"), lambda: "/a/trials" in sys.path)
    prop("sys.argv", lambda: sys.argv.append("--trial"), lambda: "--trial" in sys.argv)
    prop("sys.argv replaced", lambda: setattr(sys, "argv", ["x"]), lambda: sys.argv == ["x"])
    prop(
        "sys.meta_path",
        lambda: sys.meta_path.insert(0, Nothing()),
        lambda: any(type(f) is Nothing for f in sys.meta_path),
    )
    prop("sys.stdout", lambda: setattr(sys, "stdout", open(os.devnull, "w")), lambda: sys.stdout.name)  # noqa: SIM115
    prop("sys.stderr", lambda: setattr(sys, "stderr", None), lambda: sys.stderr is None)
    for hook in ("excepthook", "displayhook", "unraisablehook", "breakpointhook"):
        prop(f"sys.{hook}", lambda h=hook: setattr(sys, h, print), lambda h=hook: getattr(sys, h) is print)
    prop("threading.excepthook", lambda: setattr(threading, "excepthook", print), lambda: threading.excepthook is print)
    prop("recursion limit", lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit)
    prop("switch interval", lambda: sys.setswitchinterval(0.1), sys.getswitchinterval)
    prop("traceback limit", lambda: setattr(sys, "tracebacklimit", 0), lambda: getattr(sys, "tracebacklimit", None))
    prop(
        "bytecode",
        lambda: setattr(sys, "dont_write_bytecode", not sys.dont_write_bytecode),
        lambda: sys.dont_write_bytecode,
    )
    prop("trace of threads", lambda: threading.settrace(lambda *_: None), lambda: threading.gettrace() is None)
    prop("profile of threads", lambda: threading.setprofile(lambda *_: None), lambda: threading.getprofile() is None)
    prop("stack size", lambda: threading.stack_size(1 << 20), threading.stack_size)
    prop("trace", lambda: sys.settrace(lambda *_: None), lambda: sys.gettrace() is None)
    prop("gc thresholds", lambda: gc.set_threshold(1, 1, 1), gc.get_threshold)
    prop("gc off", gc.disable, gc.isenabled)
    prop("gc debug", lambda: gc.set_debug(gc.DEBUG_SAVEALL), gc.get_debug)
    prop("gc callbacks", lambda: gc.callbacks.append(lambda *_: None), lambda: len(gc.callbacks))
    prop("faulthandler", faulthandler.enable, faulthandler.is_enabled)
    prop("tracemalloc", tracemalloc.start, tracemalloc.is_tracing)
    prop(
        "module __main__",
        lambda: setattr(sys.modules["__main__"], "trials", 1),
        lambda: hasattr(sys.modules["__main__"], "trials"),
    )
    prop("decimal precision", lambda: setattr(decimal.getcontext(), "prec", 3), lambda: decimal.getcontext().prec)
    prop(
        "decimal of threads",
        lambda: setattr(decimal.DefaultContext, "prec", 3),
        lambda: (decimal.Context().prec, decimal.DefaultContext.prec),
    )
    prop(
        "decimal traps",
        lambda: decimal.getcontext().traps.update({decimal.Inexact: True}),
        lambda: decimal.getcontext().traps[decimal.Inexact],
    )
    prop("random seed", lambda: random.seed(0), lambda: random.random() == random.Random(0).random())
    prop(
        "locale",
        lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
        lambda: locale.setlocale(locale.LC_NUMERIC) + locale.setlocale(locale.LC_COLLATE),
    )
    prop("socket timeout", lambda: socket.setdefaulttimeout(1.0), socket.getdefaulttimeout)
    prop("temporary folder", lambda: setattr(tempfile, "tempdir", "/var"), tempfile.gettempdir)
    prop("csv limit", lambda: csv.field_size_limit(7), csv.field_size_limit)
    prop("first weekday", lambda: calendar.setfirstweekday(6), calendar.firstweekday)
    prop(
        "copyreg",
        lambda: copyreg.pickle(Nothing, lambda it: "x"),
        lambda: any(t.__name__ == "Nothing" for t in copyreg.dispatch_table),
    )
    prop(
        "asyncio policy",
        lambda: asyncio.set_event_loop_policy(Policy()),
        lambda: type(asyncio.get_event_loop_policy()).__name__,
    )
    prop(
        "start method",
        lambda: multiprocessing.set_start_method("spawn"),
        lambda: multiprocessing.get_start_method(allow_none=True),
    )
    prop(
        "executable",
        lambda: multiprocessing.set_executable("/bin/true"),
        lambda: str(multiprocessing.spawn.get_executable()),
    )


class Nothing:
    """A finder that finds nothing."""

    def find_spec(self, *_: Any) -> None:
        return None


class Policy(asyncio.DefaultEventLoopPolicy):
    """Another class than Python's own."""


def of_the_process() -> None:
    """What the kernel knows of the process."""

    def umask() -> int:
        value = os.umask(0)
        os.umask(value)
        return value

    prop("umask", lambda: os.umask(0o007), umask)

    def soft() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    prop("limit of files", soft, lambda: resource.getrlimit(resource.RLIMIT_NOFILE))
    prop("cores", lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}), lambda: os.sched_getaffinity(0))
    prop("priority", lambda: os.nice(3), lambda: os.getpriority(os.PRIO_PROCESS, 0))
    prop(
        "signal handler",
        main_only(lambda: signal.signal(signal.SIGUSR1, lambda *_: None)),
        lambda: signal.getsignal(signal.SIGUSR1),
    )
    prop(
        "interrupt ignored",
        main_only(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)),
        lambda: signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    )
    prop("alarm", lambda: signal.setitimer(signal.ITIMER_REAL, 500.0), lambda: signal.getitimer(signal.ITIMER_REAL))
    prop(
        "blocked signals",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}),
        lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    )
    prop(
        "standard output's file",
        lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1),
        lambda: os.readlink("/proc/self/fd/1") == os.devnull,
    )
    prop(
        "a thread", lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(), threading.active_count
    )
    prop("a child", lambda: KEPT.append(subprocess.Popen(["sleep", "60"])), lambda: 0)
    prop("a port", lambda: KEPT.append(socket.create_server(("127.0.0.1", 0))), lambda: 0)
    prop("a socket", lambda: KEPT.append(socket.socket()), lambda: 0)
    prop("a file with a buffer", lambda: KEPT.append(open(f"{FOLDER}/out", "w")) or KEPT[-1].write("x"), lambda: 0)  # noqa: SIM115


def main_only(change: Callable[[], object]) -> Callable[[], object]:
    """A change that Python allows to the main thread alone; a thread of its own leaves it out."""
    return lambda: change() if threading.current_thread() is threading.main_thread() else None


def of_reports() -> None:
    """Warnings and logging."""
    prop(
        "warnings are errors",
        lambda: warnings.simplefilter("error"),
        lambda: [f[0] for f in warnings.filters if f[0] == "error"],
    )
    prop("warnings ignored", lambda: warnings.filterwarnings("ignore"), lambda: len(warnings.filters))
    prop("showwarning", lambda: setattr(warnings, "showwarning", print), lambda: warnings.showwarning is print)
    prop("formatwarning", lambda: setattr(warnings, "formatwarning", print), lambda: warnings.formatwarning is print)

    def shown() -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            warn_from_a_line()
        return len(caught)

    prop("a warning shown", warn_twice, shown)
    prop(
        "captured warnings",
        lambda: logging.captureWarnings(True),
        lambda: (warnings.showwarning.__module__, logging._warnings_showwarning is None),
    )  # type: ignore[attr-defined]
    prop("root level", lambda: logging.getLogger().setLevel(1), lambda: logging.getLogger().level)
    prop(
        "root handlers",
        lambda: logging.basicConfig(filename=f"{FOLDER}/log", force=True),
        lambda: len(logging.getLogger().handlers),
    )
    prop(
        "a library's level",
        lambda: logging.getLogger("matplotlib").setLevel(50),
        lambda: logging.getLogger("matplotlib").isEnabledFor(40),
    )
    prop(
        "a library's propagation",
        lambda: setattr(logging.getLogger("torch"), "propagate", False),
        lambda: logging.getLogger("torch").propagate,
    )
    prop(
        "a logger of its own",
        own_logger,
        lambda: (logging.getLogger("own").handlers, logging.getLogger("own").level, logging.getLogger("own").filters),
    )
    prop("logging disabled", lambda: logging.disable(50), lambda: logging.getLogger("x").isEnabledFor(40))
    prop(
        "a logger disabled",
        lambda: setattr(logging.getLogger("asyncio"), "disabled", True),
        lambda: logging.getLogger("asyncio").disabled,
    )
    prop("level names", lambda: logging.addLevelName(20, "TRIAL"), lambda: logging.getLevelName(20))
    prop("record factory", lambda: logging.setLogRecordFactory(print), lambda: logging.getLogRecordFactory() is print)
    prop(
        "logger class",
        lambda: logging.setLoggerClass(type("Mine", (logging.Logger,), {})),
        lambda: logging.getLoggerClass().__name__,
    )


def warn_from_a_line() -> None:
    warnings.warn("a trial's", UserWarning, stacklevel=1)


def warn_twice() -> None:
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        warn_from_a_line()


def own_logger() -> None:
    logger = logging.getLogger("own")
    logger.setLevel(10)
    logger.addHandler(logging.StreamHandler())
    logger.addFilter(lambda record: True)


def of_modules() -> None:
    """Modules: the user's own, and patches."""

    def use() -> Any:
        if FOLDER not in sys.path:
            sys.path.insert(0, FOLDER)
        return importlib.import_module("a_users_module")

    def state() -> Any:
        try:
            return use().STATE
        finally:
            sys.path.remove(FOLDER)

    prop("state of a user's module", lambda: use().STATE.append(1), state)
    prop(
        "a patch of the user's module", lambda: setattr(use(), "answer", lambda: 0), lambda: state() and use().answer()
    )
    prop("a patch of builtins", lambda: setattr(builtins, "trials", 1), lambda: hasattr(builtins, "trials"))
    prop("a patch of math", lambda: setattr(math, "sqrt", abs), lambda: math.sqrt is abs)
    prop(
        "a patch of ssl",
        lambda: setattr(ssl, "_create_default_https_context", ssl._create_unverified_context),
        lambda: 0,
    )
    prop("a patch of a class", lambda: setattr(json.encoder.JSONEncoder, "default", lambda self, it: "x"), lambda: 0)
    prop("a constant of a module", lambda: setattr(socket, "SOMAXCONN", 1), lambda: socket.SOMAXCONN)
    prop("a patch of torch", lambda: setattr(torch, "relu", torch.tanh), lambda: 0)
    prop("a patch of torch.nn", lambda: setattr(torch.nn.Linear, "forward", lambda self, x: x), lambda: 0)
    prop("a patch of numpy", lambda: setattr(numpy, "float", float), lambda: hasattr(numpy, "float"))
    prop("a name of torch deleted", lambda: delattr(torch, "tanh"), lambda: hasattr(torch, "tanh"))


def of_packages() -> None:
    """Packages whose state is not known, and what packages do while a trial runs. They are under FOLDER."""

    def package(name: str) -> Any:
        if f"{FOLDER}/site-packages" not in sys.path:
            sys.path.append(f"{FOLDER}/site-packages")
        return importlib.import_module(name)

    prop("a package with a singleton", lambda: package("an_accelerator").STATE.append("bf16"), lambda: 0)
    prop("an exit handler by a library", lambda: library_function("import atexit; atexit.register(print)"), lambda: 0)
    prop("a patch of torch by a library", lambda: library_function("import torch; torch.relu = torch.tanh"), lambda: 0)
    prop("an audit hook", lambda: sys.addaudithook(lambda *_: None), lambda: 0)
    prop("a codec", lambda: codecs.register(lambda name: None), lambda: 0)


def library_function(text: str) -> None:
    """Run code of a file of scikit-learn's, which is imported."""
    file = f"{Path(sklearn.__file__).parent}/somewhere.py"
    exec(compile(text, file, "exec"), {"__name__": "sklearn.somewhere"})


def of_exits() -> None:
    """What runs at exit: the note must be there, or the process must end."""

    def note(name: str) -> Callable[[], None]:
        return lambda: Path(FOLDER, name).write_text("x")  # type: ignore[func-returns-value]

    def seen(name: str) -> Callable[[], object]:
        # In a new process nothing was asked for: it is the cleaned one that must have written.
        return lambda: MODE == "fresh" or Path(FOLDER, name).exists()

    prop("an exit handler", lambda: atexit.register(note("handler")), seen("handler"))
    prop(
        "a finalizer",
        lambda: KEPT.append(kept := Nothing()) or weakref.finalize(kept, note("finalizer")),
        seen("finalizer"),
    )
    prop("a progress bar", lambda: KEPT.extend(importlib.import_module("tqdm").tqdm(range(2))), lambda: 0)
    prop("a manager", lambda: KEPT.append(multiprocessing.get_context("fork").Manager()), lambda: 0)


def of_numpy_and_tables() -> None:
    prop("numpy errors", lambda: numpy.seterr(all="raise"), lambda: numpy.geterr())
    prop("numpy printing", lambda: numpy.set_printoptions(precision=2), lambda: numpy.get_printoptions()["precision"])
    prop("numpy seed", lambda: numpy.random.seed(0), lambda: numpy.random.rand() == numpy.random.RandomState(0).rand())
    prop("numpy buffers", lambda: numpy.setbufsize(16 * 4096), lambda: numpy.getbufsize())
    prop(
        "matplotlib parameters",
        lambda: matplotlib.rcParams.update({"lines.linewidth": 9}),
        lambda: matplotlib.rcParams["lines.linewidth"],
    )
    prop(
        "pandas options",
        lambda: pandas.set_option("display.max_rows", 3),
        lambda: pandas.get_option("display.max_rows"),
    )
    prop(
        "sklearn configuration",
        lambda: sklearn.set_config(assume_finite=True),
        lambda: sklearn.get_config()["assume_finite"],
    )


def of_torch() -> None:
    prop("torch dtype", lambda: torch.set_default_dtype(torch.float64), lambda: torch.get_default_dtype())
    prop("torch device", lambda: torch.set_default_device("meta"), lambda: torch.empty(1).device)
    prop("torch threads", lambda: torch.set_num_threads(torch.get_num_threads() + 3), lambda: torch.get_num_threads())
    prop("torch interop threads", lambda: torch.set_num_interop_threads(7), lambda: torch.get_num_interop_threads())
    prop(
        "torch interop threads as before",
        lambda: torch.set_num_interop_threads(torch.get_num_interop_threads()),
        lambda: 0,
    )
    prop("grad mode", lambda: torch.set_grad_enabled(False), lambda: torch.is_grad_enabled())
    prop("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True), lambda: torch.is_anomaly_enabled())
    prop(
        "deterministic",
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    )
    prop(
        "float32 precision",
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
    )
    prop(
        "matmul tf32",
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()),
    )
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        prop(
            f"cudnn {name}",
            lambda n=name: setattr(torch.backends.cudnn, n, not getattr(torch.backends.cudnn, n)),
            lambda n=name: getattr(torch.backends.cudnn, n),
        )
    prop("mkldnn", lambda: setattr(torch.backends.mkldnn, "enabled", False), lambda: torch.backends.mkldnn.enabled)
    prop(
        "fp16 reduction",
        lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    )
    prop(
        "fp16 accumulation",
        lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    )
    for kind in ("fp16", "bf16"):
        flag = f"allow_{kind}_reduced_precision_reduction"
        prop(
            f"{kind} reduction in parts",
            lambda n=flag: setattr(torch.backends.cuda.matmul, n, (False, False)),
            lambda n=f"{flag}_split_k": getattr(torch.backends.cuda.matmul, n),
        )
    prop(
        "flash attention",
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.flash_sdp_enabled(),
    )
    prop("torch printing", lambda: torch.set_printoptions(precision=2), lambda: str(torch.tensor(1 / 3)))
    prop("torch seed", lambda: torch.manual_seed(0), lambda: torch.initial_seed() == 0)
    prop("autocast", lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu"))
    prop(
        "autocast dtype",
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    )
    prop("denormals", lambda: torch.set_flush_denormal(True), lambda: sys.float_info.min / 2 == 0.0)
    prop(
        "module hooks",
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
        lambda: len(torch.nn.modules.module._global_forward_hooks),
    )
    prop(
        "argument checks",
        lambda: torch.distributions.Distribution.set_default_validate_args(False),
        lambda: torch.distributions.Distribution._validate_args,
    )
    prop("hub folder", lambda: torch.hub.set_dir("/a/trials"), lambda: torch.hub.get_dir())
    prop(
        "trusted globals",
        lambda: torch.serialization.add_safe_globals([Nothing]),
        lambda: Nothing in torch.serialization.get_safe_globals(),
    )
    prop(
        "sharing strategy",
        lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
        lambda: torch.multiprocessing.get_sharing_strategy(),
    )
    prop("a process group", process_group, lambda: torch.distributed.is_initialized())
    prop("an operator", operator, lambda: 0)
    prop("torch.vmap", lambda: torch.vmap(torch.sin)(torch.ones(2)), lambda: 0)


def process_group() -> None:
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def operator() -> None:
    KEPT.append(torch.library.Library("a_trials", "DEF"))
    KEPT[-1].define("f(Tensor x) -> Tensor")


for table in (simple, of_the_process, of_reports, of_modules, of_packages, of_exits, of_numpy_and_tables, of_torch):
    table()

MODE = ""


def main(mode: str, folder: str) -> None:
    """Print {property: [what the main thread sees, what a new thread sees]}, and with "warm" {name: [why, seen]}."""
    global MODE, FOLDER
    MODE, FOLDER = mode, folder
    import_libraries()  # as a fork server has done
    from fluidtune.cluster.process_reset import ProcessBaseline

    baseline = None
    if mode == "warm":
        gc.freeze()  # as in a fork server
        baseline = ProcessBaseline()
        baseline.note_imports()
    output = sys.stdout
    if mode == "changing":
        change_everything()
        os.write(1, b"changed")
        os._exit(0)
    found: dict[str, Any] = {}
    for name, (change, seen) in PROPERTIES.items():
        if baseline is None:
            found[name] = both(seen)
            continue
        for where in ("thread", "main"):
            call = partial(cleaned, baseline, change, seen, where)
            found[f"{name} ({where})"] = in_a_copy(call) if name in DIRTY else call()
    output.write(json.dumps(found))


def change_everything() -> None:
    """Do all that the process survives."""
    for name, (change, _) in PROPERTIES.items():
        if name not in ("standard output's file", "limit of files", "alarm", "sys.stdout", "an audit hook"):
            with contextlib.suppress(Exception):  # what was changed before may forbid it
                change()
    end_kept()


def end_kept() -> None:
    """End the processes that a trial has started."""
    for kept in KEPT:
        if isinstance(kept, subprocess.Popen):
            kept.kill()
        elif hasattr(kept, "shutdown") and not isinstance(kept, socket.socket):
            kept.shutdown()


def cleaned(baseline: Any, change: Callable[[], object], seen: Callable[[], object], where: str) -> Any:
    """Why the process is not used again, else None, and what the next trial sees."""
    if where == "main":
        change()
    else:
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()
    why = baseline.restore()
    return [why, both(seen) if why is None else None]


def both(seen: Callable[[], object]) -> list[str]:
    """What this thread sees, and what a new one sees."""
    found = [repr(seen())]
    thread = threading.Thread(target=lambda: found.append(repr(seen())))
    thread.start()
    thread.join()
    return found


def in_a_copy(call: Callable[[], Any]) -> Any:
    """``call()`` in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(call())
        except BaseException:
            answer = json.dumps([None, traceback.format_exc()])
        os.write(write, answer.encode())
        end_kept()
        os._exit(0)
    os.close(write)
    impatience = threading.Timer(60, os.kill, (child, signal.SIGKILL))
    impatience.start()
    with os.fdopen(read, "rb") as end:
        answer = end.read()
    impatience.cancel()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else [None, "the process died"]

"""What a trial can change in the Python interpreter and in its process, and how each is put back.

A `Setting` reads a value and writes it back. Nothing is decided here: `process_reset` reads all settings before a
trial's code runs, and writes back what differs afterwards. The settings of libraries are in `library_settings`, those
of logging in `logging_state`.
"""

from __future__ import annotations

import asyncio
import calendar
import copyreg
import csv
import decimal
import faulthandler
import gc
import locale
import logging
import multiprocessing.spawn
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fluidtune import startup

#: What an attribute reads as that is not there.
ABSENT = object()
#: The attributes of a decimal context.
_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_LOCALES = {name: getattr(locale, name) for name in dir(locale) if name.startswith("LC_") and name != "LC_ALL"}
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass(frozen=True)
class Setting:
    """One thing that a trial can change. ``name``: in words. ``write`` is given a value that ``read`` returned.

    ``once``: nobody can put it back, so a process in which it has changed serves no further trial. ``always``: it is
    written even if it reads as before.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    once: bool = False
    always: bool = False


def attribute(owner: Any, name: str) -> Setting:
    """The setting that is an attribute of a module or object. An attribute that is not there reads as `ABSENT`."""

    def write(value: Any) -> None:
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    words = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    return Setting(words, lambda: getattr(owner, name, ABSENT), write)


def contents(name: str, owner: list[Any]) -> Setting:
    """The setting that is what a list holds; the list stays the same object."""

    def write(value: list[Any]) -> None:
        owner[:] = value

    return Setting(name, lambda: list(owner), write)


def entries(name: str, owner: MutableMapping[Any, Any]) -> Setting:
    """The setting that is what a mapping holds; the mapping stays the same object."""

    def write(value: dict[Any, Any]) -> None:
        for key in set(owner) - set(value):
            del owner[key]
        for key, each in value.items():
            if key not in owner or owner[key] is not each:
                owner[key] = each

    return Setting(name, lambda: dict(owner), write)


def cannot_be_put_back(name: str, read: Callable[[], Any]) -> Setting:
    """A setting that makes the worker dirty once it has changed."""
    return Setting(name, read, lambda value: None, once=True)


def interpreter_settings() -> list[Setting]:
    """All settings of the interpreter and the process, in the order in which they are put back."""
    return [
        entries("environment variables", os.environ),
        # After the environment, which has TZ: the C library's idea of local time.
        Setting("time zone", lambda: time.tzname, lambda names: time.tzset()),
        Setting("working directory", _cwd, os.chdir),
        *_of_sys(),
        *_of_threads(),
        *_of_signals(),
        *_of_the_kernel(),
        *_of_warnings(),
        *_of_modules(),
    ]


def _of_sys() -> list[Setting]:
    import __main__

    streams = [attribute(sys, name) for name in ("stdin", "stdout", "stderr", "__stdout__", "__stderr__")]
    hooks = ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "tracebacklimit", "dont_write_bytecode")
    return [
        contents("sys.path", sys.path),
        contents("sys.meta_path", sys.meta_path),
        contents("sys.path_hooks", sys.path_hooks),
        # Code may hold another list than sys.argv by now.
        Setting("sys.argv", lambda: list(sys.argv), lambda value: setattr(sys, "argv", list(value))),
        *streams,
        *(attribute(sys, name) for name in hooks),
        Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
        Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval),
        *_digits(),
        Setting("asyncgen hooks", sys.get_asyncgen_hooks, lambda hooks: sys.set_asyncgen_hooks(*hooks)),
        Setting("trace function", sys.gettrace, sys.settrace),
        Setting("profile function", sys.getprofile, sys.setprofile),
        Setting("dlopen flags", sys.getdlopenflags, sys.setdlopenflags),
        # The worker's own first import has set others, see `startup`.
        Setting("garbage collector's thresholds", startup.usual_thresholds, lambda value: gc.set_threshold(*value)),
        Setting("garbage collector's switch", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        Setting("garbage collector's debugging", gc.get_debug, gc.set_debug),
        contents("garbage collector's callbacks", gc.callbacks),
        Setting("faulthandler", faulthandler.is_enabled, _switch(faulthandler.enable, faulthandler.disable)),
        Setting("tracemalloc", tracemalloc.is_tracing, _switch(tracemalloc.start, tracemalloc.stop)),
        entries("module __main__", vars(__main__)),
    ]


def _digits() -> list[Setting]:
    """The limit of digits of an int's string, where this Python has it (3.10.7)."""
    if not hasattr(sys, "get_int_max_str_digits"):
        return []
    return [Setting("limit of an int's digits", sys.get_int_max_str_digits, sys.set_int_max_str_digits)]


def _of_threads() -> list[Setting]:
    def set_stack_size(value: int) -> None:
        threading.stack_size(value)

    def write_policy(policy: Any) -> None:
        asyncio.set_event_loop_policy(policy)

    return [
        attribute(threading, "excepthook"),
        Setting("trace function of new threads", threading.gettrace, threading.settrace),  # type: ignore[arg-type]
        Setting("profile function of new threads", threading.getprofile, threading.setprofile),
        Setting("stack size of new threads", threading.stack_size, set_stack_size),
        Setting("decimal's context", _decimal_of(decimal.getcontext), _write_decimal_to(decimal.getcontext)),
        # From which new threads take theirs.
        Setting(
            "decimal.DefaultContext",
            _decimal_of(lambda: decimal.DefaultContext),
            _write_decimal_to(lambda: decimal.DefaultContext),
        ),
        # None: nobody has asked for the policy. `asyncio.get_event_loop_policy` would make one.
        Setting("asyncio's policy", lambda: asyncio.events._event_loop_policy, write_policy),  # type: ignore[attr-defined]
    ]


def _of_signals() -> list[Setting]:
    """Handlers by number. None stands for a handler that Python has not set, and cannot set."""
    settings = []
    for number in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}):
        name = getattr(number, "name", f"signal {int(number)}")
        settings.append(Setting(f"handler of {name}", _handler_of(number), _write_handler_of(number)))
    return [
        *settings,
        Setting(
            "blocked signals",
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            lambda blocked: signal.pthread_sigmask(signal.SIG_SETMASK, blocked),
        ),
        Setting("timers", lambda: [any(signal.getitimer(t)) for t in _TIMERS], _stop_timers),
    ]


def _handler_of(number: int) -> Callable[[], Any]:
    return lambda: signal.getsignal(number)


def _write_handler_of(number: int) -> Callable[[Any], object]:
    return lambda handler: signal.signal(number, handler)


def _stop_timers(running: list[bool]) -> None:
    for timer in _TIMERS:
        signal.setitimer(timer, 0.0)


def _of_the_kernel() -> list[Setting]:
    def set_umask(value: int) -> None:
        os.umask(value)

    def write_limits(value: dict[str, tuple[int, int]]) -> None:
        for name, limits in value.items():
            if resource.getrlimit(_LIMITS[name]) != limits:
                resource.setrlimit(_LIMITS[name], limits)

    settings = [
        Setting("umask", _umask, set_umask),
        Setting("limits", lambda: {name: resource.getrlimit(which) for name, which in _LIMITS.items()}, write_limits),
        Setting(
            "priority",
            lambda: os.getpriority(os.PRIO_PROCESS, 0),
            lambda value: os.setpriority(os.PRIO_PROCESS, 0, value),
        ),
        cannot_be_put_back("standard streams' files", lambda: [_file_behind(descriptor) for descriptor in range(3)]),
    ]
    if hasattr(os, "sched_getaffinity"):
        affinity = Setting("cores", lambda: os.sched_getaffinity(0), lambda value: os.sched_setaffinity(0, value))
        settings.append(affinity)
    return settings


def _of_warnings() -> list[Setting]:
    def write_filters(value: list[Any]) -> None:
        with warnings.catch_warnings():
            pass  # leaving it lets every module forget which warnings it has shown
        warnings.filters[:] = value  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]

    # What logging keeps in its module: how records are made, and what warnings did before they were captured.
    logs = ("raiseExceptions", "lastResort", "_loggerClass", "_logRecordFactory", "_warnings_showwarning")
    names = [name for name in ("_showwarnmsg_impl", "showwarning", "formatwarning") if hasattr(warnings, name)]
    return [
        Setting("filters of warnings", lambda: list(warnings.filters), write_filters),
        entries("warnings shown once", warnings.onceregistry),  # type: ignore[attr-defined]
        *(attribute(warnings, name) for name in names),
        *(attribute(logging, name) for name in logs),
    ]


def _of_modules() -> list[Setting]:
    def write_start_method(method: str | None) -> None:
        multiprocessing.set_start_method(method, force=True)  # None: the next one to set it may do so

    def write_locale(value: dict[str, str]) -> None:
        for name, text in value.items():
            locale.setlocale(_LOCALES[name], text)

    def set_field_size(value: int) -> None:
        csv.field_size_limit(value)

    return [
        Setting("default timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
        Setting("locale", lambda: {name: locale.setlocale(which) for name, which in _LOCALES.items()}, write_locale),
        Setting(
            "start method of processes",
            lambda: multiprocessing.get_start_method(allow_none=True),
            write_start_method,
        ),
        Setting("executable of processes", multiprocessing.spawn.get_executable, multiprocessing.spawn.set_executable),
        attribute(tempfile, "tempdir"),
        Setting("csv's limit of a field", csv.field_size_limit, set_field_size),
        Setting("first day of the week", calendar.firstweekday, calendar.setfirstweekday),
        entries("copyreg's table", copyreg.dispatch_table),
    ]


def _switch(on: Callable[[], object], off: Callable[[], object]) -> Callable[[bool], object]:
    return lambda value: on() if value else off()


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""  # it was removed


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


def _file_behind(descriptor: int) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.fstat(descriptor)
        return found.st_dev, found.st_ino
    return None


def _decimal_of(context: Callable[[], decimal.Context]) -> Callable[[], Any]:
    def read() -> Any:
        found = context()
        return [getattr(found, name) for name in _DECIMAL], dict(found.traps), dict(found.flags)

    return read


def _write_decimal_to(context: Callable[[], decimal.Context]) -> Callable[[Any], None]:
    def write(value: Any) -> None:
        found = context()
        for name, each in zip(_DECIMAL, value[0], strict=True):
            setattr(found, name, each)
        found.traps.update(value[1])
        found.flags.update(value[2])

    return write

"""Settings that a trial can change in its process: those that are put back, and those whose change ends the process.

`put_back` has what a plain training script touches. `looked_at` has the rest, which is only read. Both read libraries
before a trial imports them, too: in a forked process they are there, out of sight.
"""

from __future__ import annotations

import decimal
import importlib
import locale
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing import util
from typing import Any, NamedTuple

from fluidtune.cluster.cleaning.trial_modules import OURS
from fluidtune.cluster.sharing.gpu_probe import torch_on_gpu
from fluidtune.torch_flags import flag, set_flag

#: Returns an imported module by its name, be it in sight or not; None: it is not imported.
Find = Callable[[str], Any]


class Setting(NamedTuple):
    """What a trial can change. ``name``: in words. ``write`` takes what ``read`` has returned; None: it is only read.

    ``always``: it is written even if it reads as before.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None
    always: bool = False

    def value(self) -> Any:
        """What it is now; if it cannot be read, what is said about that."""
        try:
            return self.read()
        except Exception as error:
            return str(error)

    def put_back(self, value: Any) -> None:
        """Write it; whether that was possible shows in its value."""
        with suppress(Exception):
            if self.write is not None:
                self.write(value)


def put_back(find: Find) -> list[Setting]:
    """What is put back, in this order."""
    logs = _Logging()
    return [
        Setting("loggers", logs.changed, lambda _: logs.restore(), always=True),
        Setting("environment variables", lambda: dict(os.environ), _write_environment),
        # After the environment, which has TZ: the C library's idea of local time.
        Setting("time zone", lambda: time.tzname, lambda _: time.tzset()),
        Setting("working directory", os.getcwd, os.chdir),
        Setting("sys.path", lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
        Setting("sys.argv", lambda: list(sys.argv), lambda value: setattr(sys, "argv", list(value))),
        Setting("temporary folder", lambda: tempfile.tempdir, lambda value: setattr(tempfile, "tempdir", value)),
        # Always, so that each module forgets which warnings it has shown.
        Setting("filters of warnings", lambda: list(warnings.filters), _write_filters, always=True),
        *(_of_numpy(find("numpy")) if find("numpy") else ()),
        *(_of_torch(find("torch")) if find("torch") else ()),
        Setting("figures of pyplot", _figures, lambda _: sys.modules["matplotlib.pyplot"].close("all")),
    ]


def _write_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    os.environ.update(value)


def _write_filters(value: list[Any]) -> None:
    with warnings.catch_warnings():
        pass  # leaving it lets all modules forget
    warnings.filters[:] = value  # type: ignore[index]


def _figures() -> list[int]:
    pyplot = sys.modules.get("matplotlib.pyplot")
    return [] if pyplot is None else pyplot.get_fignums()


#: level, handlers, filters, propagate, disabled of a logger.
_Logger = tuple[int, list[Any], list[Any], bool, bool]
_NEW: _Logger = (logging.NOTSET, [], [], True, False)


class _Logging:
    """Loggers and their handlers before a trial's code ran.

    Loggers that a trial has made cannot be removed, so they become as a new logger is. Handlers that a trial has added
    are flushed and closed, as `logging.shutdown` does when a process ends.
    """

    def __init__(self) -> None:
        self._loggers = {name: _state(logger) for name, logger in _loggers().items()}
        handlers = {each for _, handlers, *_ in self._loggers.values() for each in handlers}
        self._handlers = {each: (each.level, each.formatter, list(each.filters)) for each in handlers}
        self._disabled = logging.root.manager.disable

    def changed(self) -> list[str]:
        """The names of the loggers that are not as they were."""
        return [name for name, logger in _loggers().items() if _state(logger) != self._loggers.get(name, _NEW)]

    def restore(self) -> None:
        if logging.root.manager.disable != self._disabled:
            logging.disable(self._disabled)
        gone = []
        for name, logger in _loggers().items():
            before = level, handlers, filters, propagate, disabled = self._loggers.get(name, _NEW)
            if _state(logger) != before:
                gone += [handler for handler in logger.handlers if handler not in self._handlers]
                logger.handlers[:], logger.filters[:] = handlers, filters
                logger.propagate, logger.disabled = propagate, disabled
                logger.setLevel(level)
        for handler, (level, formatter, filters) in self._handlers.items():
            handler.level, handler.formatter, handler.filters[:] = level, formatter, filters
        for handler in reversed(gone):
            with suppress(Exception):  # as in logging.shutdown
                handler.flush()
                handler.close()


def _loggers() -> dict[str, logging.Logger]:
    """All loggers by name; "" is the root."""
    known = logging.root.manager.loggerDict
    return {"": logging.root, **{name: each for name, each in list(known.items()) if isinstance(each, logging.Logger)}}


def _state(logger: logging.Logger) -> _Logger:
    return logger.level, list(logger.handlers), list(logger.filters), logger.propagate, logger.disabled


def _of_numpy(numpy: Any) -> list[Setting]:
    def write(value: dict[str, Any]) -> None:
        numpy.set_printoptions(**{key: each for key, each in value.items() if key != "override_repr"})

    return [
        Setting("numpy.errstate", numpy.geterr, lambda value: numpy.seterr(**value)),
        Setting("numpy.printoptions", numpy.get_printoptions, write),
    ]


#: Flags of torch.backends that are put back. Those of ``fp32_precision`` are torch's since 2.9. They come last: the
#: older names of the same set several of them at once.
_FLAGS = (
    *("cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32", "mkldnn.allow_tf32", "cuda.matmul.allow_tf32"),
    *("fp32_precision", "cudnn.fp32_precision", "mkldnn.fp32_precision", "cuda.matmul.fp32_precision"),
    *("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision", "mkldnn.matmul.fp32_precision"),
    *("mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
)


def _of_torch(torch: Any) -> list[Setting]:
    def of_backends(name: str) -> Setting:
        return Setting(
            f"torch.backends.{name}", partial(flag, torch.backends, name), partial(set_flag, torch.backends, name)
        )

    def deterministic() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def be_deterministic(value: tuple[bool, bool]) -> None:
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])

    return [
        # A new thread takes the number that was set last, which this thread's own number does not show.
        Setting("torch's threads", torch.get_num_threads, torch.set_num_threads, always=True),
        Setting("torch's grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        # Where the trial is a function, it is set in the trial's thread; the default of the process is None.
        # (torch.get_default_device imports modules, which a trial may not want.)
        Setting("torch's default device", lambda: torch.empty(0).device, lambda _: torch.set_default_device(None)),
        Setting("torch's deterministic algorithms", deterministic, be_deterministic),
        # torch says an error instead of the value where an old name and a new one were used.
        Setting("torch's precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        *map(of_backends, _FLAGS),
    ]


#: Names in modules: plain values, containers, and functions that say how something is set.
_NAMES = {
    "sys": "stdin stdout stderr __stdout__ __stderr__ meta_path path_hooks getrecursionlimit getswitchinterval "
    "get_int_max_str_digits get_asyncgen_hooks gettrace getprofile getdlopenflags",
    "gc": "callbacks isenabled get_debug",
    "fluidtune.startup": "usual_thresholds",
    "threading": "gettrace getprofile stack_size",
    "faulthandler": "is_enabled",
    "tracemalloc": "is_tracing",
    "logging": "_levelToName _nameToLevel",
    "socket": "getdefaulttimeout",
    "csv": "field_size_limit",
    "calendar": "firstweekday",
    "copyreg": "dispatch_table",
    "multiprocessing.spawn": "get_executable",
    "numpy": "geterrcall getbufsize",
    "sklearn": "get_config",
    "pandas._config.config": "_global_config",
    "torch": "is_anomaly_enabled is_anomaly_check_nan_enabled is_autocast_cache_enabled is_warn_always_enabled "
    "get_num_interop_threads multiprocessing.get_sharing_strategy utils.deterministic.fill_uninitialized_memory",
    "torch.distributed": "is_initialized",
    "torch.distributions.distribution": "Distribution._validate_args",
    "torch.hub": "_hub_dir",
    "torch._tensor_str": "PRINT_OPTS.precision PRINT_OPTS.threshold PRINT_OPTS.edgeitems PRINT_OPTS.linewidth "
    "PRINT_OPTS.sci_mode",
    "torch.serialization": "get_safe_globals",
    "torch.backends": "cudnn.enabled cudnn.benchmark_limit mkldnn.enabled mkldnn.deterministic opt_einsum.enabled "
    "opt_einsum.strategy quantized.engine cuda.matmul.allow_fp16_reduced_precision_reduction "
    "cuda.matmul.allow_bf16_reduced_precision_reduction cuda.flash_sdp_enabled cuda.mem_efficient_sdp_enabled "
    "cuda.math_sdp_enabled cuda.cudnn_sdp_enabled cuda.matmul.allow_fp16_accumulation "
    "cuda.matmul.allow_fp16_reduced_precision_reduction_split_k "
    "cuda.matmul.allow_bf16_reduced_precision_reduction_split_k "
    "cuda.preferred_linalg_library cuda.preferred_blas_library",
    "torch.nn.modules.module": "_global_is_full_backward_hook _global_buffer_registration_hooks "
    "_global_module_registration_hooks _global_parameter_registration_hooks _global_backward_pre_hooks "
    "_global_backward_hooks _global_forward_pre_hooks _global_forward_hooks _global_forward_hooks_always_called",
}
#: The packages among these that are imported to be looked at.
_THERE = sys.stdlib_module_names | OURS
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_LOCALES = [getattr(locale, name) for name in dir(locale) if name.startswith("LC_") and name != "LC_ALL"]
_START_METHODS = multiprocessing.get_all_start_methods()
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS = sorted(signal.valid_signals())


def looked_at(find: Find) -> list[Setting]:
    """What ends the process if it has changed."""
    modules = {
        name: importlib.import_module(name) if name.partition(".")[0] in _THERE else find(name) for name in _NAMES
    }
    torch, matplotlib = find("torch"), find("matplotlib")
    return [
        *(
            Setting(f"{name}.{path}", partial(_content, module, path))
            for name, module in modules.items()
            for path in (_NAMES[name].split() if module is not None else ())
        ),
        Setting("module __main__", lambda: dict(vars(sys.modules["__main__"]))),
        Setting("signal handlers", lambda: [signal.getsignal(each) for each in _SIGNALS]),
        Setting("blocked signals", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        Setting("timers", lambda: [any(signal.getitimer(each)) for each in _TIMERS]),
        Setting("umask", _umask),
        Setting("limits", lambda: [resource.getrlimit(each) for each in _LIMITS]),
        Setting("priority", lambda: os.getpriority(os.PRIO_PROCESS, 0)),
        Setting("cores", lambda: hasattr(os, "sched_getaffinity") and os.sched_getaffinity(0)),
        *(Setting(f"the file of stream {each}", partial(_file_behind, each)) for each in range(3)),
        Setting("locale", lambda: [locale.setlocale(each) for each in _LOCALES]),
        Setting("decimal's contexts", lambda: [_decimal(decimal.getcontext()), _decimal(decimal.DefaultContext)]),
        Setting("asyncio's policy", _asyncio_policy),
        # Where none is set, the first question sets the default.
        Setting("start method of processes", lambda: multiprocessing.get_start_method(True) or _START_METHODS[0]),
        Setting("finalizers that run at exit", _new(_finalizers)),
        Setting("finalizers of multiprocessing", _new(_finalizers_of_multiprocessing)),
        *(_of_torchs_modes(torch) if torch else ()),
        *([Setting("matplotlib.rcParams", lambda: _rc_params(matplotlib))] if matplotlib else ()),
    ]


def _of_torchs_modes(torch: Any) -> list[Setting]:
    return [
        Setting("torch's autocast", lambda: [torch.is_autocast_enabled(each) for each in ("cpu", "cuda")]),
        Setting("autocast's dtypes", lambda: [torch.get_autocast_dtype(each) for each in ("cpu", "cuda")]),
        # A number below which floats are denormal: with flush-to-zero half of it is 0.
        Setting("torch's denormals", lambda: sys.float_info.min / 2 == 0.0),
        # Asked without a GPU, torch would open CUDA.
        Setting("torch's mode of waits", lambda: torch.cuda.get_sync_debug_mode() if torch_on_gpu() else 0),
        Setting("operators of torch.library", _new(partial(_operators, torch.library))),
    ]


def _operators(library: Any) -> list[str]:
    """The first call of `torch.vmap` registers its kernels, which do not count."""
    found = [*(_value(library, "_defs") or ()), *(_value(library, "_impls") or ())]
    return [each for each in found if "/FuncTorchBatched" not in each]


def _value(owner: Any, path: str) -> Any:
    """What a dotted path stands for, or what it returns if it is a function; None: there is no such thing."""
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner() if callable(owner) else owner


def _content(owner: Any, path: str) -> Any:
    """A copy of what is held by what a path stands for."""
    return _copy(_value(owner, path))


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in dict.items(value)}
    return type(value)(value) if type(value) in (list, set) else value


def _new(look: Callable[[], Iterable[Any]]) -> Callable[[], set[Any]]:
    """A reader of what there is more than now."""
    before = set(look())
    return lambda: set(look()) - before


def _rc_params(matplotlib: Any) -> dict[str, Any]:
    """The first figure chooses a backend; on machines without a display that is agg."""
    params: dict[str, Any] = _copy(matplotlib.rcParams)
    chosen = params.pop("backend", None)
    return {**params, "backend_fallback": isinstance(chosen, str) and chosen.lower() != "agg" and chosen}


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


def _file_behind(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _decimal(context: decimal.Context) -> list[Any]:
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    return [*(getattr(context, name) for name in names), dict(context.traps)]


def _asyncio_policy() -> Any:
    """None: it was not asked for so far, or it is Python's own."""
    policy = vars(sys.modules.get("asyncio.events", sys)).get("_event_loop_policy")
    return None if type(policy).__module__.startswith(("asyncio", "builtins")) else policy


def _finalizers() -> list[Any]:
    """`weakref` has no public list of them. Those of torch.library withdraw operators, which are looked at by name."""
    alive = [(each, each.peek()) for each, info in list(weakref.finalize._registry.items()) if info.atexit]  # type: ignore[attr-defined]
    return [each for each, found in alive if found and getattr(found[1], "__module__", None) != "torch.library"]


def _finalizers_of_multiprocessing() -> list[Any]:
    return [key for key in list(util._finalizer_registry) if key[0] is not None]  # type: ignore[attr-defined]

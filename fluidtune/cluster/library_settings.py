"""What a trial can change in numpy, torch, matplotlib, pandas and scikit-learn, and how each is put back.

A library's settings are read when its import ends (`library_imports`), so that they are those of a new process,
whoever imports it. A library that is not imported is not touched.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fluidtune.cluster.process_settings import Setting, attribute, cannot_be_put_back, entries

#: A number below which floats are denormal: with flush-to-zero half of it is 0.
_SMALLEST_NORMAL = sys.float_info.min


def library_settings(name: str, module: Any) -> list[Setting]:
    """The settings of a library that was imported; none for a library that is not known here."""
    make = KNOWN.get(name)
    return [] if make is None else make(module)


def _numpy(numpy: Any) -> list[Setting]:
    def write_print(value: dict[str, Any]) -> None:
        numpy.set_printoptions(**{key: each for key, each in value.items() if key != "override_repr"})

    return [
        Setting("numpy.errstate", numpy.geterr, lambda value: numpy.seterr(**value)),
        Setting("numpy.seterrcall", numpy.geterrcall, numpy.seterrcall),
        Setting("numpy.printoptions", numpy.get_printoptions, write_print),
        Setting("numpy.bufsize", numpy.getbufsize, numpy.setbufsize),
    ]


def _matplotlib(matplotlib: Any) -> list[Setting]:
    params = matplotlib.rcParams

    def read() -> dict[str, Any]:
        return dict.copy(params)  # params[...] would choose a backend

    def write(value: dict[str, Any]) -> None:
        dict.update(params, value)

    return [Setting("matplotlib.rcParams", read, write), Setting("figures of pyplot", lambda: _figures() > 0, _close)]


def _figures() -> int:
    pyplot = sys.modules.get("matplotlib.pyplot")
    return len(pyplot.get_fignums()) if pyplot is not None else 0


def _close(left: bool) -> None:
    sys.modules["matplotlib.pyplot"].close("all")


def _pandas(pandas: Any) -> list[Setting]:
    def leaves(options: Any, prefix: str = "") -> Iterator[str]:
        for name in dir(options):
            value = getattr(options, name)
            if type(value) is type(options):
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    def read() -> dict[str, Any]:
        with _silent():
            return {name: pandas.get_option(name) for name in names}

    def write(value: dict[str, Any]) -> None:
        with _silent():
            for name, each in value.items():
                if pandas.get_option(name) != each:
                    pandas.set_option(name, each)

    with _silent():
        names = list(leaves(pandas.options))
    return [Setting("pandas.options", read, write)]


@contextmanager
def _silent() -> Iterator[None]:
    """No warnings: pandas warns of the options that a later release will not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _sklearn(sklearn: Any) -> list[Setting]:
    return [Setting("sklearn.config", sklearn.get_config, lambda value: sklearn.set_config(**value))]


def _torch(torch: Any) -> list[Setting]:
    return [
        *_of_tensors(torch),
        *_of_modes(torch),
        *_of_backends(torch),
        *_of_modules(torch),
        *_of_groups(torch),
    ]


def _of_tensors(torch: Any) -> list[Setting]:
    # torch has no public way to read them.
    options = sys.modules["torch._tensor_str"].PRINT_OPTS  # type: ignore[attr-defined]

    def write_deterministic(value: tuple[bool, bool]) -> None:
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])

    return [
        Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        # Where the loop is a function, it is set in the loop's thread; the default of the process is None.
        Setting("torch's default device", torch.get_default_device, lambda device: torch.set_default_device(None)),
        entries("torch.printoptions", vars(options)),
        Setting(
            "torch's deterministic algorithms",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            write_deterministic,
        ),
        attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        Setting("torch.set_warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
        Setting("torch's denormals", lambda: _SMALLEST_NORMAL / 2 == 0.0, torch.set_flush_denormal),
    ]


def _of_modes(torch: Any) -> list[Setting]:
    def write_anomaly(value: tuple[bool, bool]) -> None:
        torch.autograd.set_detect_anomaly(value[0], value[1])

    settings = [
        Setting("torch's grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting(
            "torch's anomaly detection",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            write_anomaly,
        ),
        Setting("torch's autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ]
    for device in ("cpu", "cuda"):
        autocast = _for(device, torch.is_autocast_enabled, torch.set_autocast_enabled)
        dtype = _for(device, torch.get_autocast_dtype, torch.set_autocast_dtype)
        settings += [
            Setting(f"torch's autocast on {device}", *autocast),
            Setting(f"torch's autocast dtype on {device}", *dtype),
        ]
    return settings


def _for(device: str, read: Callable[[str], Any], write: Callable[[str, Any], object]) -> tuple[Any, Any]:
    return lambda: read(device), lambda value: write(device, value)


#: torch's backends and the flags of each, as far as a release has them.
_FLAGS = {
    "cudnn": ("enabled", "benchmark", "deterministic", "benchmark_limit"),
    "mkldnn": ("enabled", "deterministic"),
    "opt_einsum": ("enabled", "strategy"),
    "quantized": ("engine",),
    "cuda.matmul": ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
}
#: How float32 is computed, in the order in which it is put back. The last names, those of torch 2.9 and later, are put
#: back last: the older ones set several of them at once.
_PRECISIONS = (
    ("cudnn", "allow_tf32"),
    ("mkldnn", "allow_tf32"),
    ("cuda.matmul", "allow_tf32"),
    ("", "fp32_precision"),
    ("cudnn", "fp32_precision"),
    ("mkldnn", "fp32_precision"),
    ("cuda.matmul", "fp32_precision"),
    ("cudnn.conv", "fp32_precision"),
    ("cudnn.rnn", "fp32_precision"),
    ("mkldnn.matmul", "fp32_precision"),
    ("mkldnn.conv", "fp32_precision"),
    ("mkldnn.rnn", "fp32_precision"),
)
#: The kernels of scaled_dot_product_attention.
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def _of_backends(torch: Any) -> list[Setting]:
    settings = []
    for backend, names in _FLAGS.items():
        owner = _backend(torch, backend)
        settings += [_attribute(f"torch.backends.{backend}.{name}", owner, name) for name in names if _has(owner, name)]
    for kernel in _ATTENTION:
        read = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled", None)
        if read is not None:
            write = getattr(torch.backends.cuda, f"enable_{kernel}_sdp")
            settings.append(Setting(f"torch's {kernel} attention", read, write))
    return [*settings, _precision(torch)]


def _precision(torch: Any) -> Setting:
    owners = [(_backend(torch, backend), name) for backend, name in _PRECISIONS]
    owners = [(owner, name) for owner, name in owners if _has(owner, name)]

    def read() -> list[Any]:
        return [torch.get_float32_matmul_precision(), *(_flag(owner, name) for owner, name in owners)]

    def write(value: list[Any]) -> None:
        torch.set_float32_matmul_precision(value[0])
        for (owner, name), each in zip(owners, value[1:], strict=True):
            if each is not None:  # torch's word for a flag that this processor has not
                setattr(owner, name, each)

    return Setting("torch's precision of float32", read, write)


def _flag(owner: Any, name: str) -> Any:
    """A flag's value. torch refuses to say what was set by an old name and by a new one; that is its error then."""
    try:
        return getattr(owner, name)
    except RuntimeError as error:
        return str(error)


def _backend(torch: Any, path: str) -> Any:
    """The object ``torch.backends.<path>``; None: this release has none."""
    owner = torch.backends
    for part in path.split(".") if path else ():
        owner = getattr(owner, part, None)
    return owner


def _has(owner: Any, name: str) -> bool:
    try:
        return owner is not None and hasattr(owner, name)
    except (RuntimeError, AssertionError):
        return False


def _attribute(words: str, owner: Any, name: str) -> Setting:
    return Setting(words, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _of_modules(torch: Any) -> list[Setting]:
    """torch's Python modules."""
    nn = sys.modules["torch.nn.modules.module"]
    hooks = [(name, value) for name, value in vars(nn).items() if name.startswith("_global_") and "hook" in name]
    settings = [entries(f"torch.nn's {name}", value) for name, value in hooks if isinstance(value, dict)]

    def write_safe(value: frozenset[Any]) -> None:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(value))

    sharing = torch.multiprocessing
    return [
        *settings,
        attribute(nn, "_global_is_full_backward_hook"),
        attribute(torch.distributions.Distribution, "_validate_args"),
        attribute(torch.hub, "_hub_dir"),
        Setting(
            "globals that torch.load trusts", lambda: frozenset(torch.serialization.get_safe_globals()), write_safe
        ),
        Setting("torch's sharing strategy", sharing.get_sharing_strategy, sharing.set_sharing_strategy),
    ]


def _of_groups(torch: Any) -> list[Setting]:
    """What only a new process can undo, and torch's threads."""
    distributed, library = torch.distributed, torch.library
    set_threads = torch.set_num_interop_threads
    asked: list[int] = []

    @functools.wraps(set_threads)
    def set_num_interop_threads(count: int) -> None:
        asked.append(count)
        set_threads(count)

    # It may be called once per process, and that it was called does not always show in the number.
    torch.set_num_interop_threads = set_num_interop_threads
    return [
        # A new thread takes the number that was set last, which this thread's own number does not show.
        Setting("torch's threads", torch.get_num_threads, torch.set_num_threads, always=True),
        cannot_be_put_back("torch's interop threads", lambda: (torch.get_num_interop_threads(), len(asked))),
        cannot_be_put_back(
            "torch's default process group", lambda: distributed.is_available() and distributed.is_initialized()
        ),
        cannot_be_put_back("operators of torch.library", lambda: _operators(library)),
    ]


def _operators(library: Any) -> int:
    """The number of operators and kernels that Python code has registered, without those for `torch.vmap`.

    torch registers these when `vmap` is called for the first time. It has no public list of either.
    """
    homes = (sys.modules.get(f"torch._functorch.{name}") for name in ("predispatch", "vmap"))  # newer and older torch
    torchs = next((lib for home in homes if (lib := getattr(home, "VMAP_DECOMPOSITIONS_LIB", None)) is not None), None)
    registered, own = ("_defs", "_impls"), "_op_impls"
    found = {name for each in registered for name in getattr(library, each, ())}
    return len(found - getattr(torchs, own, set()))


#: The libraries whose settings are known, by the name of the module.
KNOWN: dict[str, Callable[[Any], list[Setting]]] = {
    "numpy": _numpy,
    "torch": _torch,
    "matplotlib": _matplotlib,
    "pandas": _pandas,
    "sklearn": _sklearn,
}

"""The random streams of this process: those of Python, numpy and torch, as one value.

They are needed twice. A commit has them as they are at its boundary. And a trial's *initial* streams, which its process
had when the trial's code began there, are given to every process that runs this code again. So what the code draws
before its loop (``random_split``, the initial weights of a module that it does not prepare) is the same everywhere. A
library that is not loaded has no stream here, and is not loaded for it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from fluidtune.device_kinds import ACCELERATORS, started

#: By library, the state of its stream: "python", "numpy", "torch" (its CPU generator), and that of an accelerator by
#: torch's type of it, such as "cuda". One that was loaded later has its seed instead: "torch_seed", "cuda_seed".
Streams = dict[str, Any]


def _of(name: str, device: str | None) -> str:
    """The device, if it is of this type of torch's; else the current one of that type."""
    return device if device and device.partition(":")[0] == name else name


def capture_streams(device: str | None = None) -> Streams:
    """The state of the streams now. ``device``: the accelerator whose generator is meant; None: the current one."""
    streams: Streams = {"python": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        streams["numpy"] = numpy.random.get_state()
    if torch is not None:
        streams["torch"] = torch.get_rng_state()
        streams |= {name: each.get_rng_state(_of(name, device)) for name, each in started().items()}
    return streams


def complete_streams(streams: Streams) -> Streams:
    """``streams``, which were captured before, with the seed of each generator of torch that did not exist then.

    Such a generator began with this seed, unless the trial's code has called ``torch.manual_seed``; then the other
    processes call it as well.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return streams
    streams = dict(streams)
    if "torch" not in streams:
        streams.setdefault("torch_seed", torch.initial_seed())
    for name, each in started().items():
        if name not in streams:
            streams.setdefault(f"{name}_seed", each.initial_seed())
    return streams


def restore_streams(streams: Streams, device: str | None = None) -> None:
    """Let the streams go on from this state. ``device``: see `capture_streams`."""
    random.setstate(streams["python"])
    if "numpy" in streams:
        import numpy

        numpy.random.set_state(streams["numpy"])
    if not any(name in streams for name in ("torch", "torch_seed")):
        return
    import torch

    if "torch" in streams:
        torch.set_rng_state(streams["torch"])
    else:
        torch.default_generator.manual_seed(streams["torch_seed"])
    for name in ACCELERATORS:
        each = torch.get_device_module(name)
        if name in streams and each.is_available():
            each.set_rng_state(streams[name], _of(name, device))
        elif f"{name}_seed" in streams and each.is_available():
            each.manual_seed(streams[f"{name}_seed"])

"""What differs by the kind of a device: `KINDS` has one entry for each kind, and everything else asks it.

A new kind is one entry. No other kind that computes has its resource, and none its type of torch's, unless that is
"cpu". The entry names what is the kind's own code: a probe as in `cluster/sharing/gpu_probe.py`, a meter of memory as
in `salus_share/memory.py`, and a way for tensors as in `elastic/divided/pair.py`. Of torch's module of a kind, such as
``torch.cuda``, everybody else but MPS and lanes calls only what torch's other modules of accelerators have as well.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

#: CUDA's driver, and what it answers before a call of ``cuInit``: CUDA_ERROR_NOT_INITIALIZED in its documentation.
CUDA_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED = 3


def cuda_started(driver: Any) -> bool:
    """Whether this process has started CUDA, so that no child of it can use the GPU. ``driver``: CUDA's; None: none.

    The driver says so itself. An import that only loads it, as torch's does on a machine with a GPU, starts nothing.
    """
    context = ctypes.c_void_p()
    return driver is not None and driver.cuCtxGetCurrent(ctypes.byref(context)) != _NOT_INITIALIZED


def loaded_library(library: str) -> ctypes.CDLL | None:
    """The library, if this process has loaded it. It is not loaded for this."""
    with suppress(OSError):
        return ctypes.CDLL(library, os.RTLD_NOW | os.RTLD_NOLOAD)
    return None


@dataclass(frozen=True)
class DeviceKind:
    """What holds for all devices of a kind.

    ``resource``: Ray's name of it. ``noun``: what people call one. ``cores``: a device is as many cores of its node as
    one trial asks for, its processes have the node's memory, and two trials on it take turns. Otherwise it is one whole
    of the resource and has memory of its own. ``computes``: False: it only stands for a device. ``torch``: the type of
    torch's devices there. ``visible``: the environment variable by which a process knows which devices it may use;
    None: there is none. ``quiet``: the one that is 1 where torch is to look for devices without starting them.
    ``started``: whether this process has started them, so that no fork of it can use them. ``fatal``: what torch says
    in an error after which the process can use the device no more. ``mps``: its processes can be clients of MPS.

    By `pkgutil.resolve_name`: ``probe``: what a worker sees of the device. ``meter``: that of a trial's memory there;
    "": that of the process. ``group``: by what tensors go to another device; "": they go through the node's memory.
    """

    resource: str
    noun: str
    cores: bool = False
    computes: bool = True
    torch: str = "cpu"
    visible: str | None = None
    quiet: str | None = None
    started: Callable[[], bool] = lambda: False
    fatal: str | None = None
    mps: bool = False
    probe: str = "fluidtune.cluster.sharing.gpu_probe:Probe"
    meter: str = ""
    group: str = ""


#: By name, which is what settings and the event log have.
KINDS = {
    "gpu": DeviceKind(
        "GPU",
        "GPU",
        torch="cuda",
        visible="CUDA_VISIBLE_DEVICES",
        quiet="PYTORCH_NVML_BASED_CUDA_CHECK",  # torch's documentation of CUDA's environment variables
        started=lambda: cuda_started(loaded_library(CUDA_DRIVER)),
        fatal="CUDA error",
        mps=True,
        probe="fluidtune.cluster.sharing.gpu_probe:GpuProbe",
        meter="salus_share.memory:CudaMeter",
        group="fluidtune.elastic.divided.pair:nccl",
    ),
    "cpu": DeviceKind("CPU", "CPU core", cores=True),
    "emulated": DeviceKind("GPU", "emulated device", computes=False),
}
# A kind is found by what a trial asks for, and by where torch's tensors are.
for _all in [e.resource for e in KINDS.values() if e.computes], [e.torch for e in KINDS.values() if e.torch != "cpu"]:
    assert len(set(_all)) == len(_all), _all
#: torch's types of devices on which tensors may be, the node's own first; and those with memory of their own.
TORCH_TYPES = tuple(sorted({kind.torch for kind in KINDS.values()}, key=lambda name: (name != "cpu", name)))
ACCELERATORS = TORCH_TYPES[1:]


def asked_for(resources: Mapping[str, float]) -> str:
    """The kind of devices that these resources have: cores where there is nothing else."""
    others = (name for name, kind in KINDS.items() if kind.computes and not kind.cores)
    return next((name for name in others if resources.get(KINDS[name].resource, 0) > 0), "cpu")


def by_resource() -> dict[str, DeviceKind]:
    """The kinds that compute, by Ray's name."""
    return {kind.resource: kind for kind in KINDS.values() if kind.computes}


def on_accelerator(tensor: Any) -> bool:
    """Whether the tensor is in memory of a device's own."""
    return tensor.device.type in ACCELERATORS


def of_torch(device_type: str) -> DeviceKind:
    """The kind whose devices are of this type of torch's."""
    return next(each for each in KINDS.values() if each.torch == device_type)


def started() -> dict[str, Any]:
    """By type, torch's modules of the accelerators on which this process computes with it, such as ``torch.cuda``."""
    torch = sys.modules.get("torch")
    found = {} if torch is None else {name: getattr(torch, name, None) for name in ACCELERATORS}
    return {name: each for name, each in found.items() if each is not None and each.is_initialized()}

"""What `fluidtune doctor` checks on a machine with NVIDIA GPUs. Nothing here starts CUDA or changes a setting.

The GPUs' state is read from NVML, which is passed in so that tests can play machines that are not at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

#: The name of what was checked, whether it is well, and what was found or what to type. None: it is not there, and jobs
#: run without it.
Check = tuple[str, bool | None, str]


def gpu_checks(nvml: Any, torch: Any, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """All checks of this machine's GPUs. ``nvml``: pynvml, initialised. ``torch``: the module; None: there is none."""
    count = nvml.nvmlDeviceGetCount()
    gpus: dict[int, Any] = {}
    for index in range(count):
        try:
            gpus[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            yield f"gpu {index}", False, f"does not answer ({error}); see dmesg for Xid messages, and reset or drain it"
    if not gpus:
        return
    yield _driver(nvml, torch)
    yield _visible(nvml, gpus, environment)
    for index, gpu in gpus.items():
        yield from _state(nvml, index, gpu)
    yield from _kinds(nvml, gpus, environment)
    if len(gpus) > 1:
        yield _peers(nvml, gpus)
        yield _collectives(torch)


def _driver(nvml: Any, torch: Any) -> Check:
    """Whether torch was built for CUDA, and for one that the driver can run.

    NVIDIA's CUDA compatibility guide: a driver runs programs of its own major version of CUDA, and of earlier ones.
    """
    number = nvml.nvmlSystemGetCudaDriverVersion_v2()
    major, minor = number // 1000, number % 1000 // 10
    driver = f"driver {nvml.nvmlSystemGetDriverVersion()} for CUDA {major}.{minor}"
    if torch is None:
        return "cuda", False, f"{driver}, and no torch"
    built = torch.version.cuda
    if built is None:
        return "cuda", False, f"{driver}, and a torch without CUDA: pip install torch from the index of CUDA {major}"
    well = int(built.split(".")[0]) <= major
    return "cuda", well, f"{driver}, torch for {built}" + ("" if well else f": install a driver for CUDA {built}")


def _visible(nvml: Any, gpus: Mapping[int, Any], environment: Mapping[str, str]) -> Check:
    """Whether CUDA_VISIBLE_DEVICES names GPUs of this machine."""
    said = environment.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return "visible gpus", True, f"all of {len(gpus)}"
    names = [str(nvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus.values()]
    entries = [entry.strip() for entry in said.split(",") if entry.strip()]

    def known(entry: str) -> bool:
        # CUDA's documentation: a UUID may be shortened as long as it is unique; a MIG instance is not in NVML's list.
        return (
            entry.startswith("MIG-")
            or (entry.isdigit() and int(entry) in gpus)
            or (entry.startswith("GPU-") and sum(name.startswith(entry) for name in names) == 1)
        )

    strange = [entry for entry in entries if not known(entry)]
    if strange:
        return "visible gpus", False, f"CUDA_VISIBLE_DEVICES={said}: no GPU here is {strange[0]}, and CUDA stops there"
    return "visible gpus", bool(entries), f"CUDA_VISIBLE_DEVICES={said}: {len(entries)} of {len(gpus)}"


def _state(nvml: Any, index: int, gpu: Any) -> Iterator[Check]:
    """One GPU's compute mode, MIG and memory errors; only what is not as usual."""
    mode = _ask(nvml, nvml.nvmlDeviceGetComputeMode, gpu)
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        yield f"gpu {index}", False, f"compute mode Prohibited: nvidia-smi -i {index} -c DEFAULT"
    elif mode is not None and mode != nvml.NVML_COMPUTEMODE_DEFAULT:
        remedy = f"trials share it under MPS only; without MPS: --max-packing 1, or nvidia-smi -i {index} -c DEFAULT"
        yield f"gpu {index}", False, f"compute mode Exclusive: {remedy}"
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, gpu)
    if mig is not None and mig[0] == 1:
        remedy = "start Ray with its instances' UUIDs (nvidia-smi -L) in CUDA_VISIBLE_DEVICES; a trial takes one"
        yield f"gpu {index}", True, f"divided by MIG: {remedy}"
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = _ask(nvml, lambda handle: nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds), gpu)
    if errors:
        remedy = f"processes that meet them die; drain it, then nvidia-smi -i {index} --gpu-reset"
        yield f"gpu {index}", False, f"{errors} uncorrected memory errors since the driver was loaded: {remedy}"


def _kinds(nvml: Any, gpus: Mapping[int, Any], environment: Mapping[str, str]) -> Iterator[Check]:
    """GPUs of several kinds: CUDA's order is then not NVML's, and a trial's speed depends on where it is."""
    names = [str(nvml.nvmlDeviceGetName(gpu)) for gpu in gpus.values()]
    if len(set(names)) > 1:
        ordered = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        found = f"{', '.join(sorted(set(names)))} in one machine: speeds are measured as if all were alike"
        remedy = "" if ordered else "; set CUDA_DEVICE_ORDER=PCI_BUS_ID before Ray starts, so that numbers mean one GPU"
        yield "kinds of gpus", ordered, found + remedy


def _peers(nvml: Any, gpus: Mapping[int, Any]) -> Check:
    """Whether the GPUs can read each other's memory; else NCCL goes through the memory of the machine."""
    apart = [(first, second) for first, second in combinations(gpus, 2) if not _reach(nvml, gpus[first], gpus[second])]
    if not apart:
        return "peer access", True, "each GPU reaches every other one"
    first, second = apart[0]
    found = f"{len(apart)} pairs do not reach each other, as {first} and {second}: NCCL is slower there"
    return "peer access", True, f"{found}; if it hangs, set NCCL_P2P_DISABLE=1"


def _reach(nvml: Any, first: Any, second: Any) -> bool:
    status = _ask(nvml, lambda gpu: nvml.nvmlDeviceGetP2PStatus(gpu, second, nvml.NVML_P2P_CAPS_INDEX_READ), first)
    return status is None or status == nvml.NVML_P2P_STATUS_OK


def _collectives(torch: Any) -> Check:
    there = torch is not None and torch.distributed.is_nccl_available()
    return "nccl", there, "there" if there else "not in this torch: a trial cannot have several GPUs"


def _ask(nvml: Any, ask: Callable[[Any], Any], of: Any) -> Any:
    """Ask what not every GPU supports; None if this one does not."""
    try:
        return ask(of)
    except nvml.NVMLError:
        return None

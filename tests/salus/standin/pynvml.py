"""A stand-in for NVIDIA's library on a node with the GPUs of $NVML_STANDIN: "UUID,UUID", all of one kind.

The file $NVML_STANDIN_LOST, if there is one, has the numbers of those that fell off the bus.
"""

import os
from pathlib import Path
from types import SimpleNamespace


class NVMLError(Exception):
    """As pynvml's."""


class GpuIsLost(NVMLError):
    """As pynvml's."""

    value = 15


def _uuids():
    return os.environ["NVML_STANDIN"].split(",")


def _nothing(*_):
    return None


nvmlInit = nvmlShutdown = _nothing
nvmlDeviceGetMigMode = nvmlDeviceGetUtilizationRates = _nothing
nvmlDeviceGetComputeRunningProcesses = nvmlDeviceGetMPSComputeRunningProcesses = _nothing


def nvmlSystemGetDriverVersion():
    return "580.0"


def nvmlDeviceGetCount():
    return len(_uuids())


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetMemoryInfo(handle):
    lost = Path(os.environ.get("NVML_STANDIN_LOST", os.devnull))
    if lost.exists() and str(handle) in lost.read_text().split():
        raise GpuIsLost("GPU is lost")
    return SimpleNamespace(used=0, total=1 << 34)


def nvmlDeviceGetUUID(handle):
    return _uuids()[handle]


def nvmlDeviceGetName(handle):
    return "A GPU"

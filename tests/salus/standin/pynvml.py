"""A stand-in for NVIDIA's library on a node with the GPUs of $NVML_STANDIN: "UUID,UUID", all of one kind."""

import os
from types import SimpleNamespace


class NVMLError(Exception):
    """As pynvml's."""


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
    return SimpleNamespace(used=0, total=1 << 34)


def nvmlDeviceGetUUID(handle):
    return _uuids()[handle]


def nvmlDeviceGetName(handle):
    return "A GPU"

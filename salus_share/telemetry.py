"""What NVML says about the GPUs of this node: utilisation, memory by process, driver, MIG.

Without a driver there is no telemetry: the log says so once, and every answer is empty.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import asdict, dataclass, field
from typing import Any

log = logging.getLogger(__name__)
#: What NVML answers of a GPU that is no more: NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED in its
#: documentation (nvmlReturn_t), and NVML_ERROR_UNKNOWN. The last one is judgement: nvidia-smi prints "Unknown
#: Error" where the driver cannot reach a GPU.
LOST = (15, 16, 999)
_said: set[str] = set()


def say_once(text: str) -> None:
    """Log one line, the first time only."""
    if text not in _said:
        _said.add(text)
        log.info(text)


@dataclass(frozen=True)
class DeviceSample:
    """The state of one GPU.

    ``utilisation``: the part of NVML's last sample period in which a kernel ran, 0 to 1, or None (MIG).
    ``memory_used``, ``memory_total``: bytes, the former without what the driver keeps for itself, where NVML tells it.
    ``processes``: bytes by pid, as far as the driver tells. ``driver``: its version.
    """

    index: int
    uuid: str
    name: str
    utilisation: float | None
    memory_used: int
    memory_total: int
    mig: bool
    processes: dict[int, int] = field(default_factory=dict)
    driver: str | None = None

    def as_fields(self) -> dict[str, Any]:
        """The fields by name, as plain values for an event log or gauges."""
        return asdict(self)


class Telemetry:
    """NVML, opened once. ``nvml``: the pynvml module, or a stand-in for tests."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml: Any = None
        self.driver: str | None = None
        try:
            if nvml is None:
                nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception as error:
            # There is no package, no library, no driver, or a driver that does not answer. The result is the same.
            say_once(f"no GPU telemetry: {error}")
            return
        self._nvml = nvml
        self.driver = _text(nvml.nvmlSystemGetDriverVersion())

    def sample(self) -> list[DeviceSample]:
        """Every GPU of this node, but for those that do not answer; none without a driver."""
        if self._nvml is None:
            return []
        found = []
        for index in range(self._count()):
            try:
                found.append(self._device(index))
            except self._nvml.NVMLError as error:
                say_once(f"GPU {index} does not answer: {error}")
        return found

    def lost(self, gpu: str, ordered: bool = False) -> str | None:
        """What NVML says of a GPU that cannot be used any more; None: it answers, or NVML cannot tell.

        ``gpu``: its number or its UUID, as in CUDA_VISIBLE_DEVICES. ``ordered``: CUDA counts the GPUs as NVML does even
        if they are of several kinds. By NVML's documentation a call that opens one GPU may fail because another one is
        lost. So GPUs that do not answer are only told apart where others do.
        """
        nvml = self._nvml
        if nvml is None:
            return None
        silent: dict[str, str] = {}
        uuids, kinds = [], set()
        for index in range(self._count()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceGetMemoryInfo(handle)
                uuids.append(_text(nvml.nvmlDeviceGetUUID(handle)))
                kinds.add(_text(nvml.nvmlDeviceGetName(handle)))
            except nvml.NVMLError as error:
                if getattr(error, "value", None) in LOST:
                    silent[str(index)] = str(error)
        if gpu.isdigit():
            told_apart = len(kinds) == 1 or (kinds and ordered) or self._count() == 1
            return silent.get(gpu) if told_apart else None
        # CUDA's documentation: a UUID may be shortened as long as it is unique. A MIG instance is not in NVML's list.
        answers = gpu.startswith("MIG-") or any(uuid.startswith(gpu) for uuid in uuids)
        return None if answers or len(silent) != 1 else next(iter(silent.values()))

    def process_memory(self, uuid: str, pid: int) -> int | None:
        """The bytes that a process holds on a GPU, with its context; None if NVML cannot tell."""
        # This is called while trials iterate, so it asks about one device only.
        wanted = uuid.removeprefix("GPU-")
        for index in range(self._count()):
            handle = self._try(self._nvml.nvmlDeviceGetHandleByIndex, index)
            found = None if handle is None else self._try(self._nvml.nvmlDeviceGetUUID, handle)
            if found is not None and _text(found).removeprefix("GPU-") == wanted:
                return self._processes(handle).get(pid)
        return None

    def _count(self) -> int:
        """How many GPUs NVML knows; none without a driver, or where it does not answer."""
        return 0 if self._nvml is None else int(self._try(self._nvml.nvmlDeviceGetCount) or 0)

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def _device(self, index: int) -> DeviceSample:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = self._memory(handle)
        mode = self._try(nvml.nvmlDeviceGetMigMode, handle)
        rates = self._try(nvml.nvmlDeviceGetUtilizationRates, handle)
        return DeviceSample(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            utilisation=None if rates is None else rates.gpu / 100,
            memory_used=int(memory.used),
            memory_total=int(memory.total),
            mig=mode is not None and mode[0] == 1,
            processes=self._processes(handle),
            driver=self.driver,
        )

    def _memory(self, handle: Any) -> Any:
        """What is used of the GPU's memory, and all of it.

        NVML's documentation of nvmlMemory_v2_t: the older structure counts what the driver keeps for itself, half a GiB
        on some GPUs, as used. Older drivers and older packages know only that one.
        """
        ask, version = self._nvml.nvmlDeviceGetMemoryInfo, getattr(self._nvml, "nvmlMemory_v2", None)
        newer = None if version is None else self._try(lambda of: ask(of, version=version), handle)
        return ask(handle) if newer is None else newer

    def _processes(self, handle: Any) -> dict[int, int]:
        nvml = self._nvml
        # NVML lists the clients of MPS separately.
        lists = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetMPSComputeRunningProcesses)
        found = [process for ask in lists for process in self._try(ask, handle) or ()]
        # In a container the driver may not say what a process holds.
        return {process.pid: int(process.usedGpuMemory) for process in found if process.usedGpuMemory is not None}

    def _try(self, ask: Any, *of: Any) -> Any:
        """Ask what not every GPU supports, or answers when it is lost; None if this one does not."""
        try:
            return ask(*of)
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

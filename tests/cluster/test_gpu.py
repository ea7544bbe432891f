"""What a worker sees of its GPU, with stand-ins for NVML and torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.sharing.gpu_probe import GpuProbe, failure_of_device, free_device, wait_for_device
from salus_share.memory import CONTEXT
from salus_share.telemetry import DeviceSample, Telemetry
from tests.salus.test_telemetry import standin


class Cuda(SimpleNamespace):
    """torch.cuda in a process that has initialised CUDA."""

    uuid = "abc"
    there = True

    def is_initialized(self) -> bool:
        return self.there

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid=self.uuid)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """That of the torch which this process has imported."""
    made = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=made))  # type: ignore[arg-type]
    return made


def test_the_gpu_of_this_process_is_found_by_its_id_and_not_looked_at_all_the_time(cuda: Cuda) -> None:
    probe = GpuProbe(Telemetry(standin()))
    found = probe.sample()
    assert found is not None
    assert (found.utilisation, found.memory_used, found.processes) == (0.5, 3, {7: 2, 9: 4})
    assert probe.sample() is None
    cuda.uuid = "another"
    assert GpuProbe(Telemetry(standin())).sample() is None


def test_a_gpu_is_waited_for_and_its_failure_is_not_raised(cuda: Cuda) -> None:
    waited = []

    def fail() -> None:
        waited.append(True)
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with")

    cuda.synchronize = fail
    wait_for_device()
    assert waited and failure_of_device() == "CUDA error: device-side assert triggered"
    cuda.there = False
    assert failure_of_device() is None


class HoldsItself:
    """As a prepared module does, by its hooks."""

    freed = False

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        HoldsItself.freed = True


def test_what_a_trial_held_of_a_gpu_is_freed_also_after_a_failure_of_cuda(cuda: Cuda) -> None:
    freed = []

    def empty() -> None:
        freed.append(HoldsItself.freed)
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda.empty_cache = empty
    HoldsItself()
    free_device()
    cuda.there = False
    free_device()
    assert freed == [True]


def test_without_a_gpu_nvml_is_not_even_opened(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=lambda: opened.append(True)))  # type: ignore[arg-type]
    cuda.there = False
    assert GpuProbe().sample() is None and GpuProbe().memory_needed() is None and not opened


GIB = 1 << 30


class Gpu:
    """torch on a GPU of 16 GiB, and NVML. ``others``: bytes that other processes hold; ``context``: this process'."""

    def __init__(self, cuda: Cuda, reserved: int, context: int = GIB // 2, others: int = 0, says: bool = True) -> None:
        self.reserved, self.context, self.others, self.says = reserved, context, others, says
        self.asked = 0
        cuda.get_device_properties = lambda device: SimpleNamespace(uuid="abc", total_memory=16 * GIB)
        cuda.max_memory_reserved = cuda.memory_reserved = lambda device=0: self.reserved
        cuda.mem_get_info = lambda: (16 * GIB - self.reserved - self.context - self.others, 16 * GIB)

    def process_memory(self, uuid: str, pid: int) -> int | None:
        self.asked += 1
        return self.reserved + self.context if self.says else None


@pytest.mark.parametrize(("says", "needed"), [(True, 2.5), (False, 2 + CONTEXT / GIB)], ids=["nvml", "no nvml"])
def test_what_a_trial_needs_of_a_gpu_has_its_context_in_it(cuda: Cuda, says: bool, needed: float) -> None:
    gpu = Gpu(cuda, 2 * GIB, says=says)
    probe = GpuProbe(gpu)  # type: ignore[arg-type]
    assert probe.memory_needed() == needed / 16
    gpu.reserved = 3 * GIB
    assert probe.memory_needed() == (needed + 1) / 16
    assert gpu.asked == 1, "NVML is not asked in every iteration"


def test_what_nvml_says_of_another_process_with_this_pid_is_not_its_own(cuda: Cuda) -> None:
    gpu: Any = Gpu(cuda, 2 * GIB, context=-GIB)  # in a container: another container's process, which holds less
    assert GpuProbe(gpu).memory_needed() == (2 + CONTEXT / GIB) / 16


@pytest.mark.parametrize(
    ("others", "error", "says", "squeezed"),
    [
        (4 * GIB, RuntimeError("CUDA error: out of memory"), True, True),
        (15 * GIB // 2, RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), True, True),
        (4 * GIB, RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), True, False),
        (4 * GIB, ValueError("too many values to unpack"), True, False),
        (GIB // 8, RuntimeError("CUDA error: out of memory"), True, False),
        # Found by reading: its own context was taken for others' memory, and the trial was given another try.
        (0, RuntimeError("CUDA error: out of memory"), False, False),
        (4 * GIB, RuntimeError("CUDA error: out of memory"), False, True),
    ],
    ids=["neighbour", "full", "not full", "another error", "alone", "alone, no nvml", "neighbour, no nvml"],
)
def test_memory_that_runs_out_beside_others_is_not_the_trials_fault(cuda, others, error, says, squeezed) -> None:
    gpu: Any = Gpu(cuda, 8 * GIB, others=others, says=says)
    wrapped = RuntimeError("in the trial's function")
    wrapped.__cause__ = error
    lack = GpuProbe(gpu).squeezed(wrapped)
    assert (lack is not None) is squeezed
    if lack is not None:
        assert lack.need == (1.0, 0.0) and not lack.between
        # Without NVML, what a context takes is a guess.
        held = others if says else others + GIB // 2 - CONTEXT
        assert f"of which others held {held >> 20} MiB" in lack.reason


@pytest.mark.parametrize("used", [15 * GIB, GIB // 8])
@pytest.mark.parametrize("started", [True, False])
def test_where_others_leave_no_memory_for_a_context_it_is_not_the_trials_fault(
    cuda: Cuda, used: int, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory")  # it makes the context first

    cuda.there, cuda.mem_get_info = started, refuse
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc")
    samples = [DeviceSample(0, "GPU-abc", "A100", None, used, 16 * GIB, False)]
    probe = GpuProbe(SimpleNamespace(sample=lambda: samples))  # type: ignore[arg-type]
    lack = probe.squeezed(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"))
    assert (lack is not None) is (used == 15 * GIB)
    assert lack is None or (lack.need == (1.0, 0.0) and "others held 15360 MiB" in lack.reason)
    assert probe.squeezed(MemoryError()) is None, "the machine's memory"
    samples.clear()
    assert probe.squeezed(RuntimeError("CUDA error: out of memory")) is None, "nobody knows"


def test_a_gpu_that_admits_one_process_is_no_fault_of_the_second_trial(cuda: Cuda) -> None:
    cuda.there = False  # CUDA has not started here
    error = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    lack = GpuProbe().squeezed(error)
    assert lack is not None and lack.need == (1.0, 0.0) and "nvidia-smi -c DEFAULT" in lack.reason


class Nvml:
    """NVML, by which the GPU ``gone`` is lost."""

    def __init__(self, gone: str = "") -> None:
        self.gone, self.asked = gone, 0

    def lost(self, gpu: str, ordered: bool) -> str | None:
        self.asked += 1
        return "GPU is lost" if gpu == self.gone else None


@pytest.mark.parametrize(
    ("visible", "gone", "error", "place"),
    [
        ("3", "", RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with"), 0),
        ("3", "", RuntimeError("CUDA error: device-side assert triggered"), None),
        ("3", "3", RuntimeError("CUDA error: unspecified launch failure"), 0),
        ("2,3", "3", RuntimeError("CUDA error: unspecified launch failure"), 1),
        ("2,3", "", RuntimeError("CUDA error: uncorrectable ECC error encountered"), None),
        ("", "", RuntimeError("CUDA error: uncorrectable ECC error encountered"), None),
    ],
    ids=["ecc", "own", "bus", "second", "one of two", "no gpu"],
)
def test_hardware_that_fails_is_not_the_trials_fault(monkeypatch, visible, gone, error, place) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml(gone)
    probe = GpuProbe(nvml)  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "what the trial's code has set")
    wrapped = RuntimeError("in the trial's function")
    wrapped.__cause__ = error
    lack = probe.broken(wrapped)
    assert (None if lack is None else lack.broken) == place
    if lack is not None:
        assert lack.reason in (
            "NVML says of GPU 3: GPU is lost",
            "the hardware of GPU 3 has failed: CUDA error: uncorrectable ECC error encountered",
        )
    assert nvml.asked == 0 or visible


def test_the_kind_of_gpu_is_found_by_number_or_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, kind in (("0", "A GPU"), ("GPU-abc", "A GPU"), ("1", None), ("0,1", None), ("", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert GpuProbe(Telemetry(standin())).kind() == kind

"""NVML telemetry: what is read from a stand-in, and that nothing is heard of it without a driver."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from salus_share.telemetry import DeviceSample, Telemetry


class NVMLError(Exception):
    """As pynvml's."""


def standin(**changed):
    """pynvml on a node with one GPU."""

    def fail(*_):
        raise NVMLError("Not Supported")

    found = dict(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.65",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: "GPU-abc",
        nvmlDeviceGetName=lambda handle: "A GPU",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3, total=10),
        nvmlDeviceGetMigMode=fail,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=7, usedGpuMemory=2),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ],
        nvmlDeviceGetMPSComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=9, usedGpuMemory=4)],
    )
    return SimpleNamespace(
        **{**found, **{name: fail if value is NVMLError else value for name, value in changed.items()}}
    )


def test_a_sample() -> None:
    found = Telemetry(standin())
    assert found.driver == "580.65"
    assert found.sample() == [DeviceSample(0, "GPU-abc", "A GPU", 0.5, 3, 10, False, {7: 2, 9: 4}, "580.65")]
    assert found.sample()[0].as_fields()["processes"] == {7: 2, 9: 4}
    assert [found.process_memory("abc", 7), found.process_memory("GPU-abc", 8), found.process_memory("x", 7)] == [
        2,
        None,
        None,
    ]
    found.close()
    assert found.sample() == []


@pytest.mark.parametrize(("package", "driver", "used"), [(True, True, 2), (True, False, 3), (False, True, 3)])
def test_what_the_driver_keeps_is_not_used_where_nvml_tells_it_apart(package: bool, driver: bool, used: int) -> None:
    # Found by reading: in a container, half a GiB of an H100's memory seemed to be another process'.
    def memory(handle: int, version: int | None = None) -> SimpleNamespace:
        if version is None:
            return SimpleNamespace(used=3, total=10)
        if not driver:
            raise NVMLError("Function Not Found")
        assert version == 0x2000028
        return SimpleNamespace(used=2, reserved=1, total=10)

    nvml = standin(nvmlDeviceGetMemoryInfo=memory, **({"nvmlMemory_v2": 0x2000028} if package else {}))
    (sample,) = Telemetry(nvml).sample()
    assert (sample.memory_used, sample.memory_total) == (used, 10)


def test_what_a_gpu_does_not_support_is_left_out() -> None:
    nvml = standin(
        nvmlDeviceGetUtilizationRates=NVMLError,
        nvmlDeviceGetMigMode=lambda handle: (1, 1),
        nvmlDeviceGetMPSComputeRunningProcesses=NVMLError,
    )
    (sample,) = Telemetry(nvml).sample()
    assert sample.utilisation is None
    assert sample.processes == {7: 2}
    assert sample.mig
    lost = Telemetry(standin(nvmlDeviceGetHandleByIndex=NVMLError))
    assert lost.sample() == [] and lost.process_memory("abc", 7) is None


@pytest.mark.parametrize("call", ["nvmlDeviceGetCount", "nvmlDeviceGetUUID"])
def test_a_gpu_that_is_lost_fails_no_trial_of_another_one(call: str) -> None:
    def fail(*_: int) -> None:
        raise NVMLError("GPU is lost")

    telemetry = Telemetry(standin(**{call: fail}))
    assert (telemetry.process_memory("abc", 7), telemetry.sample(), telemetry.lost("0")) == (None, [], None)


class Lost(NVMLError):
    """As pynvml's, of a GPU that fell off the bus."""

    value = 15


def several(gone: tuple[int, ...] = (), kinds: str = "AAA", opens: bool = True):
    """pynvml on a node with three GPUs, of which some are lost. ``opens``: NVML opens those all the same."""

    def fail(index: int) -> None:
        if index in gone:
            raise Lost("GPU is lost")

    def open_(index: int) -> int:
        if not opens:
            fail(index)
        return index

    def memory(index: int) -> SimpleNamespace:
        fail(index)
        return SimpleNamespace(used=3, total=10)

    return standin(
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=open_,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}{index}",
        nvmlDeviceGetName=lambda index: kinds[index],
    )


@pytest.mark.parametrize("opens", [True, False])
def test_which_gpu_is_lost(opens: bool) -> None:
    found = Telemetry(several((1,), opens=opens))
    assert [found.lost(gpu) for gpu in ("0", "1", "GPU-00", "GPU-11", "GPU-0", "MIG-1", "7")] == [
        None,
        "GPU is lost",
        None,
        "GPU is lost",
        None,
        None,
        None,
    ]
    assert [Telemetry(several()).lost(gpu) for gpu in ("0", "GPU-11", "GPU-99")] == [None, None, None]
    assert Telemetry(standin(nvmlInit=NVMLError)).lost("0") is None


def test_a_gpu_that_does_not_answer_is_not_taken_for_another_one() -> None:
    assert Telemetry(several((0, 1, 2))).lost("1") is None, "one that is lost may make NVML fail for all"
    assert Telemetry(several((0, 1))).lost("GPU-11") is None, "which of the two it is cannot be told"
    mixed = Telemetry(several((1,), kinds="ABC"))
    assert (mixed.lost("1"), mixed.lost("1", ordered=True)) == (None, "GPU is lost")
    one = Telemetry(standin(nvmlDeviceGetMemoryInfo=lambda index: (_ for _ in ()).throw(Lost("GPU is lost"))))
    assert one.lost("0") == "GPU is lost"
    busy = Telemetry(standin(nvmlDeviceGetMemoryInfo=lambda index: (_ for _ in ()).throw(NVMLError("Timeout"))))
    assert busy.lost("0") is None


def test_without_a_driver_it_is_said_once_and_nothing_is_measured(caplog) -> None:
    def fail() -> None:
        raise NVMLError("the driver is not loaded")

    with caplog.at_level(logging.INFO):
        for _ in range(2):
            found = Telemetry(standin(nvmlInit=fail))
            assert found.sample() == []
            assert found.process_memory("abc", 7) is None
            found.close()
    assert caplog.messages == ["no GPU telemetry: the driver is not loaded"]
    assert all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.gpu
def test_the_real_driver() -> None:
    found = Telemetry()
    samples = found.sample()
    assert samples and all(sample.memory_total > 0 for sample in samples)
    found.close()

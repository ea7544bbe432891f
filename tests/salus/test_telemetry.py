"""NVML telemetry: what is read from a stand-in, and that nothing is heard of it without a driver."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from salus_share import telemetry
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


def test_without_a_driver_it_is_said_once_and_nothing_is_measured(monkeypatch, caplog) -> None:
    monkeypatch.setattr(telemetry, "_said", set())
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            found = Telemetry(standin(nvmlInit=NVMLError))
            assert found.sample() == []
            assert found.process_memory("abc", 7) is None
            found.close()
    assert caplog.messages == ["no GPU telemetry: Not Supported"]
    assert all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.gpu
def test_the_real_driver() -> None:
    found = Telemetry()
    samples = found.sample()
    assert samples and all(sample.memory_total > 0 for sample in samples)
    found.close()

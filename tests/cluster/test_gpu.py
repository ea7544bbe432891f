"""What a worker sees of its GPU, with stand-ins for NVML and torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.gpu_probe import GpuProbe, cuda_failure, wait_for_gpu
from salus_share.telemetry import Telemetry
from tests.salus.test_telemetry import standin


def torch(uuid: str = "abc", there: bool = True) -> Any:
    """torch in a process that has initialised CUDA."""
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: there,
            is_initialized=lambda: there,
            current_device=lambda: 0,
            get_device_properties=lambda device: SimpleNamespace(uuid=uuid),
        )
    )


def test_the_gpu_of_this_process_is_found_by_its_id_and_not_looked_at_all_the_time() -> None:
    probe = GpuProbe(Telemetry(standin()))
    found = probe.sample(torch())
    assert found is not None
    assert (found.utilisation, found.memory_used, found.processes) == (0.5, 3, {7: 2, 9: 4})
    assert probe.sample(torch()) is None
    assert GpuProbe(Telemetry(standin())).sample(torch("another")) is None


def test_a_gpu_is_waited_for_and_its_failure_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def fail() -> None:
        waited.append(True)
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with")

    here = torch()
    here.cuda.synchronize = fail
    monkeypatch.setitem(sys.modules, "torch", here)
    wait_for_gpu()
    assert waited and cuda_failure() == "CUDA error: device-side assert triggered"
    monkeypatch.setitem(sys.modules, "torch", torch(there=False))
    assert cuda_failure() is None


def test_without_a_gpu_nvml_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluidtune.cluster.gpu_probe.Telemetry", lambda: pytest.fail("opened"))
    assert GpuProbe().sample(torch(there=False)) is None

"""What the driver records of its GPUs. No GPU is needed, and no Ray runs here."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from fluidtune.report import read_events
from fluidtune.tune import gpu_telemetry
from fluidtune.tune.gpu_telemetry import GpuTelemetry
from salus_share.telemetry import DeviceSample
from tests.report.makers import log_in


class Told:
    """A gauge: what it was set to, by its tags without the job's name."""

    def __init__(self, name: str, description: str, tags: tuple[str, ...]) -> None:
        self.values: dict[str, float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        job, of = tags.values()
        assert job == "job"
        self.values[of] = value


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuTelemetry:
    monkeypatch.setattr(gpu_telemetry, "Gauge", Told)
    return GpuTelemetry("job", log_in(tmp_path))


def test_a_sample_goes_into_log_and_metrics_once_for_all_of_a_devices_trials(notes: GpuTelemetry) -> None:
    sample = DeviceSample(0, "GPU-a", "A GPU", 0.5, 70, 100, False, {7: 40, 8: 30, 9: 5}, "580")
    workers = [
        SimpleNamespace(pid=7, name="w7"),
        SimpleNamespace(pid=8, name="w8"),
        SimpleNamespace(pid=None, name="new"),
    ]
    for device in (0, 0, 1):
        notes.record_sample(device, sample, workers)  # type: ignore[arg-type]
    events = read_events(notes._log._path)
    assert [event["device"] for event in events] == [0, 1]
    assert events[0]["processes"] == {"7": 40, "8": 30, "9": 5} and events[0]["driver"] == "580"
    assert notes._utilisation.values == {"0": 0.5, "1": 0.5}
    assert notes._memory.values == {"0": 70, "1": 70}
    assert notes._worker_memory.values == {"w7": 40, "w8": 30}


def test_what_mig_does_not_tell_is_no_metric(notes: GpuTelemetry) -> None:
    notes.record_sample(0, DeviceSample(0, "GPU-a", "A GPU", None, 70, 100, True), [])
    assert notes._utilisation.values == {}


def test_that_there_is_no_mps_and_that_gpus_are_of_several_kinds_is_said_once(notes: GpuTelemetry, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        for why in ("no program", "no program", "by MIG"):
            notes.warn_time_slices(why)
        for device, kind in enumerate(("A100", "A100", "H100", "L4")):
            notes.note_kind(device, kind)
    *of_mps, of_kinds = caplog.messages
    assert [message.rpartition(": ")[2] for message in of_mps] == ["no program", "by MIG"]
    assert "several kinds (A100, H100)" in of_kinds and "CUDA_VISIBLE_DEVICES" in of_kinds

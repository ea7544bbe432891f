"""What the driver does with a trial that lacks memory on its device. No Ray runs here."""

from __future__ import annotations

import pytest

from fluidtune.cluster.devices import Layout
from fluidtune.cluster.lanes import Lack
from fluidtune.engine import messages as m
from fluidtune.tune.device_setup import DeviceSetup
from tests.tune.tried_manager import Tried


def setup(lanes: str | None = None, packing: int = 4, kind: str = "gpu") -> DeviceSetup:
    layout = Layout(kind, 2, {"CPU": 1.0}, 1.0, packing, {"CPU": 1.0})
    return DeviceSetup("job", layout, None, 1, None, lanes, None, None)


def hears(tried: Tried, monkeypatch: pytest.MonkeyPatch, devices: DeviceSetup, lack: Lack) -> list[str]:
    """A trial that is loaded lacks that. Returns what becomes of idle workers."""
    run = tried.placed(1.0, loaded=False)
    monkeypatch.setattr(tried.job, "setup", devices)
    ended: list[str] = []
    monkeypatch.setattr(tried.pool, "discard_all_idle_workers", lambda: ended.append("idle workers end"), raising=False)
    tried.loaded(run, lack)
    assert run.life.place == "queued" and run.life.losses.last == lack.reason
    assert tried.written()[-1] == "room_lacking"
    assert run.life.squeezed == bool(ended), "the next time the lack is its own"
    return ended


def test_memory_that_ran_out_beside_others_is_made_free_for_one_more_try(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = hears(tried, monkeypatch, setup(), Lack("its GPU's memory ran out", (1.0, 0.0)))
    assert ended == ["idle workers end"]
    assert tried.manager._events == [m.NeedFound("a", 1.0, 0.0), m.WorkerLost("a")]


@pytest.mark.parametrize("devices", [setup("FAIR"), setup(packing=1), setup(kind="cpu")], ids=["lanes", "alone", "cpu"])
def test_other_trials_are_not_squeezed(tried: Tried, monkeypatch: pytest.MonkeyPatch, devices: DeviceSetup) -> None:
    assert not devices.shares_gpus_by_count
    assert hears(tried, monkeypatch, devices, Lack("no room", (0.5, 0.0))) == []
    assert tried.manager._events == [m.NeedFound("a", 0.5, 0.0), m.WorkerLost("a")]

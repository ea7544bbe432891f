"""What the driver does with a trial that lacks memory on its device. No Ray runs here."""

from __future__ import annotations

import pytest

from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.sharing.lanes import Lack
from fluidtune.engine import messages as m
from fluidtune.tune.device_setup import DeviceSetup
from tests.tune.tried_manager import Tried


@pytest.mark.parametrize(
    ("lanes", "packing", "kind", "squeezed"),
    [(None, 4, "gpu", True), ("FAIR", 4, "gpu", False), (None, 1, "gpu", False), (None, 4, "cpu", False)],
    ids=["by count", "lanes", "alone", "cpu"],
)
def test_memory_that_ran_out_beside_others_is_made_free_for_one_more_try(
    tried: Tried, monkeypatch: pytest.MonkeyPatch, lanes: str | None, packing: int, kind: str, squeezed: bool
) -> None:
    layout = Layout(kind, 2, {"CPU": 1.0}, 1.0, packing, {"CPU": 1.0})
    run = tried.placed(1.0, loaded=False)
    monkeypatch.setattr(tried.job, "setup", DeviceSetup("job", layout, None, 1, None, lanes, None, None))
    ended: list[str] = []
    monkeypatch.setattr(tried.pool, "discard_all_idle_workers", lambda: ended.append("idle workers"), raising=False)
    tried.loaded(run, Lack("no room", (1.0, 0.0)))
    assert run.life.place == "queued" and run.life.losses.last == "no room"
    assert tried.written()[-1] == "room_lacking"
    assert tried.manager._events == [m.NeedFound("a", 1.0, 0.0), m.WorkerLost("a")]
    assert run.life.squeezed == bool(ended) == squeezed, "the next time the lack is its own"

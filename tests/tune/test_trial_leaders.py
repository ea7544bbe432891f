"""What the driver does with a trial that lacks memory on its device. No Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.devices import Layout
from fluidtune.cluster.lanes import Lack
from fluidtune.engine import messages as m
from fluidtune.tune.device_setup import DeviceSetup
from fluidtune.tune.trial_leaders import TrialLeaders
from fluidtune.tune.trial_run import TrialRun


def setup(lanes: str | None = None, packing: int = 4, kind: str = "gpu") -> DeviceSetup:
    layout = Layout(kind, 2, {"CPU": 1.0}, 1.0, packing, {"CPU": 1.0})
    return DeviceSetup("job", layout, None, 1, None, lanes, None, None)


class Driver:
    """The parts of a driver that `TrialLeaders` tells something; all that was said is in ``said``."""

    def __init__(self, devices: DeviceSetup) -> None:
        said: list[Any] = []
        job = SimpleNamespace(
            setup=devices,
            pool=SimpleNamespace(discard_all_idle_workers=lambda: said.append("idle workers end")),
            log=SimpleNamespace(write=lambda name, **fields: said.append(name)),
            trials=SimpleNamespace(can_save=lambda trial: False),
            commits_when_unloaded=lambda run: False,
        )
        parts = SimpleNamespace(
            job=job, actors=None, runs=None, calls=None, callbacks=None, dispatch=None, emit=said.append
        )
        recovery = SimpleNamespace(recover_trial=lambda run, reason: said.append(reason))
        self.leaders = TrialLeaders(parts, recovery, None)  # type: ignore[arg-type]
        self.said = said
        trial = SimpleNamespace(trial_id="a", run_metadata=SimpleNamespace(), last_result=None, num_failures=0)
        self.run = TrialRun(tracked=None, trial=trial, kwargs={}, trainable_ref=None, devices=(0,))  # type: ignore[arg-type]
        self.run.leader = object()  # type: ignore[assignment]

    def hears(self, lack: Lack) -> list[Any]:
        self.leaders.leader_loaded(self.run, self.run.leader, lack)  # type: ignore[arg-type]
        return self.said


def test_memory_that_ran_out_beside_others_is_made_free_for_one_more_try() -> None:
    driver = Driver(setup())
    said = driver.hears(Lack("its GPU's memory ran out", (1.0, 0.0)))
    assert said == [m.NeedFound("a", 1.0, 0.0), "idle workers end", "room_lacking", "its GPU's memory ran out"]
    assert driver.run.squeezed, "the next time the lack is its own"


@pytest.mark.parametrize("devices", [setup("FAIR"), setup(packing=1), setup(kind="cpu")], ids=["lanes", "alone", "cpu"])
def test_other_trials_are_not_squeezed(devices: DeviceSetup) -> None:
    driver = Driver(devices)
    assert not devices.shares_gpus_by_count
    assert driver.hears(Lack("no room", (0.5, 0.0))) == [m.NeedFound("a", 0.5, 0.0), "room_lacking", "no room"]
    assert not driver.run.squeezed

"""How many devices a trial needs with its workers of Ray Train, and where each worker starts. Without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from fluidtune.cluster.hosting.train_workers import TooFewDevices, TrainRoom, TrainWorkers
from fluidtune.errors import FluidTuneError

CORE = {"CPU": 1.0}
GPU = {"CPU": 2.0, "GPU": 1.0}
PLACES = [(f"group{device}", 0) for device in range(9)]

#: What the trial's process has, one device, the workers and what each asks for; devices needed, places of the workers.
NEEDS: dict[str, tuple[Any, ...]] = {
    "a core each": (CORE, CORE, 2, CORE, 3, PLACES[1:3]),
    "half a core each": ({"CPU": 0.5}, CORE, 3, {"CPU": 0.5}, 3, [PLACES[1], PLACES[1], PLACES[2]]),
    "more cores than a device has": (CORE, CORE, 2, {"CPU": 2}, None, None),
    "GPUs on devices of cores": (CORE, CORE, 2, {"GPU": 1}, None, None),
    "a GPU each": (GPU, GPU, 2, {"GPU": 1}, 3, PLACES[1:3]),
    "emulated devices": ({"CPU": 0.001}, {"CPU": 0.001}, 3, CORE, 4, None),
}


def workers_in(*room: Any) -> TrainWorkers:
    """On a cluster of two nodes without an autoscaler."""
    nodes = [{"Alive": True, "Resources": {"CPU": 12.0, "GPU": 4.0}}] * 2
    return TrainWorkers(TrainRoom(*room), lambda: nodes, lambda: False)


@pytest.mark.parametrize("what", NEEDS)
def test_what_a_trial_needs_and_where_its_workers_start(what: str, caplog: pytest.LogCaptureFixture) -> None:
    own, device, workers, each, needed, wanted = NEEDS[what]
    places = () if device["CPU"] == 0.001 else PLACES

    def having(devices: int) -> TrainWorkers:
        return workers_in(own, device, devices, None, tuple(places[:devices]))

    if needed is None:
        assert having(1)(workers, each) is None
        assert "not counted" in caplog.text
        return
    few = having(needed - 1)
    with pytest.raises(TooFewDevices, match=f"needs {needed} devices, and has {needed - 1}"):
        few(workers, each)
    assert few.lack is not None and few.lack.devices == needed
    enough = having(needed)
    assert enough(workers, each) == wanted and enough.lack is None


@pytest.mark.parametrize(
    ("most", "workers", "words"),
    [
        (None, 24, "a trial needs 25 CPU, and the Ray cluster has 24"),
        (4, 4, "a trial needs 5 devices, and the job may have 4"),
    ],
)
def test_what_can_never_be_had_is_refused_with_both_numbers(most: int | None, workers: int, words: str) -> None:
    room = workers_in(CORE, CORE, 1, most, tuple(PLACES[:1]))
    with pytest.raises(FluidTuneError, match=words):
        room(workers, CORE)
    assert room.lack is None


def test_workers_over_several_nodes_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    assert workers_in(CORE, CORE, 1, None, tuple(PLACES[:1]))(20, CORE) is None
    assert "no node has 21 devices" in caplog.text

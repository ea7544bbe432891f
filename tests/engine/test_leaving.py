"""A device that will be lost soon is emptied: no trial starts there, and those that can move leave."""

import pytest

from fluidtune.engine import EngineError
from fluidtune.engine import messages as m
from tests.engine.helpers import Bench, elastic, plain, resize, resume, start, suspend


def test_nothing_starts_on_a_leaving_device():
    bench = Bench(2)
    bench(m.DeviceLeaving(0))
    assert bench.engine.idle_devices == (1,)
    assert bench(plain("a"), plain("b")) == [start("a", (1,), 1.0)]
    assert bench.engine.waiting == ("b",)
    assert bench(m.DeviceLost(0)) == []


def test_a_trial_with_checkpoints_is_moved():
    bench = Bench(2)
    bench(m.TrialAdded("a", "g", "checkpointing", 100))
    assert bench(m.DeviceLeaving(0)) == [suspend("a")]
    bench(m.TrialEnded("a", "paused"))
    assert bench(m.TrialAdded("a", "g", "checkpointing", 99)) == [resume("a", (1,), 1.0)]
    assert bench.engine.devices == {0: (), 1: ("a",)}


def test_a_wide_trial_shrinks_when_its_first_worker_stays():
    bench = Bench(3)
    bench(elastic("a"))
    bench.results("a", 10.0, 3)
    bench(m.Resized("a", (0, 1), 0.1))
    bench.results("a", 5.0, 3, width=2)
    bench(m.Resized("a", (0, 1, 2), 0.1))
    assert bench(m.DeviceLeaving(1)) == [resize("a", (0, 2))]
    bench(m.Resized("a", (0, 2), 0.1))
    assert bench.engine.devices == {0: ("a",), 1: (), 2: ("a",)}
    assert bench(m.DeviceLeaving(0)) == [suspend("a")]


def test_a_plain_trial_stays_until_it_turns_out_to_be_movable():
    bench = Bench(2)
    bench(plain("a"))
    assert bench(m.DeviceLeaving(0)) == []
    assert bench(m.Result("a", 1.0, 1)) == []
    assert bench(m.KindFound("a", "checkpointing")) == [suspend("a")]


def test_a_plain_trial_still_there_when_the_device_is_lost_starts_again():
    bench = Bench(2)
    bench(plain("a"))
    bench(m.DeviceLeaving(0))
    assert bench(m.DeviceLost(0)) == [resume("a", (1,), 1.0)]


@pytest.mark.parametrize("device", [0, 7])
def test_only_a_known_device_can_leave_and_only_once(device):
    bench = Bench(1)
    bench(m.DeviceLeaving(0))
    with pytest.raises(EngineError, match=str(device)):
        bench(m.DeviceLeaving(device))

"""How measurements become the times of batches."""

import pytest

from benchmarks.orloj_profiles import BatchMap, VaryingProfile
from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.messages import BatchDone, Dispatch, GpuJoined, Request, RequestArrived, Suspect, Tick
from symphony_serve.model_side import EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler

MAP = BatchMap({1: (0.0, 1.0), 2: (0.0, 1.15), 4: (0.0, 1.45)})
SHORT, LONG = Histogram((0.02, 0.04), (1.0,)), Histogram((0.14, 0.16), (1.0,))


def test_a_long_batch_of_a_model_whose_times_vary_is_no_lost_gpu() -> None:
    """One request of twenty takes five times the expected 36 ms."""
    profile = VaryingProfile(BatchMap({1: (0.0, 1.0)}), {"a": SHORT, "b": LONG}, weights={"a": 0.95, "b": 0.05})
    model = Model("m", Profile.from_seconds([0.1]), 5.0, lambda *_: Orloj([profile]), EAGER)
    scheduler = Scheduler([model])
    scheduler.handle(GpuJoined(0, 1), 0.0)
    scheduler.handle(RequestArrived(Request(1, "m", 0.0, 5.0)), 0.0)
    (first,) = [one for one in scheduler.handle(Tick(), 0.0) if isinstance(one, Dispatch)]
    assert first.seconds == pytest.approx(0.036) and first.longest == 0.16
    scheduler.handle(RequestArrived(Request(2, "m", 0.01, 5.01)), 0.01)
    told = scheduler.handle(Tick(), 0.15)
    assert not [one for one in told if isinstance(one, (Suspect, Dispatch))]
    scheduler.handle(BatchDone(0, 1, first.plan), 0.16)
    (second,) = [one for one in scheduler.handle(Tick(), 0.16) if isinstance(one, Dispatch)]
    assert [request.id for request in second.requests] == [2]
    # What is far beyond all that was seen is lost all the same.
    assert [one for one in scheduler.handle(Tick(), 0.16 + 3 * 0.16 + 0.001) if isinstance(one, Suspect)]

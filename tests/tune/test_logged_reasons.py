"""The event log says of each start, change of width, move and loss why: in words, and the engine's reason by name.

What the engine decides comes with its instruction; the driver adds why a trial left its devices or did not grow.
"""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from fluidtune.engine import messages as m
from fluidtune.report.fold import Fold
from tests.engine.helpers import suspend
from tests.tune.trainables import Stepper
from tests.tune.tried_manager import Tried, growing, wide


def test_a_trial_that_goes_on_without_a_dead_worker_says_why_it_is_narrower(tried: Tried) -> None:
    run, follower = wide(tried)
    tried.follower_ended(run, follower, RayActorError())
    tried.manager._advance()
    resized = tried.logged("resized")[-1]
    assert (resized["devices"], resized["why"], resized["reason"]) == ([0], "worker_lost", "worker w2 was lost")


@pytest.mark.parametrize("again", [False, True])
def test_a_trial_whose_code_failed_says_by_what(tried: Tried, again: bool) -> None:
    run = tried.placed(1.0)
    trial: Any = run.trial
    controller: Any = tried.job._controller
    controller.checkpoint = lambda **how: None
    error = RayTaskError("train", "Traceback\nof many lines", ValueError("no\nmore"))
    tried.manager.schedule_actor_task(run.tracked, "train", on_error=lambda tracked, error: None)
    tried.answered(run, error)
    trial.status = "ERROR"
    tried.manager.remove_actor(run.tracked)
    if again:
        trial.status = "PENDING"  # Tune retries it
    tried.manager._advance()
    (ended,) = tried.logged("trial_ended")
    assert ended["ending"] == ("paused" if again else "failed")
    assert ended["reason"] == "it failed: ValueError: no"


def test_a_trial_that_is_wanted_again_in_the_same_step_waits_by_the_log(tried: Tried) -> None:
    # Seen: `fluidtune top` said "paused" of such a trial, and hid it.
    run = tried.placed(1.0, Stepper)
    tried.tell(run, suspend("a"))
    tried.manager.schedule_actor_task(run.tracked, "train")
    list(tried.manager._calls._handlers.values())[-1](None)
    tried.manager._advance()
    assert tried.written()[-3:] == ["trial_ended", "trial_added", "trial_started"]
    assert Fold(tried.logged()[:-1]).trials["a"].state == "waiting"


def test_a_pause_of_tunes_own_has_no_reason_even_after_a_move(tried: Tried) -> None:
    run = tried.placed(1.0, Stepper)
    tried.tell(run, suspend("a"))
    tried.manager.schedule_actor_task(run.tracked, "train")
    assert run.life.losses.last == (why := f"moved to another device: {suspend('a').why.words}")
    unloaded = list(tried.manager._calls._handlers.values())[-1]
    unloaded(None)
    tried.manager._advance()
    (moved,) = tried.logged("trial_ended")
    assert (moved["ending"], moved["reason"]) == ("paused", why)
    tried.manager.remove_actor(run.tracked)
    tried.manager._advance()
    assert "reason" not in tried.logged("trial_ended")[-1]


def test_a_trial_that_the_engine_suspends_is_said_to_leave_with_the_reason(tried: Tried) -> None:
    run, joiner = growing(tried)
    tried.attached(run, joiner, RayActorError())
    for event in (m.Result("a", 1.0, 1), m.Result("a", 1.0, 1), m.Result("a", 1.0, 1), m.DeviceLeaving(0)):
        tried.manager._emit(event)
    tried.manager._advance()
    (asked,) = tried.logged("suspend_asked")
    assert (asked["trial"], asked["why"], asked["numbers"]) == ("a", "leaving_device", {"width": 1, "leaving": 1})
    assert run.life.wish == "leave" and run.life.leaves_for == asked["reason"] == "1 of its 1 device will be lost soon"

"""The event log says of each start, change of width, move and loss why: in words, and the engine's reason by name.

What the engine decides comes with its instruction; the driver adds why a trial left its devices or did not grow.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from fluidtune.engine import messages as m
from fluidtune.report.fold import Fold
from fluidtune.trials import messages as life
from fluidtune.tune.trial_shell import LATE_S
from tests.tune.trainables import Stepper
from tests.tune.tried_manager import Tried, growing, wide


def test_a_growth_whose_new_worker_is_late_says_so(tried: Tried) -> None:
    growing(tried)
    now = time.monotonic()
    tried.manager._shell.report_late(now + LATE_S - 60)
    assert not tried.logged("resize_failed")
    for late in (LATE_S + 60, 3 * LATE_S):
        tried.manager._shell.report_late(now + late)
    (failed,) = tried.logged("resize_failed")
    assert failed["trial"] == "a" and "was not attached in 300 s" in failed["reason"]


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
    tried.tell(run, life.LeaveWanted(""))
    tried.manager.schedule_actor_task(run.tracked, "train")
    list(tried.manager._calls._handlers.values())[-1](None)
    tried.manager._advance()
    assert tried.written()[-3:] == ["trial_ended", "trial_added", "trial_started"]
    assert Fold(tried.logged()[:-1]).trials["a"].state == "waiting"


def test_a_pause_of_tunes_own_has_no_reason_even_after_a_move(tried: Tried) -> None:
    run = tried.placed(1.0, Stepper)
    tried.tell(run, life.LeaveWanted("a device is idle"))
    tried.manager.schedule_actor_task(run.tracked, "train")
    assert run.life.losses.last == "moved to another device: a device is idle"
    unloaded = list(tried.manager._calls._handlers.values())[-1]
    unloaded(None)
    tried.manager._advance()
    (moved,) = tried.logged("trial_ended")
    assert (moved["ending"], moved["reason"]) == ("paused", "moved to another device: a device is idle")
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


def test_a_trial_that_is_out_of_reach_says_why_it_moves(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried.job, "setup", replace(tried.job.setup, one_node=True))
    run = tried.placed(1.0)
    tried.devices.nodes[1] = "other"
    tried.trains(run, 1)
    (asked,) = tried.logged("suspend_asked")
    assert asked["trial"] == "a" and "its leader is not reached from another node" in asked["reason"]
    assert "why" not in asked and not tried.logged("resize_started")


def test_what_is_found_of_modules_has_trial_and_reason(tried: Tried) -> None:
    run, _ = wide(tried)
    tried.trains(run, 3, width=2, checked=(("Net", "whole", "it mixes samples"),), ungrowable="nothing can be divided")
    (checked,), (ended,) = tried.logged("growth_checked"), tried.logged("growth_ended")
    assert (checked["trial"], checked["module"], checked["verdict"]) == ("a", "Net", "whole")
    assert checked["reason"] == "it mixes samples"
    assert (ended["trial"], ended["reason"]) == ("a", "nothing can be divided")
    shrinks = tried.logged("resize_started")[-1]
    assert (shrinks["why"], shrinks["devices_from"], shrinks["devices_to"]) == ("growth_ended", [0, 1], [0])
    assert tried.logged("resized")[-1]["devices"] == [0]


def test_that_a_trial_can_grow_is_said_once(tried: Tried) -> None:
    run, _ = wide(tried)
    tried.trains(run, 3)
    (said,) = tried.logged("can_grow")
    assert said["trial"] == "a" and tried.logged("trial_added")[0]["growable"] is False

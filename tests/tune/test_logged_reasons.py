"""The event log says of each start, change of width, move and loss why: in words, and the engine's reason by name.

What the engine decides comes with its instruction; the driver adds why a trial left its devices or did not grow.
"""

from __future__ import annotations

from fluidtune.report.fold import Fold
from fluidtune.trials import messages as life
from tests.tune.trainables import Stepper
from tests.tune.tried_manager import Tried


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

"""What a trial's life does at each event, row by row. Nothing but Python runs here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.engine import messages as engine
from fluidtune.group_facts import GroupFacts
from fluidtune.trials import LifeError, TrialStateMachine, handle
from fluidtune.trials import messages as m
from fluidtune.trials.life import MAX_DEATHS, MAX_MISSES, SeenResults
from fluidtune.trials.life_states import HELD
from tests.engine.helpers import release, resize, start, suspend
from tests.trials.life_invariants import check_life

ADDRESS = ("127.0.0.1", 4321)
ERROR = ValueError("its own code")


@dataclass(frozen=True)
class Process:
    name: str
    device: int


@cache
def process(name: str, device: int) -> Process:
    """The one process of this name."""
    return Process(name, device)


class Driver:
    """Says what happens to one trial, and looks at what follows."""

    def __init__(
        self,
        gang: bool = False,
        can_save: bool = False,
        shares_gpus_by_count: bool = False,
        waits_for_checkpoints: bool = False,
        checkpoint: m.Checkpoint | None = None,
        far: bool = False,
    ) -> None:
        self.checkpoint, self.several = checkpoint, gang
        flags = (can_save, True, shares_gpus_by_count, waits_for_checkpoints)
        outside = m.Outside(*flags, lambda: self.checkpoint, lambda devices: far, lambda: self.several)
        self.life = TrialStateMachine("a", outside, "plain", SeenResults())
        self.call: m.Call = m.Call("train", True, True)

    def hears(self, event: m.Event | engine.Instruction) -> list[m.Instruction]:
        out = handle(self.life, event)
        check_life(self.life)
        return out

    def placed(self, *devices: int) -> list[m.Instruction]:
        return self.hears(start("a", devices, 1.0))

    def found(self, name: str = "w0") -> list[m.Instruction]:
        return self.hears(m.WorkerFound(process(name, self.life.crew.devices[0])))

    def loaded(self, **facts: Any) -> list[m.Instruction]:
        assert self.life.crew.leader is not None
        return self.hears(m.Loaded(self.life.crew.leader, GroupFacts(**{"address": ADDRESS, **facts})))

    def live(self, *devices: int, name: str = "w0", **facts: Any) -> Driver:
        self.placed(*devices or (0,))
        self.found(name)
        self.loaded(**facts)
        return self

    def asked(self, method: str = "train") -> list[m.Instruction]:
        self.call = m.Call(method, True, True)
        return self.hears(m.MethodCalled(self.call, plain=True))

    def trained(self, iteration: int, **shown: Any) -> list[m.Instruction]:
        self.asked()
        return self.done(iteration, **shown)

    def done(self, iteration: int, kind: engine.Kind = "plain", saved: Any = None, **facts: Any) -> list[m.Instruction]:
        """The leader has done an iteration. ``facts``: fields of `GroupFacts`."""
        shown = IterationReply({}, kind, 1.0, iteration, facts=GroupFacts(**{"address": ADDRESS, **facts}), saved=saved)
        return self.hears(m.IterationDone(self.life.calls[0], shown, iteration))

    def elastic(self, *devices: int, **facts: Any) -> Driver:
        self.live(*devices, **facts)
        self.trained(1, kind="elastic", **facts)
        return self

    def joins(self, *devices: int) -> dict[int, Process]:
        """New workers of these devices are found."""
        workers = {device: Process(f"j{device}", device) for device in devices}
        for worker in workers.values():
            self.hears(m.JoinerFound(worker))
        return workers

    def wide(self) -> tuple[Driver, dict[int, Process]]:
        """It has grown from device 0 onto devices 1 and 2."""
        self.live()
        self.trained(1, calls_modules=True)
        self.hears(resize("a", (0, 1, 2)))
        attached = self.joins(1, 2)
        for worker in attached.values():
            self.hears(m.Attached(worker))
        assert self.life.crew.width == 3 and self.states == ("live", "steady", "stay")
        return self, attached

    @property
    def states(self) -> tuple[str, str, str]:
        return self.life.place, self.life.crew.change, self.life.wish


def told(instructions: list[m.Instruction]) -> list[engine.Event]:
    """What the engine is told."""
    return [each.event for each in instructions if isinstance(each, m.Tell)]


def kinds(instructions: list[m.Instruction]) -> list[str]:
    return [type(each).__name__ for each in instructions]


# --- a leader


def test_a_trial_with_a_checkpoint_gets_it_back_first() -> None:
    driver = Driver(checkpoint=m.Checkpoint(4)).live()
    driver.asked()
    driver.hears(release("a", (0,)))
    driver.placed(0)
    driver.found()
    restore = driver.loaded()[-1]
    assert isinstance(restore, m.CallLeader) and restore.call.method == "restore" and not restore.call.wants_result
    out = driver.hears(m.CheckpointRestored(restore.call, 4, 40))
    assert driver.life.seen.delivered == 4 and driver.life.seen.number == 40
    assert kinds(out) == ["CallLeader", "TellTune"] and out[0].call is driver.call  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("started", "there", "most"),
    [(True, True, MAX_DEATHS), (False, True, MAX_MISSES), (True, False, MAX_MISSES), (False, False, MAX_MISSES)],
)
def test_too_many_losses_fail_the_trial(started: bool, there: bool, most: int) -> None:
    driver = Driver()
    for loss in range(most):
        driver.placed(0)
        driver.found(f"w{loss}")
        out = driver.hears(m.LeaderDied(process(f"w{loss}", 0), ERROR, "killed", started, there))
    assert told(out) == [engine.TrialEnded("a", "failed")]
    assert kinds(out) == ["Fail", "DropCalls", "Tell"]
    assert driver.life.place == "ended"


def test_an_iteration_forgives_losses() -> None:
    driver = Driver()
    for loss in range(2 * MAX_DEATHS):
        driver.live(0, name=f"w{loss}")
        if not loss:
            driver.asked()
        driver.done(loss + 1)
        driver.asked()
        driver.hears(m.LeaderDied(driver.call, ERROR, "killed", True, True))
    assert driver.life.place == "queued"
    for loss in range(1, MAX_DEATHS):
        driver.placed(0)
        driver.found(f"again{loss}")
        driver.hears(m.LeaderDied(process(f"again{loss}", 0), ERROR, "killed", True, True))
    assert driver.life.place == "ended"


@pytest.mark.parametrize("waits", [False, True])
def test_a_checkpoint_that_came_with_its_result_answers_one_save(waits: bool) -> None:
    driver = Driver(waits_for_checkpoints=waits).live()
    driver.trained(1, saved="first")
    assert kinds(driver.asked("save")) == (["CallLeader"] if waits else ["TellTune"])
    if not waits:
        assert kinds(driver.asked("save")) == ["CallLeader"]


def test_an_error_is_tunes_where_tune_asked_and_fails_the_trial_where_we_did() -> None:
    driver = Driver().live()
    driver.asked()
    assert driver.hears(m.Raised(driver.call, ERROR)) == [m.TellError(driver.call, ERROR)]
    driver.call = m.Call("train", True)
    driver.hears(m.MethodCalled(driver.call, True))
    assert "Fail" in kinds(driver.hears(m.Raised(driver.call, ERROR)))


def test_a_trial_whose_commit_is_not_whole_begins_anew_and_reports_nothing() -> None:
    driver = Driver().elastic()
    driver.asked()
    anew = m.MustReschedule(driver.call, "its commit is not whole")
    assert told(driver.hears(anew)) == [engine.WorkerLost("a")] and driver.hears(anew) == []
    assert driver.life.place == "queued" and driver.life.seen.results == 1


# --- leaving


def test_a_trial_that_is_to_leave_trains_until_it_can_be_moved() -> None:
    driver = Driver().live()
    driver.trained(1)
    driver.hears(suspend("a"))
    assert kinds(driver.asked()) == ["CallLeader"]
    driver.checkpoint = m.Checkpoint(1)
    driver.done(2)
    assert kinds(driver.asked()) == ["CallLeader"], "an iteration would be lost"
    driver.checkpoint = m.Checkpoint(3)
    driver.done(3)
    out = driver.asked()
    assert out == [m.Unload(process("w0", 0), "long", then=True)] and driver.states == ("moving", "steady", "stay")
    out = driver.hears(m.Unloaded())
    assert told(out) == [engine.TrialEnded("a", "paused")] and kinds(out)[-1] == "Announce"
    assert driver.life.place == "queued" and list(driver.life.calls) == [driver.call]


def test_a_trial_that_moves_when_others_have_shown_a_gang_begins_anew_as_one() -> None:
    """Seen: a job ended with an EngineError, in one of 300 seeded schedules with such trials."""
    driver = Driver().elastic()
    driver.hears(suspend("a"))
    driver.asked()
    driver.several = True
    driver.hears(m.Unloaded())
    assert driver.placed(2, 3) == [m.RequestLeader(2, (3,), 2)]
    assert driver.life.crew.devices == (2, 3), "the engine has it as a gang, and waits for no resize"


def test_a_trial_that_has_done_nothing_moves_without_a_checkpoint() -> None:
    # Seen: it saved 80 checkpoints a second: those of a class without an iteration have no number.
    driver = Driver(can_save=True).live()
    driver.hears(suspend("a"))
    assert kinds(driver.asked()) == ["Unload"] and driver.states == ("moving", "steady", "stay")
    assert list(driver.life.calls) == [driver.call], "what Tune waits for is asked of the next worker"


def test_a_class_is_asked_for_one_checkpoint_before_it_leaves() -> None:
    driver = Driver(can_save=True).live()
    driver.trained(1)
    driver.hears(suspend("a"))
    save = driver.asked()[0]
    assert isinstance(save, m.CallLeader) and save.call.method == "save"
    assert kinds(driver.hears(m.Answered(save.call, "saved"))) == ["KeepCheckpoint", "TellTune"]
    driver.checkpoint = m.Checkpoint(1)
    assert kinds(driver.hears(m.CheckpointKept())) == ["Unload"]


def test_tune_gets_a_checkpoint_that_was_written_again_before_the_result_after_it() -> None:
    driver = Driver().live()
    driver.asked()
    shown = IterationReply({}, "plain", 1.0, 4, rewritten=["third"])
    out = kinds(driver.hears(m.IterationDone(driver.life.calls[0], shown, 4)))
    assert out[0] == "KeepCheckpoint" and out[-1] == "TellTune"
    assert driver.hears(m.CheckpointKept()) == []


def test_that_a_trial_cannot_commit_is_said_once() -> None:
    driver = Driver().elastic()
    out = driver.trained(2, kind="elastic", cannot_commit="a lock cannot be pickled")
    assert kinds(out)[:2] == ["Warn", "Write"]
    assert "Warn" not in kinds(driver.trained(3, kind="elastic", cannot_commit="a lock"))


def test_a_trial_that_lost_its_new_place_before_the_move_was_over_is_announced_once() -> None:
    # Seen: it was logged as paused, and added again while it waited.
    driver = Driver().elastic()
    driver.hears(suspend("a"))
    driver.asked()
    driver.placed(1)
    assert told(driver.hears(m.MustReschedule(None, "its place died"))) == [engine.WorkerLost("a")]
    assert driver.hears(m.Unloaded()) == [] and driver.life.place == "queued"


@pytest.mark.parametrize("squeezed", [True, False])
@pytest.mark.parametrize(("between", "states"), [(True, "moving"), (False, "queued")])
def test_a_lack_of_room_moves_the_trial_or_costs_its_iteration(between: bool, states: str, squeezed: bool) -> None:
    """Idle workers end first where trials share GPUs by their number, and not by the memory that each may have."""
    driver = Driver(shares_gpus_by_count=squeezed).elastic()
    driver.asked()
    out = driver.hears(m.RoomLacking(driver.call, "no room", (0.3, 0.1), between))
    assert kinds(out)[:3:2] == ["Tell", "Write"] if squeezed else kinds(out)[:2] == ["Tell", "Write"]
    assert ("EndIdleWorkers" in kinds(out)) == squeezed == driver.life.squeezed and driver.life.place == states
    assert told(out)[0] == engine.NeedFound("a", 0.4, 0.1)


@pytest.mark.parametrize(
    ("place", "had_place", "unloads"),
    [
        ("queued", False, []),
        ("placed", True, []),
        ("loading", True, ["Unload"]),
        ("live", True, ["Unload"]),
        ("moving", False, []),
    ],
)
def test_a_trial_that_tune_lets_go_of_leaves_its_workers_when_it_is_known_why(
    place: str, had_place: bool, unloads: list[str]
) -> None:
    driver = Driver()
    steps = [lambda: driver.placed(0), driver.found, driver.loaded]
    for step in {"queued": [], "placed": steps[:1], "loading": steps[:2]}.get(place, steps):
        step()
    if place == "moving":
        driver.hears(suspend("a"))
        driver.asked()
    assert driver.life.place == place
    assert kinds(driver.hears(m.Released())) == ["DropCalls"]
    out = driver.hears(m.Left("stopped", keep=True))
    assert kinds(out) == [*unloads, "Tell"] and (driver.life.released_from in HELD) == had_place
    assert told(out) == [engine.TrialEnded("a", "stopped")] and driver.life.place == "ended"
    assert driver.hears(m.Unloaded()) == []


# --- its followers


def test_a_trial_grows_while_it_trains() -> None:
    driver = Driver().live()
    driver.asked()
    out = driver.hears(resize("a", (0, 1, 2)))
    assert out[1:] == [m.RequestJoiner(1, 1), m.RequestJoiner(2, 1)] and driver.states == ("live", "attaching", "stay")
    assert driver.hears(m.JoinerFound(process("j2", 2))) == [m.Attach(process("j2", 2))]
    assert driver.hears(m.Attached(process("j2", 2))) == [] and driver.life.crew.devices == (0, 2)
    driver.hears(m.JoinerFound(process("j1", 1)))
    out = driver.hears(m.Attached(process("j1", 1)))
    assert kinds(out) == ["Write", "Tell"] and told(out) == [engine.Resized("a", (0, 2, 1))]
    assert driver.states == ("live", "steady", "stay") and driver.life.crew.width == 3


def test_a_trial_shrinks_at_once_and_asks_nobody() -> None:
    driver, attached = Driver().wide()
    driver.asked()
    out = driver.hears(resize("a", (0, 2)))
    assert kinds(out) == ["Write", "Discard", "Write", "Tell"] and out[1].worker is attached[1]  # type: ignore[attr-defined]
    assert told(out) == [engine.Resized("a", (0, 2))] and driver.life.crew.width == 2
    assert driver.hears(m.FollowerEnded(attached[1], "died")) == []


@pytest.mark.parametrize("how", ["died", "error"])
@pytest.mark.parametrize("width, held", [(2, True), (3, False)])
def test_a_trial_whose_further_workers_always_fail_keeps_those_that_it_has(width: int, held: bool, how: m.End) -> None:
    """Seen: those that died were attached again without end. Iterations of fewer workers do not count."""
    driver, attached = Driver().wide()
    out = driver.hears(m.FollowerEnded(attached[1], how))
    for iteration in range(2, 1 + MAX_DEATHS):
        assert engine.GrowthEnded("a", stays=True) not in told(out)
        driver.trained(iteration, width=width, calls_modules=True)
        driver.hears(resize("a", (0, 2, 1)))
        out = driver.hears(m.NotAttached(driver.joins(1)[1], "refused" if how == "error" else "died", "killed"))
    assert (engine.GrowthEnded("a", stays=True) in told(out)) == held and driver.life.crew.width == 2


GROWABLE = m.TrainableCapabilities(growable=True)


def test_a_trial_that_calls_a_module_can_grow_and_says_so_once() -> None:
    driver = Driver().live()
    assert "ShareCapabilities" not in kinds(driver.trained(1))
    assert m.ShareCapabilities(GROWABLE) in driver.trained(2, calls_modules=True)
    assert "ShareCapabilities" not in kinds(driver.trained(3, calls_modules=True))


def test_what_others_have_shown_of_a_trial_is_logged_and_not_spread_again() -> None:
    """Seen: a trial with checkpoints was "plain" in `fluidtune why`, as it had learned its kind from another one."""
    driver = Driver()
    assert driver.hears(m.CapabilitiesLearned(GROWABLE)) == [m.Write("can_grow"), m.Tell(engine.CanGrow("a"))]
    learned = driver.hears(m.CapabilitiesLearned(m.TrainableCapabilities("elastic")))
    assert learned == [m.Write("kind_found", {"kind": "elastic"}), m.Tell(engine.KindFound("a", "elastic"))]
    assert m.ShareCapabilities(GROWABLE) not in driver.live().trained(1, calls_modules=True)


@pytest.mark.parametrize(
    ("facts", "width"),
    [({}, 0.5), ({"width": 3, "calls_modules": True}, 3), ({"width": 0, "calls_modules": True}, None)],
)
def test_the_engine_hears_at_which_width_an_iteration_ran_if_it_ran_at_one(facts: Any, width: float | None) -> None:
    driver = Driver()
    driver.hears(start("a", (0,), 0.5))
    driver.found()
    driver.loaded()
    assert told(driver.trained(1, **facts))[-1] == engine.Result("a", 1.0, width)


def test_what_was_checked_is_written_down() -> None:
    driver = Driver().live()
    out = driver.trained(1, calls_modules=True, checked=(("Net", "divided", ""), ("Head", "whole", "it mixes samples")))
    assert [(each.fields, each.reason) for each in out if isinstance(each, m.Write)][1:] == [
        ({"module": "Net", "verdict": "divided"}, ""),
        ({"module": "Head", "verdict": "whole"}, "it mixes samples"),
    ]


def test_growth_ends_for_a_trial_that_calls_no_module_though_others_of_its_trainable_do() -> None:
    driver = Driver().live(0, 1)
    driver.hears(m.Attached(driver.joins(1)[1]))
    assert engine.GrowthEnded("a") not in told(driver.trained(1, width=0)), "it was not there all the time"
    assert engine.GrowthEnded("a") in told(driver.trained(2, width=2))


@pytest.mark.parametrize("elastic", [True, False])
def test_a_trial_out_of_its_new_workers_reach_leaves_if_it_commits(elastic: bool) -> None:
    driver = Driver(far=True)
    driver.elastic(one_node=True) if elastic else driver.live(one_node=True)
    out = driver.hears(resize("a", (0, 1)))
    if elastic:
        assert kinds(out) == ["Write"] and driver.states == ("live", "steady", "leave")
    else:
        assert told(out) == [engine.ResizeFailed("a", (0,))] and driver.states == ("live", "steady", "stay")


# --- errors


def test_an_error_tells_what_happened_before() -> None:
    driver = Driver().live()
    driver.asked()
    with pytest.raises(LifeError) as error:
        driver.hears(m.Left("stopped"))
    assert str(error.value).splitlines() == [
        "trial a: it cannot become ended, while it is live, steady, stay. Its latest events, with the states after "
        "each:",
        "  Start(trial='a', devices=(0,), share=1.0) -> placed, steady, stay",
        "  WorkerFound(worker=w0) -> loading, steady, stay",
        "  Loaded(worker=w0) -> live, steady, stay",
        "  MethodCalled(call=train, plain=True) -> live, steady, stay",
        "  Left(ending='stopped', keep=False, waits=False)",
    ]

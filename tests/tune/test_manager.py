"""What the manager does when trials run and when workers and devices go. No Ray runs here."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from fluidtune import FluidExecutor
from fluidtune.cluster.follower_host import NotTakenIn, Ungrowable
from fluidtune.cluster.messages import IterationReply
from fluidtune.elastic.transport.membership import LOOPBACK
from fluidtune.engine import messages as m
from fluidtune.engine.wait_queue import WaitQueue
from fluidtune.group_facts import GroupFacts
from fluidtune.ray_compat.trainable import TRIAL_INFO
from fluidtune.report import EVENT_LOG_NAME, read_events
from fluidtune.trials import TrialLife
from fluidtune.trials import messages as life
from fluidtune.trials.seen_results import SeenResults
from fluidtune.tune import final_report, tuning_job
from fluidtune.tune.trial_run import TrialRun
from fluidtune.tune.trial_shell import LATE_S
from fluidtune.tune.tuning_job import TuningJob
from tests.engine.helpers import resize
from tests.tune.trainables import Stepper
from tests.tune.tried_manager import Tried, growing, leader_of, wide


def test_an_iteration_reaches_tune_and_the_engine_and_the_log(tried: Tried) -> None:
    run = tried.placed(1.0)
    assert tried.taken_over == [("a", 0)] and tried.manager.step(0.0) and tried.told == ["started"]
    told: list[Any] = []
    tried.manager.schedule_actor_task(run.tracked, "train", on_result=lambda tracked, result: told.append(result))
    assert tried.job.stall_detector.newly_silent(1e9)[0].trial == "a"
    reply = IterationReply({"training_iteration": 1, "score": 0.5}, "checkpointing", 2.0)
    tried.answered(run, reply)
    assert tried.manager.step(0.0) and told == [reply.result]
    view = tried.job.engine.trial("a")
    assert (view.kind, view.done, view.seconds) == ("checkpointing", 1, {1.0: 2.0})
    assert not tried.job.stall_detector.silent
    assert tried.written() == ["group_announced", "trial_added", "trial_started", "kind_found", "trial_result"]


def reported(tried: Tried, saved: Any) -> tuple[TrialRun, list[Any]]:
    """A trial's first result has come, and with it ``saved``. Returns the run, and what Tune is told from then on."""
    run = tried.placed(1.0)
    tried.manager.step(0.0)
    told: list[Any] = []
    tried.manager.schedule_actor_task(run.tracked, "train", on_result=lambda *_: told.append("trained"))
    reply = IterationReply({"training_iteration": 1, "score": 0.5}, "checkpointing", 2.0, 1, saved=saved)
    tried.answered(run, reply)
    tried.manager.step(0.0)
    assert told.pop() == "trained"
    return run, told


def asked_to_save(tried: Tried, run: TrialRun, told: list[Any]) -> list[str]:
    """Tune asks for a checkpoint. Returns what the worker was called for up to now."""
    tried.manager.schedule_actor_task(run.tracked, "save", on_result=lambda tracked, value: told.append(value))
    called: list[str] = leader_of(run).actor.called
    return called


def test_a_checkpoint_that_came_with_its_result_is_not_asked_for(tried: Tried) -> None:
    run, told = reported(tried, saved="first")
    assert asked_to_save(tried, run, told) == ["load", "train"]
    assert told == [], "Tune is called back by its own loop"
    assert tried.manager.step(0.0) and told == ["first"]
    assert asked_to_save(tried, run, told)[2:] == ["save"], "a second checkpoint is an object of its own"


def test_a_checkpoint_of_an_earlier_result_is_no_answer(tried: Tried) -> None:
    run, told = reported(tried, saved="first")
    tried.manager.schedule_actor_task(run.tracked, "train", on_result=lambda *_: None)
    asked_to_save(tried, run, told)
    reply = IterationReply({"training_iteration": 2, "score": 0.5}, "checkpointing", 2.0, 2)
    tried.answered(run, reply)
    assert asked_to_save(tried, run, told)[2:] == ["train", "save"] and told == []


def test_an_algorithm_that_waits_for_checkpoints_gets_a_future(tried: Tried) -> None:
    tried.job.waits_for_checkpoints = True
    run, _ = reported(tried, saved="first")
    future = tried.manager.schedule_actor_task(run.tracked, "save", _return_future=True)
    assert future is not None and leader_of(run).actor.called[2:] == ["save"]


def test_an_answer_that_tune_waits_for_no_more_is_not_told(tried: Tried) -> None:
    # Tune asserts that it knows the trial of every answer.
    run, told = reported(tried, saved="first")
    asked_to_save(tried, run, told)
    tried.manager.clear_actor_task_futures(run.tracked)
    assert not tried.manager._callbacks and told == []


def test_a_worker_that_cleans_up_is_unfinished_until_it_answers(tried: Tried) -> None:
    # docs/bugs.md, 300: as long as there is one, Tune gives it 5 s at the end of a run.
    run = tried.placed(1.0)
    assert tried.manager.step(0.0) and tried.told == ["started"]
    leader: Any = run.life.crew.leader
    tried.manager.remove_actor(run.tracked)
    tried.manager._advance()
    assert leader.actor.called == ["load", "unload"]
    while tried.manager._callbacks:
        tried.manager.step(0.0)
    assert not tried.manager._runs and tried.manager.num_total_actors == 1
    (answer,) = list(tried.manager._calls._handlers.values())[-1:]
    answer("it has left threads")
    assert tried.manager.num_total_actors == 0


def test_a_dismissed_worker_is_not_watched_when_its_last_trial_loses_its_leader(tried: Tried) -> None:
    run, dismissed = wide(tried)
    tried.tell(run, life.ResizeWanted((0,), resize("a", ()).why))
    tried.manager.schedule_actor_task(run.tracked, "train")
    tried.follower_ended(run, dismissed, None)
    assert dismissed.actor.called == ["join", "enter", "unload"] and list(tried.watched) == [dismissed.name]
    tried.watched.clear()  # it has cleaned up, and serves another trial
    tried.answered(run, RayActorError())
    assert not tried.watched
    tried.manager._advance()
    assert tried.written()[-3:] == ["worker_lost", "trial_suspended", "trial_started"]


def test_a_group_that_mends_itself_while_it_shrinks_leaves_out_a_worker_that_left_before(tried: Tried) -> None:
    run = tried.placed(1.0)
    dismissed, dead = tried.pool.add_worker("dismissed", 1), tried.pool.add_worker("dead", 2)
    crew = run.life.crew
    crew.devices, crew.wanted, crew.followers, crew.width = (0, 1, 2), (0, 2), {1: dismissed, 2: dead}, 3
    crew.facts, crew.change = GroupFacts(mends=True), "reforming"
    tried.follower_ended(run, dismissed, None)
    tried.follower_ended(run, dead, RayActorError())
    assert crew.devices == crew.wanted == (0,) and crew.width == 1
    assert tried.manager._events[-1] == m.WorkerLost("a", (0,), 2)
    assert tried.written()[3:] == ["worker_lost", "resized"]


def test_the_second_error_of_a_followers_own_ends_growth_and_the_trial_goes_on(tried: Tried) -> None:
    run, follower = wide(tried)
    tried.follower_ended(run, follower, "ValueError('its own')")
    assert run in tried.manager._runs and not run.life.crew.growth_ended
    tried.manager._advance()
    tried.loaded(run, None)
    tried.trains(run, 3)  # it was placed on two devices again
    (joiner,) = run.life.crew.joining.values()
    tried.joined(run, joiner, "a new worker's loop ended early: ValueError('its own')")  # type: ignore[arg-type]
    assert run in tried.manager._runs and run.life.crew.growth_ended and run.life.crew.leader is not None
    events = [event for event in read_events(tried._directory / EVENT_LOG_NAME) if event["event"] == "growth_ended"]
    assert len(events) == 1 and "ValueError('its own')" in events[0]["reason"]
    assert m.GrowthEnded("a") in tried.manager._events


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_loop_that_cannot_be_divided_goes_on_alone(tried: Tried, who: str) -> None:
    run, follower = wide(tried)
    if who == "follower":
        tried.follower_ended(run, follower, Ungrowable("the loop is so"))
    else:
        tried.manager.schedule_actor_task(run.tracked, "train")
        facts = GroupFacts(ungrowable="the loop is so")
        tried.answered(run, IterationReply({}, "elastic", 0.0, facts=facts, lost="the loop is so"))
    tried.manager._advance()
    assert run in tried.manager._runs and run.life.crew.leader is not None and len(run.life.crew.devices) == 1
    assert [name for name in tried.written() if name != "worker_lost"][-3:] == [
        "growth_ended",
        "trial_suspended",
        "trial_started",
    ]


def test_a_refused_joiner_costs_nothing(tried: Tried) -> None:
    run, joiner = growing(tried)
    tried.joined(run, joiner, None)
    tried.manager.schedule_actor_task(run.tracked, "train")
    tried.follower_ended(run, joiner, NotTakenIn())
    facts = GroupFacts(ungrowable="the loop is so", refused=1.0)
    tried.answered(run, IterationReply({"training_iteration": 2}, "elastic", 1.0, 2, facts))
    assert run.life.place == "live" and run.life.crew.change == "steady" and run.life.crew.wanted == (0,)
    assert tried.written()[-3:] == ["growth_ended", "resize_failed", "trial_result"]


def test_a_new_worker_that_does_not_arrive_gives_its_device_back(tried: Tried) -> None:
    run, _ = growing(tried)
    now = time.monotonic()
    tried.manager._shell.report_late(now + LATE_S - 60)
    assert run.life.crew.change == "gathering" and 1 in run.life.crew.joining
    tried.manager._shell.report_late(now + LATE_S + 60)
    assert run.life.crew.change == "steady" and not run.life.crew.joining and run.life.place == "live"
    assert run.life.crew.wanted == (0,)
    assert tried.written()[-1] == "resize_failed"
    tried.manager._shell.report_late(now + 3 * LATE_S)
    assert run.life.crew.follower_errors == 1


def test_a_late_answer_of_a_joiner_does_not_stop_the_clock_for_its_next_trial(tried: Tried) -> None:
    # docs/bugs.md, 433
    run, joiner = growing(tried)
    before: Any = SimpleNamespace(life=TrialLife("b", run.life.outside, False, "elastic", SeenResults()))
    tried.joined(before, joiner, "a new worker's loop ended early")
    assert run.life.crew.change == "gathering"
    tried.manager._shell.report_late(time.monotonic() + LATE_S + 60)
    assert run.life.crew.change == "steady" and tried.written()[-1] == "resize_failed"


def test_a_trial_leaves_its_devices_when_one_of_them_is_lost(tried: Tried) -> None:
    run = tried.placed(2.0)
    assert run.life.crew.devices == (0, 1)
    leader: Any = run.life.crew.leader
    tried.devices.gone = [1]
    tried.manager._dispatch.poll_devices(force=True)
    tried.manager._advance()
    assert run.life.crew.leader is None and run.life.place != "live"
    assert leader.actor.called == ["load", "unload"]
    assert tried.job.engine.held_devices() == {} and tried.job.resources_in_use() == {"GPU": 0.0}
    tried.devices.came = {1: "n"}
    tried.manager._dispatch.poll_devices(force=True)
    tried.manager._advance()
    assert run.life.crew.leader is not None and run.life.crew.leader is not leader
    assert tried.job.resources_in_use() == {"GPU": 2.0}
    assert tried.written()[3:] == ["device_lost", "device_gained", "trial_started"]


def test_an_elastic_trial_is_reached_on_its_own_node_only_until_it_needs_another_node(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried.job, "setup", replace(tried.job.setup, one_node=True))
    run = tried.placed(1.0)
    assert tried.job.load_spec(run).one_node
    assert run.life.wish == "stay"
    # A node has come, and the trial is to grow onto it.
    tried.devices.nodes[1] = "other"
    tried.trains(run, 1)
    assert run.life.wish == "leave" and run.life.crew.change == "steady"
    first: Any = run.life.crew.leader
    tried.manager.schedule_actor_task(run.tracked, "train")
    assert first.actor.called == ["load", "train", "unload"]
    assert not tried.job.load_spec(run).one_node
    # Where the leader says another address, its followers use another one, too.
    run.life.crew.facts = GroupFacts(address=("10.0.0.1", 4321))
    assert not tried.job.load_spec(run).one_node


def test_trials_are_reached_from_all_nodes_once_the_job_has_had_devices_on_two(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    # docs/bugs.md, 181
    monkeypatch.setattr(tried.job, "setup", replace(tried.job.setup, one_node=True))
    run = tried.placed(1.0)
    crew, run.life.kind = run.life.crew, "elastic"
    crew.facts, crew.wanted = GroupFacts(address=(LOOPBACK, 4321)), (0, 1)
    tried.devices.nodes[1] = "other"
    assert tried.job.out_of_reach(run)
    del tried.devices.nodes[1]
    assert tried.job.out_of_reach(run) is False
    crew.facts = GroupFacts()
    assert not tried.job.load_spec(run).one_node


def test_trials_of_a_cluster_of_several_nodes_are_reached_from_all_of_them(tried: Tried) -> None:
    run = tried.placed(1.0)
    assert not tried.job.load_spec(run).one_node  # all devices are on one node so far


def test_the_report_is_drawn_before_the_run_returns(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be written into a folder that the script has removed or moved since."""
    drawn: list[Path] = []

    def write_slowly(log: Path) -> None:
        time.sleep(0.2)
        drawn.append(log)

    monkeypatch.setattr(final_report, "write_report", write_slowly)
    tried.placed(1.0)
    before = set(threading.enumerate())
    tried.manager.close()
    assert [log.name for log in drawn] == [EVENT_LOG_NAME]
    assert set(threading.enumerate()) <= before


def test_no_report_is_drawn_where_the_run_has_been_removed(tmp_path: Path) -> None:
    """A callback may remove the experiment's folder at the end of the run."""
    report = final_report.FinalReport(tmp_path / "gone" / EVENT_LOG_NAME)
    report.begin()
    report.wait()
    assert not (tmp_path / "gone").exists()


def test_a_trial_that_has_done_nothing_moves_without_a_checkpoint(tried: Tried) -> None:
    """It was asked for one checkpoint after the other: that of a class without an iteration has no number."""
    run = tried.placed(1.0, Stepper)
    leader: Any = run.life.crew.leader
    tried.tell(run, life.LeaveWanted("for a test"))
    tried.manager.schedule_actor_task(run.tracked, "train")
    assert leader.actor.called == ["load", "unload"]
    assert run.life.wish == "stay"
    assert run.life.calls[0].method == "train", "what Tune waits for is asked of the next worker"


def test_a_class_that_is_told_to_move_saves_once(tried: Tried) -> None:
    run = tried.placed(1.0, Stepper)
    leader: Any = run.life.crew.leader
    trial: Any = run.trial
    trial.on_checkpoint = lambda saved: setattr(trial, "latest_checkpoint_result", saved)
    tried.manager.schedule_actor_task(run.tracked, "train")
    reply = IterationReply({"training_iteration": 70}, "plain", 1.0, iteration=1)
    tried.answered(run, reply)
    tried.tell(run, life.LeaveWanted("for a test"))
    tried.manager.schedule_actor_task(run.tracked, "train")
    saved = SimpleNamespace(metrics={"training_iteration": 70})
    tried.answered(run, saved)
    assert leader.actor.called == ["load", "train", "save", "unload"]


def test_a_trial_that_is_not_elastic_gives_back_the_devices_that_it_was_promised(tried: Tried) -> None:
    """Others of its trainable were elastic, so it was started on two devices."""
    run = tried.placed(1.0)
    run.life.kind, run.life.crew.wanted = "elastic", (0, 1)
    tried.manager.schedule_actor_task(run.tracked, "train")
    reply = IterationReply({"training_iteration": 1}, "plain", 1.0, iteration=1)
    tried.answered(run, reply)
    assert tried.manager._events[-1] == m.ResizeFailed("a", (0,))
    assert run.life.crew.wanted == run.life.crew.devices == (0,)


def test_a_limit_of_pending_trials_that_the_user_has_set_is_kept(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    controller: Any = tried.job._controller
    controller.update_max_pending_trials = asked.append
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "1")
    tried.job.ask_ahead(3)
    assert not asked
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "auto")
    tried.job.ask_ahead(3)
    assert asked == [4]


def test_a_trial_that_no_worker_can_host_fails_alone_and_once(tried: Tried) -> None:
    request = SimpleNamespace(bundles=[{"GPU": 1.0}, {"GPU": 1.0}], head_bundle_is_empty=False)
    trial: Any = SimpleNamespace(trial_id="b", placement_group_factory=request, max_failures=-1)
    tried.manager.note_trial(trial)
    tracked = tried.manager.add_actor(
        None, {"config": {TRIAL_INFO: trial}}, None, on_error=lambda tracked, error: tried.told.append(str(error))
    )
    assert tried.manager.step(0.0) and trial.max_failures == 0
    assert "several bundles" in tried.told[0] and tried.manager.is_actor_failed(tracked)
    assert not tried.manager.remove_actor(tracked)


def test_a_job_in_rays_local_mode_is_left_to_ray(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/bugs.md, 215. Newer Rays have no such mode."""
    request = SimpleNamespace(bundles=[{"GPU": 1.0}], head_bundle_is_empty=False)
    trial: Any = SimpleNamespace(placement_group_factory=request)
    assert TuningJob.for_controller(tried.job._controller, tried.job._scheduler, trial) is not None
    monkeypatch.setattr(tuning_job, "in_local_mode", lambda: True)
    assert TuningJob.for_controller(tried.job._controller, tried.job._scheduler, trial) is None


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_later_trial_of_several_bundles_is_left_to_ray_by_a_job_on_demand(tried: Tried, on_demand: bool) -> None:
    """docs/bugs.md, 214. A job that holds its devices all the time might hold those that Ray waits for."""
    rays: Any = SimpleNamespace(_live_actors_to_ray_actors_resources={})
    tried.manager.stand_before(rays)
    tried.job.trials._scheduler.executor = FluidExecutor(reserve=not on_demand)
    request = SimpleNamespace(bundles=[{"GPU": 1.0}, {"GPU": 1.0}], head_bundle_is_empty=False)
    trial: Any = SimpleNamespace(trial_id="b", placement_group_factory=request, max_failures=-1)
    tried.manager.note_trial(trial)
    assert tried.manager.hosts("b") is not on_demand and bool(tried.manager._refused) is not on_demand
    tried.manager.trial_removed(trial)
    assert ("b" in tried.job._ended) is not on_demand


def test_the_status_line_counts_the_trials_that_tune_wants_to_run(tried: Tried) -> None:
    run = tried.placed(1.0)
    assert tried.manager.status_line() == "FluidTune: 1/2 gpu devices busy, 1 trials on them (0 on several), 0 waiting"
    tried.manager.remove_actor(run.tracked)
    assert tried.manager.status_line() == "FluidTune: 0/2 gpu devices busy, 0 trials on them (0 on several), 0 waiting"


def test_no_batch_of_events_sorts_the_queue(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    # docs/bugs.md, 163
    sorts: list[int] = []
    in_order = WaitQueue.in_order
    monkeypatch.setattr(WaitQueue, "in_order", lambda queue: sorts.append(len(queue)) or in_order(queue))
    run = tried.placed(1.0)
    tried.manager._emit(m.Result(run.id, 1.0, 1.0))
    tried.manager._advance()
    assert not sorts and tried.job.engine.waiting == () and sorts == [0]


def unload_call(tried: Tried, status: str) -> tuple[str, tuple[Any, ...]]:
    """The last call of a worker's actor and its arguments, when its trial ends so and Tune retries it."""
    run = tried.placed(1.0)
    leader: Any = run.life.crew.leader
    run.trial.status = status
    tried.manager.remove_actor(run.tracked)
    run.trial.status = "PENDING"
    tried.manager._advance()
    return leader.actor.called[-1], leader.actor.args[-1]


@pytest.mark.parametrize(
    ("asked", "status", "keeps"), [(True, "TERMINATED", True), (True, "ERROR", False), (False, "TERMINATED", False)]
)
def test_a_trainable_may_stay_if_that_is_asked_for_and_it_has_not_failed(
    tried: Tried, asked: bool, status: str, keeps: bool
) -> None:
    tried.job.keeps_trainables = asked
    call, arguments = unload_call(tried, status)
    assert (call, arguments[1]) == ("unload", keeps)


@pytest.mark.parametrize(("status", "fresh"), [("TERMINATED", None), ("ERROR", "its trial failed"), ("PAUSED", None)])
def test_a_process_in_which_a_trial_failed_serves_no_other(tried: Tried, status: str, fresh: str | None) -> None:
    # docs/bugs.md, 190
    call, arguments = unload_call(tried, status)
    assert (call, arguments[0]) == ("unload", fresh)

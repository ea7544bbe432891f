"""What the manager does when trials run and when workers and devices go. No Ray runs here."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.tune import PlacementGroupFactory
from ray.tune.trainable import FunctionTrainable

from fluidtune import FluidExecutor
from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.cluster.sharing.lanes import Eviction
from fluidtune.engine import Reason
from fluidtune.engine import messages as m
from fluidtune.engine.speed import TRIALS_REMEMBERED
from fluidtune.ray_compat.trainable import TRIAL_INFO
from fluidtune.tune import tuning_job, worker_specs
from fluidtune.tune.device_setup import DeviceSetup, devices_of_one_node
from fluidtune.tune.trial_registry import is_one_bundle
from fluidtune.tune.trial_run import PROGRESS, keep_progress
from fluidtune.tune.tuning_job import TuningJob
from tests.engine.test_reasons import WAITS
from tests.tune.tried_manager import LOADED, Tried, leader_of, tunes_trial


def test_a_worker_hears_which_results_tunes_state_in_the_storage_has(tried: Tried) -> None:
    run, snapshots = tried.placed(1.0), tried.job.snapshots
    tried.job._controller.get_trials = lambda: [run.trial]
    assert tried.manager.step(0.0)
    states = []
    for iteration in (1, 2, 3):
        tried.manager.schedule_actor_task(run.tracked, "train", on_result=lambda tracked, result: None)
        reply = IterationReply({"training_iteration": iteration}, "elastic", 1.0, iteration)
        if iteration == 3:
            tried.answered(run, reply)
            states.append(snapshots.state_written())  # Tune has not got the result yet
            assert tried.manager.step(0.0)
        else:
            tried.answered(run, reply)
            assert tried.manager.step(0.0)
            states.append(snapshots.state_written())
    for there in states:
        there(True)
    tried.manager.schedule_actor_task(run.tracked, "train")
    leader: Any = leader_of(run)
    assert leader.actor.args[-4:] == [(), (), (), (None, 2)]


def asks_later(tried: Tried, trial: Any, bundles: list[dict[str, float]], on_error: Any) -> Any:
    """Tune adds a trial that asked for less when it was made."""
    tried.manager.note_trial(trial)
    trial.placement_group_factory = PlacementGroupFactory(bundles)
    return tried.manager.add_actor(None, {"config": {TRIAL_INFO: trial}}, None, on_error=on_error)


def test_tune_is_not_told_that_an_actor_failed_which_it_has_let_go_of(tried: Tried) -> None:
    """With fail_fast, the first refused trial ends the run, and Tune stops the second. Seen: a KeyError of the run."""
    told: list[str] = []
    _, second = (
        asks_later(tried, tunes_trial(name), [{"GPU": 3.0}], lambda *_, name=name: told.append(name)) for name in "ab"
    )
    tried.manager.step(0.0)
    assert not tried.manager.remove_actor(second)
    tried.manager.step(0.0)
    assert told == ["a"]


def test_another_trials_checkpoint_is_news_once_also_to_a_later_driver(tried: Tried) -> None:
    """The driver before had it restored and heard results; then it died. Seen: iterations were reported twice."""
    saved = SimpleNamespace(checkpoint=SimpleNamespace(path="/runs/donor/checkpoint_3"), metrics={})
    trial: Any = SimpleNamespace(
        run_metadata=SimpleNamespace(last_result={}), num_failures=0, latest_checkpoint_result=saved
    )
    keep_progress(trial, {"delivered": 7, "results": 7, "own_numbers": False})
    known = getattr(trial.run_metadata, PROGRESS)
    other = SimpleNamespace(checkpoint=SimpleNamespace(path="/runs/donor/checkpoint_4"), metrics={})

    def restored(name: str, checkpoint: Any) -> tuple[Any, ...]:
        run = tried.placed(1.0, name=name, progress=known)
        tried.manager.schedule_actor_task(run.tracked, "restore", (checkpoint,))
        args: tuple[Any, ...] = leader_of(run).actor.args[-1]
        tried.manager.remove_actor(run.tracked)
        tried.manager._advance()
        return args

    assert restored("a", saved) == (saved, True)
    assert restored("b", other) == (other,), "the algorithm has given it another one since"
    assert restored("a", saved) == (saved,), "under the same driver it is given that one again"


def test_another_trials_checkpoint_is_no_news_when_the_worker_dies(tried: Tried) -> None:
    run = tried.placed(1.0)
    run.trial.latest_checkpoint_result = saved = SimpleNamespace(checkpoint=None, metrics={})
    tried.trains(run, 1)
    tried.manager.schedule_actor_task(run.tracked, "train")
    tried.answered(run, RayActorError())
    tried.manager._advance()
    tried.loaded(run, LOADED)
    assert leader_of(run).actor.args[-1] == (saved, True)


def test_trials_are_reached_from_all_nodes_once_the_job_has_had_devices_on_two(tried: Tried) -> None:
    # Seen: once the cluster had a second node, each elastic trial was loaded anew before it grew onto it.
    tried.job.setup = replace(tried.job.setup, one_node=True)
    run = tried.placed(1.0)
    assert not tried.job.on_several_nodes((0, 1))
    tried.devices.nodes[1] = "other"
    assert tried.job.on_several_nodes((0, 1)) and not tried.job.on_several_nodes((1,))
    assert not worker_specs.load_spec(tried.job, run).one_node
    del tried.devices.nodes[1]
    assert not worker_specs.load_spec(tried.job, run).one_node


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


#: Each refusal: what a trial asks for, how the job is set up, and a part of what is said.
REFUSALS: dict[Reason, tuple[list[dict[str, float]], dict[str, Any], str]] = {
    Reason.SEVERAL_BUNDLES: ([{"GPU": 1.0}, {"GPU": 1.0}], {}, "several bundles"),
    Reason.JOB_SMALL: ([{"GPU": 3.0}], {}, "asks for 3 GPUs, and the job may have 2"),
    Reason.DEVICE_PARTS: ([{"GPU": 1.5}], {}, "asks for 1.5 GPUs; ask for a whole number or for 1 or less"),
    Reason.RESOURCE_LACKING: ([{"GPU": 1.0, "licence": 1.0}], {}, "asks for 1 licence, the job's first trial for 0"),
    Reason.NODE_SMALL: ([{"GPU": 2.0}], {"on_one_node": 1}, "no node of the job has more than 1"),
    Reason.LEASED_FEWER: ([{"GPU": 2.0}], {"leased": True}, "which the arbiter leases together"),
}


def test_each_wait_and_refusal_is_brought_about_by_a_test() -> None:
    assert WAITS.keys() | REFUSALS.keys() | {Reason.PAUSED} == {each for each in Reason if each.remedy}


@pytest.mark.parametrize("reason", REFUSALS, ids=lambda reason: reason.label)
def test_a_trial_that_no_worker_can_host_fails_alone_and_once(reason: Reason, tried: Tried) -> None:
    """Also where it asked for less when Tune made it: a ResourceChangingScheduler. Seen: it waited for ever."""
    bundles, setup, mentions = REFUSALS[reason]
    tried.job.trials._setup = replace(tried.job.setup, **setup)
    trial = tunes_trial("b", max_failures=-1)
    tracked = asks_later(
        tried, trial, bundles, lambda tracked, error: tried.told.extend([str(error), trial.max_failures])
    )
    assert tried.manager.step(0.0) and mentions in tried.told[0] and tried.manager.is_actor_failed(tracked)
    (refused,) = tried.logged("trial_ended")
    assert refused["why"] == reason.label and refused["reason"] in tried.told[0], "seen: the log had no such trial"
    assert tried.told[1] == 0 and trial.max_failures == -1, "seen: a restored run gave it no retries"
    assert not tried.manager.remove_actor(tracked)


def test_a_paused_trial_that_is_refused_ends_once(tried: Tried) -> None:
    """Seen: it counted as paused, and ended a second time in the log when Tune let go of it."""
    tried.job.log.events_heard([m.TrialEnded("b", "paused")], {})
    trial = tunes_trial("b")
    asks_later(tried, trial, [{"GPU": 3.0}], lambda *_: None)
    tried.manager.trial_removed(trial)
    tried.manager._advance()
    assert [each["ending"] for each in tried.logged("trial_ended")] == ["paused", "failed"]


def test_each_trial_that_tune_stops_ends_once_in_the_log_whoever_paused_it(tried: Tried) -> None:
    """Seen: after a restore the log never said that of trials which the driver before had paused."""
    paused, over, leaving = tunes_trial("paused", status="PAUSED"), tunes_trial("over"), tried.placed(1.0).trial
    for trial in (paused, over):
        tried.manager.note_trial(trial)
    tried.manager.remove_actor(tried.manager._runs.by_trial["a"].tracked)
    tried.manager.trial_removed(leaving)  # Tune has paused it in the same step
    tried.manager.trial_removed(paused)
    paused.status = leaving.status = "TERMINATED"
    tried.manager._advance()
    over.status = "TERMINATED"
    tried.manager.run_ended(True)
    ends = [(each["trial"], each["ending"]) for each in tried.logged("trial_ended")]
    assert ends == [("a", "stopped"), ("paused", "stopped"), ("over", "stopped")]


def test_a_trial_that_comes_as_one_leaves_its_device_needs_no_other_one(tried: Tried) -> None:
    """As when Tune pauses one and promotes another. Else a job on demand asked for one device more each time."""

    def comes(name: str) -> Any:
        tried.manager.note_trial(trial := tunes_trial(name, get_trainable_cls=lambda: FunctionTrainable))
        return tried.manager.add_actor(None, {"config": {TRIAL_INFO: trial}}, None)

    leaves, _ = (tried.placed(1.0, name=name) for name in "ab")
    tried.manager.remove_actor(leaves.tracked)
    comes("c")
    assert not tried.job.newcomers
    tried.manager._advance()
    waits = comes("d")
    assert list(tried.job.newcomers) == [1.0]
    tried.manager._advance()
    tried.manager.remove_actor(waits)
    comes("e")
    assert list(tried.job.newcomers) == [1.0], "the one that left had no device"


@pytest.mark.parametrize(
    "settings, kind, expected",
    [
        (FluidExecutor(reserve=True), "gpu", 2),
        (FluidExecutor(devices="emulated:20"), "emulated", 8),
        (FluidExecutor(), "gpu", None),
    ],
)
def test_how_many_devices_one_node_has_is_known_where_none_come(
    settings: FluidExecutor, kind: str, expected: int | None
) -> None:
    plan = Layout(kind, 20, {"GPU": 1.0}, 1.0, 1, {"GPU": 1.0})
    assert devices_of_one_node(settings, plan, [{"GPU": 2.0, "CPU": 4.0}, {"GPU": 1.0}]) == expected


def test_a_job_in_rays_local_mode_is_left_to_ray(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer Rays have no such mode. Seen: the script's own process was cleaned as a worker's."""
    for local in (False, True):
        monkeypatch.setattr(tuning_job, "in_local_mode", lambda local=local: local)
        made = TuningJob.for_controller(tried.job._controller, tried.job.scheduler, tunes_trial(), ExitStack())
        assert (made is None) == local


@pytest.mark.parametrize(
    ("request_", "is_one"),
    [
        (PlacementGroupFactory([{"GPU": 1}]), True),
        (PlacementGroupFactory([{"GPU": 1, "CPU": 0}], strategy="SPREAD"), True),
        (PlacementGroupFactory([{}, {"GPU": 1}]), False),
        (PlacementGroupFactory([{"GPU": 1}, {"GPU": 1}]), False),
        (PlacementGroupFactory([{"GPU": 1}], "PACK", "a name"), False),
    ],
)
def test_a_request_that_says_more_than_one_bundle_is_for_ray(request_: PlacementGroupFactory, is_one: bool) -> None:
    """Seen: trials that asked by a label selector for certain nodes ran on any."""
    assert is_one_bundle(request_) is is_one


@pytest.mark.labels
def test_a_label_selector_says_more_than_one_bundle() -> None:
    assert not is_one_bundle(PlacementGroupFactory([{"GPU": 1}], bundle_label_selector=[{"zone": "a"}]))


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
def test_a_process_serves_further_trials_if_that_is_asked_for_and_none_has_failed(
    tried: Tried, asked: bool, status: str, keeps: bool
) -> None:
    # Seen: a failed trial's retry ran in the process in which the error had been raised.
    tried.job.reuses = asked
    call, arguments = unload_call(tried, status)
    assert (call, arguments) == ("unload", (keeps,))


@pytest.mark.parametrize(
    ("lanes", "packing", "kind", "by_count"),
    [(None, 4, "gpu", True), ("FAIR", 4, "gpu", False), (None, 1, "gpu", False), (None, 4, "cpu", False)],
    ids=["by count", "lanes", "alone", "cpu"],
)
def test_where_gpus_are_shared_by_count(lanes: str | None, packing: int, kind: str, by_count: bool) -> None:
    layout = Layout(kind, 2, {"CPU": 1.0}, 1.0, packing, {"CPU": 1.0})
    assert DeviceSetup("job", layout, None, 1, None, lanes, None, None).shares_gpus_by_count == by_count


def test_all_trials_alike_that_wait_learn_how_many_devices_one_needs(tried: Tried) -> None:
    runs = [tried.placed(1.0, loaded=False, name=name) for name in "ab"]
    tried.loaded(runs[0], Eviction("one worker", devices=2))
    tried.loaded(runs[1], Eviction("two workers", devices=3))
    found = [(each.trial, each.devices) for each in tried.manager._events if isinstance(each, m.GangFound)]
    assert found == [("a", 2), ("a", 3), ("b", 3)]
    assert all(run.life.gang for run in runs)
    assert tried.job.trials.share_of(runs[0].trial) == 3
    tried.manager._advance()
    assert tried.job.engine.waiting == ("a", "b"), "the job has two devices"


def holders(of: Any, wanted: str) -> set[str]:
    """``Class.attribute`` of each container below an object of ours that has ``wanted`` as a key or an element."""
    found, seen, left = set(), set(), [of]
    while left:
        each = left.pop()
        if id(each) in seen or not type(each).__module__.startswith("fluidtune"):
            continue
        seen.add(id(each))
        slots = getattr(type(each), "__slots__", ())
        attributes = {**getattr(each, "__dict__", {}), **{name: getattr(each, name, None) for name in slots}}
        for attribute, value in attributes.items():
            inside = [value]
            while inside:
                part = inside.pop()
                if isinstance(part, (dict, list, tuple, set, frozenset, deque)):
                    if wanted in part:
                        found.add(f"{type(each).__name__}.{attribute}")
                    inside += [*part, *(part.values() if isinstance(part, dict) else ())]
                elif not isinstance(part, str):
                    left.append(part)
    return found


def test_what_the_driver_keeps_of_a_trial_that_has_ended_is_known(tried: Tried) -> None:
    # Seen: the driver kept some hundred bytes of each trial that had ended in each of five places.
    last = TRIALS_REMEMBERED + 20
    for number in range(last + 1):
        run = tried.placed(1.0, name=f"t{number}", params={"rate": f"value {number}"})
        tried.manager.schedule_actor_task(run.tracked, "train")
        tried.answered(run, IterationReply({"training_iteration": 1, "score": 0.5}, "checkpointing", 1.0))
        tried.manager._advance()
        run.trial.status = "TERMINATED"
        tried.manager.remove_actor(run.tracked)
        tried.manager._advance()
        while tried.manager._callbacks:
            tried.manager.step(0.0)
    kept = holders(tried.manager, "t0")
    assert kept == {"State.trials", "TrialRegistry.known", "TuningJob._ended", "TuningJob.started"}
    assert not holders(tried.manager, f"value {last}")

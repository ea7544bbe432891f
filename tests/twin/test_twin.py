"""The twin: whole jobs on a virtual clock, and jobs read off event logs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fluidtune.profiles import DEFAULT, Profile
from fluidtune.report.recorded import read_job
from fluidtune.twin import Costs, RecordedJob, RecordedTrial, Stage, Twin, forecast, grid
from tests.report.makers import added, begin, ended, ev, group, over, result, started

ALONE = Profile("alone", {"1": 1.0})


def test_81_trials_on_8_devices_keep_them_busy():
    found = forecast(grid(81, 27, DEFAULT), 8)
    assert found.packing == 2
    assert found.held > 0.9
    assert found.makespan < 0.6 * 81 * 27 / 8


@pytest.mark.parametrize("overhead", [1.5, 2.0, 10.0])
def test_packing_overhead_loses_next_to_nothing(overhead: float):
    """Dissertation 3.6.4.2."""
    profile = Profile("p", {"1": 1.0}, {2: overhead, 3: 1.5 * overhead, 4: 2 * overhead}, memory=0.1)
    unpacked = forecast(grid(81, 27, profile, max_packing=1), 8).makespan
    found = forecast(grid(81, 27, profile), 8)
    assert found.packing == (2 if overhead < 2 else 1)
    assert found.makespan < 1.02 * unpacked


def test_trials_that_do_not_scale_are_no_longer_resized_after_a_few_attempts():
    twin = Twin(grid(6, 60, Profile("p", {"1": 1.0, "2": 1.25, "3": 2.1, "4": 3.9})), 16)
    assert twin.run() < 75 and twin.resizes <= 3 * 6, "alone they take 60 s"


def test_seconds_that_are_not_training_are_counted():
    costs = Costs(begin=1.0, cold=2.0, at_once=1.0, first=0.7, turn=0.01)
    job = grid(4, 2, ALONE, max_packing=1, kind="plain", growable=False, costs=costs)
    # Processes start one at a time, and each trial has one: the second device begins its trials 2 s after the first.
    assert Twin(job, 2).run() == pytest.approx(1 + 2.0 + 2 * (2.0 + 0.7 + 2.01))
    assert Twin(replace(job, reuses=True), 2).run() == pytest.approx(1 + 4.0 + 0.7 + 2.01 + 0.01 + 2.01)
    two_slowly = replace(job, costs=replace(costs, at_once=1.5))
    assert Twin(two_slowly, 2).run() == pytest.approx(1 + 2 * (2.0 * 2 / 1.5 + 0.7 + 2.01))


@pytest.mark.parametrize("waits", [False, True])
def test_a_paused_trial_goes_on_in_its_own_process_on_cores(waits: bool):
    stages = (Stage("rung0", 2, 2.0), Stage("rung1", 3, 3.0))
    job = RecordedJob((RecordedTrial("a", stages),), ALONE, {}, waits=waits, costs=Costs(cold=2.0, first=0.7))
    assert Twin(job, 1).run() == pytest.approx(2.7 + 2 + (0.0 if waits else 2.7) + 3)


def log() -> list[dict]:
    """Two rungs: a, b and c train one iteration, b goes on without a pause, as HyperBand's last does."""
    events = [begin(0, 1, kind="emulated"), group(0.1, "rung0"), group(0.1, "rung1")]
    at = 1.0
    ran = [("a", "rung0", 1, 1), ("c", "rung0", 1, 1), ("a", "rung1", 2, 2), ("b", "rung0", 1, 3)]
    for trial, rung, told, done in ran:
        events += [{**added(at, trial, rung), "kind": "plain", "iterations": told}, started(at, trial, 0)]
        events += [result(at + k, trial, k, 1.0, 1.0) for k in range(1, done + 1)]
        at += done
        events += [ev(at, "kind_found", trial=trial, kind="elastic"), ended(at, trial)]
    return [*events, over(at)]


def test_a_job_is_read_off_a_log_and_an_unpaused_promotion_is_split():
    job = read_job(log())
    stages = {recorded.trial: [(stage.group, stage.iterations) for stage in recorded.stages] for recorded in job.trials}
    assert stages == {"a": [("rung0", 1), ("rung1", 2)], "c": [("rung0", 1)], "b": [("rung0", 1), ("rung1", 2)]}
    assert (job.kind, job.max_packing) == ("elastic", None)
    assert forecast(job, 1).makespan == pytest.approx(7.0, abs=0.5)


def test_a_trial_moved_in_the_middle_of_a_rung_has_one_stage_there():
    events = log()
    moved = next(k for k, event in enumerate(events) if event.get("trial") == "b" and event["event"] == "trial_result")
    at = events[moved + 1]["t"]
    events.insert(moved + 2, {**added(at, "b", "rung1"), "iterations": 1})
    job = read_job(events)
    stages = {
        recorded.trial: [(stage.group, stage.iterations, stage.told) for stage in recorded.stages]
        for recorded in job.trials
    }
    assert stages["b"] == [("rung0", 1, 1), ("rung1", 2, 2)]


def test_the_cost_of_starting_processes_is_read_off_a_log():
    events = log()
    # Two workers started together in 3 s, and one by itself in 2 s.
    for there, seconds in ((4.5, 3.0), (4.6, 3.0), (8.5, 2.0)):
        events.append(ev(there, "worker_started", worker="w", device=0, pid=1, seconds=seconds))
    costs = read_job(events).costs
    assert costs.cold == 2.0
    assert costs.at_once == pytest.approx(2 * 2.0 / 3.1)


def test_the_cost_of_the_first_iteration_in_a_new_process_is_read_off_a_log():
    events = log()
    job = read_job(events)
    assert job.costs.first == 0.0
    # The worker was there 3 s before b's first result; b's other iterations take 1 s.
    b = next(k for k, event in enumerate(events) if event.get("trial") == "b" and event["event"] == "trial_result")
    worker = ev(events[b]["t"] - 3.0, "worker_started", worker="w", device=0, pid=1, seconds=1.0)
    events[b - 1]["t"] = worker["t"] - 1.0  # trial_started
    events.insert(b, worker)
    assert read_job(events).costs.first == pytest.approx(3.0 - 1.0 - job.costs.turn)


def test_the_share_that_a_script_asked_for_is_read_off_a_log():
    events = log()
    for event in events:
        if event["event"] == "trial_added":
            event["share"] = 0.5
    assert {stage.share for recorded in read_job(events).trials for stage in recorded.stages} == {0.5}
    two = RecordedTrial("wide", (Stage("all", 4, 4.0, 2.0),))
    job = RecordedJob((two,), DEFAULT, {"all": True}, kind="elastic", max_packing=1)
    twin = Twin(job, 2)
    assert twin.run() == pytest.approx(4 * DEFAULT.iteration((2,), 1))
    assert twin.resizes == 0


def test_a_trial_of_more_devices_than_a_common_node_has_is_planned():
    """16 cores of one machine, beside a first trial of one core. Seen: `fluidtune plan` said "trials never ended"."""
    stage = Stage("all", 2, 2.0, share=16.0)
    two = RecordedTrial("a", (stage,)), RecordedTrial("b", (stage,))
    job = RecordedJob(two, DEFAULT, {"all": True}, kind="plain", growable=False)
    assert forecast(job, 16).makespan > forecast(job, 32).makespan

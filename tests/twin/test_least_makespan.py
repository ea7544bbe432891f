"""The bound: no schedule of the twin or of an exhaustive search is below it, and simple jobs reach it."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.profiles import DEFAULT, Profile
from fluidtune.twin import Costs, RecordedJob, RecordedTrial, Stage, Twin, grid, least_makespan
from fluidtune.twin.least_makespan import PRECISION
from tests.engine.invariants import check_engine

ALONE = Profile("alone", {"1": 1.0})
RUNGS = {"rung0": True, "rung1": True}


def test_to_be_done_in_time_costs_device_time():
    """One long trial has to be wide, and then costs more than at its cheapest. Area and path do not see that."""
    long = RecordedTrial("long", (Stage("g", 40, 40.0),))
    short = tuple(RecordedTrial(f"short{k}", (Stage("g", 8, 8.0),)) for k in range(12))
    found = least_makespan(RecordedJob((long, *short), DEFAULT, {"g": False}), 4)
    assert found.seconds > 1.2 * max(found.area_seconds, found.path_seconds)


def test_a_rung_begins_after_the_last_trial_of_the_rung_before():
    slow = RecordedTrial("slow", (Stage("rung0", 2, 2.0),), cost=5.0)
    best = RecordedTrial("best", (Stage("rung0", 2, 2.0), Stage("rung1", 3, 3.0)))
    found = least_makespan(RecordedJob((best, slow), ALONE, RUNGS), 8)
    assert found.seconds == pytest.approx(13.0) and found.path_seconds == pytest.approx(13.0)
    stream = least_makespan(RecordedJob((best, slow), ALONE, dict.fromkeys(RUNGS, False)), 8)
    assert stream.seconds == pytest.approx(10.0)


def test_start_up_counts_and_processes_start_a_few_at_a_time():
    costs = Costs(begin=1.0, cold=2.0, at_once=2.0, first=0.5, turn=0.1)
    found = least_makespan(grid(4, 5, ALONE, kind="plain", growable=False, costs=costs), 4)
    # Two devices are ready after 3.5 s and two after 5.5 s, and 20 s of iterations are to be done.
    assert found.area_seconds == pytest.approx((20 + 2 * 3.5 + 2 * 5.5) / 4, rel=PRECISION)
    assert found.path_seconds == pytest.approx(3.5 + 5 + 4 * 0.1)


SPEEDS = st.builds(
    lambda one, two, four, crowd2, crowd4: Profile(
        "any", {"1": one, "2": one * two, "4": one * two * four}, {2: one * crowd2, 4: one * crowd4}, 0.1
    ),
    st.floats(0.2, 3.0),
    st.floats(0.4, 1.1),
    st.floats(0.4, 1.1),
    st.floats(0.8, 2.2),
    st.floats(1.2, 4.5),
)
COSTS = st.builds(
    Costs,
    begin=st.floats(0, 2),
    cold=st.floats(0, 2),
    at_once=st.sampled_from([math.inf, 1.0, 1.5, 3.0]),
    first=st.floats(0, 1),
    turn=st.floats(0, 0.3),
)


@st.composite
def jobs(draw: st.DrawFn) -> RecordedJob:
    """Streams, grids and successive halving, of trials that differ."""
    count = draw(st.integers(1, 9))
    shape = draw(st.sampled_from(["stream", "grid", "rungs"]))
    trials = []
    for number in range(count):
        cost = draw(st.sampled_from([1.0, 1.0, 0.5, 3.0]))
        if shape == "rungs":
            lengths = [draw(st.integers(1, 4))] + [2 * k for k in (1, 2) if number < count // 2**k]
            stages = tuple(Stage(f"rung{k}", length, float(length)) for k, length in enumerate(lengths))
        else:
            length = draw(st.integers(1, 12))
            told = draw(st.sampled_from([None, 12.0, float(length)]))
            share = draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, 2.0])) if shape == "grid" else 1.0
            stages = (Stage("g", length, told, share),)
        trials.append(RecordedTrial(f"t{number}", stages, cost))
    return RecordedJob(
        tuple(trials),
        draw(SPEEDS),
        {"g": shape != "stream", **{f"rung{k}": True for k in range(3)}},
        pending=draw(st.sampled_from([None, 1])),
        kind=draw(st.sampled_from(["plain", "checkpointing", "elastic"])),
        growable=draw(st.booleans()),
        costs=draw(COSTS),
        max_packing=draw(st.sampled_from([None, 1, 2])),
        max_workers=draw(st.sampled_from([None, None, 2])),
    )


@settings(max_examples=60, deadline=None)
@given(job=jobs(), devices=st.integers(2, 9))
def test_every_job_ends_on_the_twin_and_no_schedule_of_it_is_below_the_bound(job: RecordedJob, devices: int):
    found, twin = least_makespan(job, devices), Twin(job, devices)
    assert twin.run() >= found.seconds * (1 - 1e-9)
    assert found.seconds >= max(found.path_seconds, found.area_seconds) * (1 - 2 * PRECISION)
    check_engine(twin.engine)
    assert twin.iterations == sum(stage.iterations for trial in job.trials for stage in trial.stages)
    assert 0 < twin.held_part <= 1 + 1e-9


def shortest(work: list[tuple[int, ...]], profile: Profile) -> float:
    """The makespan of the best schedule on two devices, found by trying all of them.

    ``work``: by trial, its iterations in the first rung, and in the second if it goes there. At every end of an
    iteration each trial that stands at a boundary may wait, begin an iteration on a device beside at most one other, or
    on both devices.
    """
    best = math.inf
    places: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (0, 1))

    def go_on(now: float, todo: tuple[tuple[int, ...], ...], running: dict[int, tuple[tuple[int, ...], float]]) -> None:
        nonlocal best
        if now >= best:
            return
        if not running and not any(map(sum, todo)):
            best = now
            return
        first_rung = any(left[0] for left in todo)
        free = [k for k, left in enumerate(todo) if k not in running and (left[0] or (sum(left) and not first_rung))]
        for chosen in product(places, repeat=len(free)):
            then = dict(running) | {k: (place, 1.0) for k, place in zip(free, chosen, strict=True) if place}
            wide = [k for k, (place, _) in then.items() if len(place) == 2]
            beside = [sum(device in place for place, _ in then.values()) for device in (0, 1)]
            if then and max(beside) <= (1 if wide else 2):
                advance(now, todo, then, beside)

    def advance(now: float, todo: tuple[tuple[int, ...], ...], running: dict, beside: list[int]) -> None:
        pace = {
            k: profile.iteration((2,)) if len(place) == 2 else profile.iteration((1,), beside[place[0]])
            for k, (place, _) in running.items()
        }
        step = min(left * pace[k] for k, (_, left) in running.items())
        after, done = {}, []
        for k, (place, left) in running.items():
            rest = left - step / pace[k]
            if rest > 1e-12:
                after[k] = (place, rest)
            else:
                done.append(k)
        go_on(now + step, tuple(minus_one(left) if k in done else left for k, left in enumerate(todo)), after)

    go_on(0.0, tuple(work), {})
    return best


def minus_one(left: tuple[int, ...]) -> tuple[int, ...]:
    return (left[0] - 1, *left[1:]) if left[0] else (0, left[1] - 1)


@settings(max_examples=25, deadline=None)
@given(
    work=st.lists(st.sampled_from([(1,), (2,), (1, 1), (2, 1), (1, 2)]), min_size=1, max_size=2),
    more=st.sampled_from([[], [(1,)]]),
    profile=SPEEDS,
)
def test_no_schedule_at_all_is_below_the_bound(work: list, more: list, profile: Profile):
    trials = [
        RecordedTrial(f"t{k}", tuple(Stage(f"rung{rung}", count, float(count)) for rung, count in enumerate(counts)))
        for k, counts in enumerate(work + more)
    ]
    only_two = Profile("two", {"1": profile.seconds["1"], "2": profile.seconds["2"]}, {2: profile.packed[2]})
    found = least_makespan(RecordedJob(tuple(trials), only_two, RUNGS), 2).seconds
    best = shortest(work + more, only_two)
    assert found <= best * (1 + 1e-9)
    assert best <= 3 * found  # the bound says something

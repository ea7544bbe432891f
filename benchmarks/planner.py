"""How near the planner's schedules are to a lower bound, and how long planning takes.

``python -m benchmarks.planner --json [--quick] [--count N] [--seed N]``. There are three sides over the same seeded
instances: "best" (`benchmarks.planners`), "static" (the paper's StaticFluid) and "one_per_device" (stock Ray Tune's
way: every trial on one device, in the given order). Nothing is run: makespans are the model's (eq. 3.2), so the kind is
"twin". Every schedule of "best" and "static" is checked against the model's rules.

``over_bound`` is makespan / `lower_bound`. No schedule can reach this bound if there are too few trials to be packed
and too many to be spread. ``over_relaxed_bound`` uses the fractional relaxation, which is nearer to the optimum.
``ratio`` is the mean of the other side's makespan divided by ours.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections import defaultdict
from statistics import mean

from benchmarks.common import machine
from benchmarks.instances import FAMILIES, Instance, instances, large
from benchmarks.planners import Modes, best, check, relaxed_bound
from fluidtune import planning
from fluidtune.planning import lower_bound

OURS, THEIRS = "best", ("static", "one_per_device")
PLANS = {"best": best.plan, "static": planning.plan}


def makespans(instance: Instance) -> dict[str, float]:
    """Side -> the makespan (s) of its schedule."""
    limits = {"c": instance.c, "d": instance.d}
    result = {}
    for policy, plan in PLANS.items():
        schedule = plan(instance.loads, instance.n, **limits)
        check(schedule, instance.loads, instance.n, **limits)
        result[policy] = schedule.makespan
    free_at = [0.0] * instance.n
    for load in instance.loads:
        heapq.heapreplace(free_at, free_at[0] + load.height)
    result["one_per_device"] = max(free_at)
    return result


def planning_seconds(trials: int, devices: int) -> dict[str, float]:
    """Policy -> the seconds that planning takes for the slowest family."""
    slowest = dict.fromkeys(PLANS, 0.0)
    for family in FAMILIES:
        instance = large(family, trials, devices, seed=1)
        for policy, plan in PLANS.items():
            begin = time.perf_counter()
            plan(instance.loads, instance.n, c=instance.c, d=instance.d)
            slowest[policy] = max(slowest[policy], time.perf_counter() - begin)
    return slowest


def run(count: int, seed: int) -> dict[str, object]:
    """The benchmark's JSON object over ``count`` instances."""
    over_bound: dict[str, dict[str, list[float]]] = {side: defaultdict(list) for side in (OURS, *THEIRS)}
    over_relaxed: dict[str, list[float]] = {side: [] for side in (OURS, *THEIRS)}
    gains: dict[str, list[float]] = {side: [] for side in THEIRS}
    never_worse = True
    for index, instance in enumerate(instances(count, seed)):
        found = makespans(instance)
        bound = lower_bound(instance.loads, instance.n, c=instance.c, d=instance.d)
        relaxed = relaxed_bound(Modes(instance.loads, instance.n, c=instance.c, d=instance.d))
        never_worse = never_worse and found[OURS] <= found["static"]
        for side, seconds in found.items():
            over_bound[side][instance.family].append(seconds / bound)
            over_relaxed[side].append(seconds / relaxed)
        for side in THEIRS:
            gains[side].append(found[side] / found[OURS])
        if (index + 1) % 50 == 0:
            print(f"{index + 1} of {count} instances planned", file=sys.stderr)
    print("planning 10,000 trials on 1,000 devices", file=sys.stderr)
    large_seconds = planning_seconds(10_000, 1_000)
    sides: dict[str, dict[str, object]] = {}
    for side, families in over_bound.items():
        every = [value for values in families.values() for value in values]
        sides[side] = {
            "mean_over_bound": round(mean(every), 4),
            "worst_over_bound": round(max(every), 4),
            "mean_over_relaxed_bound": round(mean(over_relaxed[side]), 4),
            "worst_over_relaxed_bound": round(max(over_relaxed[side]), 4),
            "families": {family: round(mean(values), 4) for family, values in families.items()},
        }
        if side in large_seconds:
            sides[side]["seconds_10000x1000"] = round(large_seconds[side], 3)
    ratios = {side: round(mean(values), 3) for side, values in gains.items()}
    return {
        "benchmark": "planner",
        "machine": machine(),
        "devices": "1 to 64 (makespans), 1000 (planning time)",
        "kind": "twin",
        "instances": count,
        "seed": seed,
        "sides": sides,
        "ratio": min(ratios.values()),
        "ratios": ratios,
        "never_worse_than_static": never_worse,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Schedules of the planner against a lower bound.")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of an indented object")
    parser.add_argument("--quick", action="store_true", help="40 instances instead of 1,000")
    parser.add_argument("--count", type=int, help="how many instances")
    parser.add_argument("--seed", type=int, default=1, help="seed of the instances (1)")
    options = parser.parse_args()
    result = run(options.count or (40 if options.quick else 1000), options.seed)
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()

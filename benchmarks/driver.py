"""How fast the driver is with many trials: the engine alone, and the passes of the shell around it. No Ray runs.

``python -m benchmarks.driver --json [--quick] [--only CASE ...]``. It has two parts.

*Engine*: for each case a job of 10,000 trials on 100 or 1,000 devices (`cases`), carried out by a shell that does
nothing (`many_trials.Job`). The trials arrive in batches of 1,000. Then trials report, end, are resized and are moved
for a number of events; each is a call of `Engine.handle` of its own. ``events_per_second`` is the rate of these events,
``longest_ms`` their longest call. ``arrival_ms`` is the longest call with 1,000 arrivals.

*Shell*: what the driver does beside the engine, with as many trials (`driver_passes`).

Times are CPU times of this process, so that other work on the machine counts less.
"""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

from benchmarks import driver_passes
from benchmarks.common import finish, parser, result, say
from benchmarks.many_trials import Case, Job

#: Trials of a job and devices: the sizes of the issue that asked for this benchmark.
TRIALS, DEVICES = 10_000, (100, 1_000)
#: Trials and devices with ``--quick``. The larger case has the same number per device.
QUICK_TRIALS, QUICK_DEVICES = 1_000, (100,)


def cases(trials: int, devices: tuple[int, ...]) -> list[Case]:
    """For each size: kinds of trials in both kinds of groups, and jobs that use the other parts of the engine."""
    out = []
    for n in devices:
        for synchronous, kind in product((False, True), ("plain", "checkpointing", "elastic")):
            out.append(Case(f"{kind}-{'sync' if synchronous else 'async'}-{n}", trials, n, kind, synchronous))
        out += [
            Case(f"search-sync-{n}", trials, n, "checkpointing", True, packing=None),
            Case(f"packed-async-{n}", trials, n, "plain", False, packing=3),
            Case(f"lanes-async-{n}", trials, n, "plain", False, packing=3, lanes="PACK"),
            Case(f"gangs-sync-{n}", trials, n, "plain", True, shares=(1.0, 0.5, 2.0)),
            Case(f"rungs-sync-{n}", trials, n, "checkpointing", True, groups=100),
            Case(f"limited-async-{n}", trials, n, "plain", False, concurrency=n // 2),
            Case(f"endless-async-{n}", trials, n, "elastic", False, told=False),
            Case(f"losses-sync-{n}", trials, n, "elastic", True, losses=5),
            # Fewer trials than devices: nothing waits, and trials grow and shrink all the time.
            Case(f"wide-sync-{n}", n // 4, n, "elastic", True),
            Case(f"narrow-sync-{n}", n * 9 // 10, n, "elastic", True),
            # A few more trials than devices: trials grow, and others that come wait for them.
            Case(f"late-sync-{n}", n // 4, n, "elastic", True, late=n),
        ]
    return out


def measure(case: Case, events: int, seconds: float) -> dict[str, float]:
    """Figures of one case over ``events`` events, or as many as are done in ``seconds`` of CPU time."""
    gc.collect()
    job = Job(case)
    arrivals = job.arrive(1_000)
    calls = job.run(events, seconds)
    return {
        "events_per_second": len(calls) / sum(calls),
        "longest_ms": max(calls) * 1e3,
        "arrival_ms": max(arrivals) * 1e3,
        "events": len(calls),
    }


def main() -> None:
    """The command."""
    options = parser("Events per second of the engine, and the passes of the driver, with many trials.")
    options.add_argument("--events", type=int, default=5_000, help="events of each case (5000; quick: 500)")
    options.add_argument("--seconds", type=float, default=10.0, help="CPU seconds that a case takes at most (10)")
    options.add_argument("--only", nargs="*", help="cases and passes whose names begin so (all)")
    args = options.parse_args()
    trials, devices = (QUICK_TRIALS, QUICK_DEVICES) if args.quick else (TRIALS, DEVICES)
    events = min(args.events, 500) if args.quick else args.events

    def wanted(name: str) -> bool:
        return not args.only or name.startswith(tuple(args.only))

    engine: dict[str, dict[str, float]] = {}
    for case in cases(trials, devices):
        if wanted(case.name):
            found = engine[case.name] = measure(case, events, args.seconds)
            say(f"{case.name}: " + ", ".join(f"{key} {value:.5g}" for key, value in found.items()))
    shell: dict[str, Any] = {}
    for name, measure_pass in driver_passes.PASSES.items():
        if wanted(name):
            gc.collect()
            shell[name] = measure_pass(trials, max(devices))
            say(f"{name}: {shell[name]}")
    figures: dict[str, Any] = {"trials": trials, "engine": engine, "shell": shell}
    if engine:
        figures["slowest_events_per_second"] = min(one["events_per_second"] for one in engine.values())
        figures["longest_ms"] = max(one["longest_ms"] for one in engine.values())
    finish(result("driver", " and ".join(map(str, devices)), "twin", **figures), args.json)


if __name__ == "__main__":
    main()

"""How many requests a second the pure core of serving handles.

``python -m benchmarks.serve_core --json [--quick]``. Only the time inside `Scheduler.handle` counts, as CPU time of the
process: neither the arrivals nor the GPUs of the twin do. By case (GPUs x models): ``requests_per_second``,
``p99_event_us`` (the 99th percentile of a call), ``median_batch``.
The models are ResNet50 of Table 2 with an SLO of 100 ms, at 80 % of the rate that staggered batches could bear, and of
at most 100,000 requests/s. ``loadavg`` has the machine's load before and after: CPU time grows with it by a little.
"""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.serve import WORKLOADS, model, staggered_peak
from benchmarks.serve_arrivals import poisson
from benchmarks.serve_twin import MeasuredSimulation
from symphony_serve.messages import Event, Instruction
from symphony_serve.scheduler import Scheduler

#: (GPUs, models): the first is the target of the room.
CASES = ((1000, 20), (32, 20), (4096, 20), (1000, 500))
#: Requests per second at most. Judgement: what one process can take in real time is less.
MOST = 100_000.0


class Timed:
    """A scheduler that is timed."""

    def __init__(self, scheduler: Scheduler):
        self._handle = scheduler.handle
        self.seconds: list[float] = []

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened at ``now``."""
        begin = time.thread_time()
        told = self._handle(event, now)
        self.seconds.append(time.thread_time() - begin)
        return told


def measure(gpus: int, models: int, requests: int) -> dict[str, Any]:
    """One case."""
    served = [model(f"m{number}", *WORKLOADS["resnet50"][:2], 100.0) for number in range(models)]
    rate = min(0.8 * staggered_peak(served[0], gpus), MOST)
    names = [one.name for one in served]
    rates = dict.fromkeys(names, 1 / len(names) * rate)
    scheduler = Scheduler(served)
    timed = Timed(scheduler)
    coming = poisson(rates, {one.name: one.slo for one in served}, 1)
    outcome = MeasuredSimulation(timed, gpus, coming, 0.0, requests / rate).run()
    handled = sum(count.total for count in outcome.models.values())
    calls = sorted(timed.seconds)
    return {
        "requests_per_second": round(handled / sum(calls)),
        "p99_event_us": round(1e6 * calls[int(0.99 * len(calls))], 1),
        "median_batch": outcome.median_batch(),
        "offered_rate": round(rate),
        "bad_rate": round(outcome.bad_rate, 4),
    }


def main() -> None:
    """The command."""
    given = parser("Requests a second through the pure core of serving.").parse_args()
    cases, before = {}, os.getloadavg()[0]
    for gpus, models in CASES:
        cases[f"{gpus}x{models}"] = measure(gpus, models, 20_000 if given.quick else 300_000)
        say(f"{gpus} GPUs, {models} models: {cases[f'{gpus}x{models}']}")
    finish(
        result("serve_core", "32 to 4096 simulated GPUs", "twin", cases=cases, loadavg=[before, os.getloadavg()[0]]),
        given.json,
    )


if __name__ == "__main__":
    main()

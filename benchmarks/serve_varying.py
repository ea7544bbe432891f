"""Batches that take other times than was predicted, on the twin; and what is learned from them. All times are seconds.

``python -m benchmarks.serve_varying --json [--quick]``. One worker runs a model over sequences: a request takes
1 to 10 ms with its length, and a batch is padded to its longest, see `seconds_of`. The profile is measured before with
a few sequences, and everything else is learned. Sides: ``window`` and ``orloj``; ``orloj_unnamed``, in which no request
names its source; ``auto``. Others name the length to a power of two as the source. Each row has the part of the
requests that were answered in time, at loads of .5, .8, 1 and 1.2 of what full batches of random requests could do.
``auto_has`` says which former ``auto`` had at the end.

``accepted``: Orloj answers at least as many as ``window`` at every load where times vary, less `WITHIN`, and at load
1.2 at least 1.1 times as many; ``auto`` ends with the right former.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.rival_servers import Server
from benchmarks.serve_twin import MeasuredSimulation
from symphony_serve.messages import (
    BatchTook,
    Dispatch,
    Event,
    GpuJoined,
    GpuLost,
    Instruction,
    Request,
    Suspect,
)
from symphony_serve.model_side import EAGER, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler


class VaryingSimulation(MeasuredSimulation):
    """A simulation in which a batch takes as long as ``takes`` says, with what passes before its inputs are there.

    If the server gives a batch up because it takes too long, nothing of it is answered, and the GPU joins again when it
    ends.
    """

    def __init__(
        self,
        server: Server,
        gpus: int,
        requests: Iterator[Request],
        warm_up: float,
        measured: float,
        takes: Callable[[Dispatch], float],
    ):
        self._takes = takes
        #: (GPU, token) of GPUs whose batch was given up and still runs.
        self._suspects: set[tuple[int, int]] = set()
        #: What is still to be told of them.
        self._lost: list[Event] = []
        super().__init__(server, gpus, requests, warm_up, measured)

    def _end_of(self, batch: Dispatch) -> float:
        return batch.start + self._takes(batch)

    def _carry_out(self, instruction: Instruction, now: float) -> None:
        if not isinstance(instruction, Suspect):
            super()._carry_out(instruction, now)
            return
        # The batch that the GPU runs goes on. What was sent behind it does not run.
        gpu = instruction.gpu
        self._suspects.add((gpu, instruction.token))
        first, *behind = sorted(one.plan for _, _, one in self._running if one.gpu == gpu)
        self._lost.append(GpuLost(gpu, frozenset({first})))
        self._running = [one for one in self._running if one[2].gpu != gpu or one[2].plan not in behind]
        heapq.heapify(self._running)

    def _tell(self, event: Event, now: float) -> None:
        super()._tell(event, now)
        while self._lost:
            super()._tell(self._lost.pop(), now)

    def _end_batch(self, end: float, number: int, batch: Dispatch) -> None:
        if (batch.gpu, batch.token) not in self._suspects:
            super()._end_batch(end, number, batch)
            return
        self._suspects.remove((batch.gpu, batch.token))
        self._keep_busy(batch.gpu, batch.start, end)
        self._tell(GpuJoined(batch.gpu, batch.token + 1), end)


class LearningSimulation(VaryingSimulation):
    """A `VaryingSimulation` that tells the server how long each batch took."""

    def _end_batch(self, end: float, number: int, batch: Dispatch) -> None:
        super()._end_batch(end, number, batch)
        self._tell(BatchTook(batch.model, batch.requests, end - batch.start), end)


LOADS = (0.5, 0.8, 1.0, 1.2)
SLO_S, MAX_BATCH = 0.1, 64
#: A batch takes so long besides, and each further request lengthens it by this part of the longest. Judgement: a GRU
#: on a core, where a step of a batch of ten takes twice as long as that of one.
BESIDE_S, PADDING = 0.3e-3, 0.1
#: Finish rates that differ by less are equal: three standard deviations of one run of 6,000 requests that are nearly
#: all in time.
WITHIN = 0.004
#: Case -> what draws the time of a request alone. ``constant`` varies by a tenth, as on a busy machine.
CASES: dict[str, Callable[[random.Random], float]] = {
    "constant": lambda rng: rng.uniform(0.0038, 0.0042),
    "lognormal": lambda rng: min(0.02, max(0.0005, rng.lognormvariate(math.log(0.00316), 0.5))),
    "bimodal": lambda rng: rng.gauss(*rng.choice(((0.0015, 0.00015), (0.008, 0.0008)))),
}
SIDES = {
    "window": (Batching.WINDOW, True),
    "orloj": (Batching.ORLOJ, True),
    "orloj_unnamed": (Batching.ORLOJ, False),
    "auto": (Batching.AUTO, True),
}


def seconds_of(alone: list[float]) -> float:
    """A batch of requests that take these times alone."""
    return BESIDE_S + max(alone) * (1 + PADDING * (len(alone) - 1))


class Run:
    """One side of one case, at a rate of requests per second."""

    def __init__(self, case: str, side: str, rate: float, seed: int, count: int):
        rng, (batching, named), now = random.Random(seed), SIDES[side], 0.0
        samples = [CASES[case](rng) for _ in range(8)]
        profile = Profile.from_seconds(
            seconds_of([samples[place % len(samples)] for place in range(size)]) for size in range(1, MAX_BATCH + 1)
        )
        self.scheduler = Scheduler([Model("m", profile, SLO_S, batching, EAGER)], least_patience=1.0)
        self._alone, self._requests = [], list[Request]()
        for number in range(count):
            now += rng.expovariate(rate)
            alone = CASES[case](rng)
            self._alone.append(alone)
            source = f"2^{round(math.log2(1e3 * alone))} ms" if named else ""
            self._requests.append(Request(number, "m", now, now + SLO_S, source))

    def finish_rate(self) -> float:
        """The part of the requests that were answered in time."""
        last = self._requests[-1].arrival
        outcome = LearningSimulation(self.scheduler, 1, iter(self._requests), 0.0, last, self._takes).run()
        return outcome.good / len(self._requests)

    def _takes(self, batch: Dispatch) -> float:
        return seconds_of([self._alone[request.id] for request in batch.requests])


def capacity(case: str) -> float:
    """Requests per second in batches of random requests, of the size at which that is most, if two take an SLO."""
    rng, best = random.Random(1), 0.0
    for size in (1, 2, 4, 8, 16, 32, 64):
        took = mean(seconds_of([CASES[case](rng) for _ in range(size)]) for _ in range(200))
        if 2 * took <= SLO_S:
            best = max(best, size / took)
    return best


def main() -> None:
    """The command."""
    options = parser("Learned times of requests, by former, on the twin.").parse_args()
    seeds, count = (range(1, 2), 500) if options.quick else (range(1, 4), 6000)
    rates: dict[str, Any] = {}
    ends: dict[str, Any] = {}
    for case in CASES:
        rates[case], ends[case], most = {}, [], capacity(case)
        for side in SIDES:
            row = []
            for load in LOADS:
                runs = [Run(case, side, load * most, seed, count) for seed in seeds]
                row.append(round(mean(run.finish_rate() for run in runs), 4))
                if side == "auto":
                    ends[case].append(sorted({run.scheduler.batching("m").value for run in runs}))
            rates[case][side] = row
            say(f"{case} {side}: {row}")
    figures = result("serve_varying", "1 worker", "twin", seeds=len(seeds), requests=count, loads=LOADS)
    varying = [rates[case] for case in CASES if case != "constant"]
    figures |= {
        "rates": rates,
        "auto_has": ends,
        "accepted": {
            "every_load": all(
                ours >= theirs - WITHIN
                for row in varying
                for ours, theirs in zip(row["orloj"], row["window"], strict=True)
            ),
            "overloaded": all(row["orloj"][-1] >= 1.1 * row["window"][-1] for row in varying),
            "auto": all(
                one == (["window"] if case == "constant" else ["orloj"]) for case in CASES for one in ends[case]
            ),
        },
    }
    finish(figures, options.json)


if __name__ == "__main__":
    main()

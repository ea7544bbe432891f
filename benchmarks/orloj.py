"""Orloj on one worker of the twin, beside sound formers and servers on the same requests.

``python -m benchmarks.orloj --json [--quick] [--seeds N] [--only PART ...]``. Finish rate: requests answered in time,
over all. Each row has the mean over the seeds for an SLO of 1.5, 2, 3, 4 and 5 times the 99th percentile of the times
alone. Parts:

- ``columns``: by workload and side. Sides: `orloj` (the largest batch), `orloj_earliest`, `orloj_all` (all sizes from 1
  to 16 instead of powers of two), `orloj_deferred` (starts when the next size could not be filled in time), `edf` (the
  same queues, earliest deadlines instead of scores), `fifo` and `window` (Symphony's formers, on expected times),
  `nexus`, `clipper`, `clockwork` (up to 16) and `clockwork_1` (batches of one).
- ``b``: the three-modal workload by the rate of the anticipated delay, per ms.
- ``tasks``: log-normal times with mean and P99 of table 4.1, at twice the rate that batches of one can answer.
- ``places``: skewed sources, with equal weights, with the true ones, and by product.
- ``queue``: microseconds of insert, remove and top(16), by implementation and by requests that wait.
- ``overhead``: milliseconds of a decision with 1,000 requests that wait; times scaled down to a P99 of 20 ms, without
  and with that cost.
- ``scale``: 1,000 workers, which know nothing of each other: simulated requests per second of wall time.

``accepted`` says what of `columns` and `b` is within its tolerance, see `accepts_columns` and `accepts_b`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.orloj_cases import Case, Load, load, modal
from benchmarks.orloj_hull import HullPending
from benchmarks.orloj_naive import NaivePending
from benchmarks.orloj_product import ProductProfile
from benchmarks.orloj_profiles import VaryingProfile
from benchmarks.orloj_worker import SIDES, Worker
from symphony_serve.batching.orloj import ANTICIPATED_DELAY_RATE, Orloj
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_queues import Pending
from symphony_serve.messages import Request

#: The SLO by the 99th percentile of the times alone (section 4.5.2).
MULTIPLES = (1.5, 2.0, 3.0, 4.0, 5.0)

#: Table 4.1: mean and 99th percentile of the execution time, seconds.
TASKS = {
    "rdinet": (0.68315, 2.66754),
    "skipnet": (0.00324, 0.00556),
    "blenderbot_convai": (0.20039, 0.24227),
    "blenderbot_cornell": (0.20322, 0.24704),
    "gpt_convai": (0.07947, 0.14340),
    "gpt_cornell": (0.09484, 0.16169),
    "bart": (0.77466, 1.10199),
    "t5": (0.55291, 0.79728),
    "fsmt": (0.18930, 0.31931),
    "mbart": (0.43238, 0.72987),
}

WORKLOADS = {
    "one_modal": modal(1),
    "two_modal": modal(2),
    "three_modal": modal(3),
    "eight_modal": modal(8),
    "bursty": replace(modal(2), shape=0.5),
    "static": replace(modal(1), spread=0.0),
    # Only 25 ms of a request's time are shared by a batch.
    "weak_batching": replace(modal(2, spread=0.005), shared=0.025, rate=14.0),
}
#: Orloj's finish rates by workload and `MULTIPLES`. Source: a throwaway simulator of the paper's rules; where the paper
#: has the workload (two and eight peaks), within 0.06 of its figures.
WANTED = {
    "two_modal": (0.60, 0.76, 0.93, 0.99, 1.00),
    "eight_modal": (0.63, 0.78, 0.95, 1.00, 1.00),
    "bursty": (0.55, 0.71, 0.89, 0.97, 0.99),
    "static": (0.52, 0.73, 0.96, 1.00, 1.00),
}
#: Rates have three decimals, and so the difference of two is a little off.
ROUNDED = 1e-9
ALL, FEW = tuple(SIDES), ("orloj", "orloj_earliest", "edf", "window", "nexus", "clockwork")
SHOWN = {"two_modal": ALL, "eight_modal": ALL}


#: Makes a worker from the workload, the requests, and what is known of the times.
Make = Callable[[Case, Load, VaryingProfile], Worker]


class Runs:
    """How many seeds and requests each row has."""

    def __init__(self, seeds: int, count: int) -> None:
        self.seeds = range(1, seeds + 1)
        self.count = count

    def shown(self, name: str, case: Case, make: Make) -> list[float]:
        """The mean finish rate of the workers that ``make`` makes, by SLO. Prints it."""
        found = []
        for multiple in MULTIPLES:
            loads = [load(case, multiple, seed, self.count) for seed in self.seeds]
            made = [make(case, one, case.profile(seed)) for one, seed in zip(loads, self.seeds, strict=True)]
            found.append(round(mean(worker.run().good / self.count for worker in made), 3))
        say(f"{name}: {' '.join(f'{rate:.3f}' for rate in found)}")
        return found


def columns(runs: Runs) -> dict[str, Any]:
    """By workload and side."""
    return {
        name: {one: runs.shown(f"{name} {one}", case, SIDES[one]) for one in SHOWN.get(name, FEW)}
        for name, case in WORKLOADS.items()
    }


def accepts_columns(found: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, bool]:
    """``figures``: Orloj is within 0.03 of `WANTED`. ``baselines``: on the workloads with all sides it is above each at
    1.5 times the 99th percentile, and nowhere more than 0.03 below the best of them. ``peaks``: with eight peaks it is
    at most 0.05 below two.
    """
    ours = {name: sides["orloj"] for name, sides in found.items()}
    others = {
        name: [
            max(rates) for rates in zip(*(row for side, row in found[name].items() if "orloj" not in side), strict=True)
        ]
        for name in SHOWN
    }
    return {
        "figures": all(
            abs(rate - wanted) <= 0.03 + ROUNDED
            for name, row in WANTED.items()
            for rate, wanted in zip(ours[name], row, strict=True)
        ),
        "baselines": all(
            ours[name][0] > best[0]
            and all(rate >= other - 0.03 - ROUNDED for rate, other in zip(ours[name], best, strict=True))
            for name, best in others.items()
        ),
        "peaks": all(
            eight >= two - 0.05 - ROUNDED for eight, two in zip(ours["eight_modal"], ours["two_modal"], strict=True)
        ),
    }


def accepts_b(found: Mapping[str, Sequence[float]]) -> bool:
    """From 1e-6 to 1e-2 per ms the finish rates differ by 0.02 at most; at 1e-1 they are at most 0.04 lower."""
    columns = list(zip(*(found[f"1e{i}"] for i in range(-6, -1)), strict=True))
    return all(max(rates) - min(rates) <= 0.02 + ROUNDED for rates in columns) and all(
        rate >= max(rates) - 0.04 - ROUNDED for rate, rates in zip(found["1e-1"], columns, strict=True)
    )


def with_b(b: float) -> Make:
    """Orloj with this rate of the anticipated delay, per second."""

    class Rated(Orloj):
        def _queue(self, times: Mapping[int, Histogram]) -> Pending:
            return Pending(times, b)

    return lambda case, load, profile: Worker(case, load, Rated([profile]))


def by_b(runs: Runs) -> dict[str, Any]:
    """By b per ms."""
    return {f"1e{i}": runs.shown(f"b 1e{i}", modal(3), with_b(1000 * 10.0**i)) for i in range(-6, 0)}


def tasks(runs: Runs) -> dict[str, Any]:
    """By task and side."""
    found: dict[str, Any] = {}
    for name, (average, p99) in TASKS.items():
        case = Case((average,), lognormal=(average, p99), rate=2 / average)
        sides = ("orloj", "orloj_all", "window", "clockwork")
        found[name] = {one: runs.shown(f"{name} {one}", case, SIDES[one]) for one in sides}
    return found


def with_places(kind: type[VaryingProfile], weights: Mapping[str, float] | None = None) -> Make:
    """Orloj with other places of the sources in a batch."""
    return lambda case, load, profile: Worker(case, load, Orloj([kind(profile.batches, profile.sources, weights)]))


def places(runs: Runs) -> dict[str, Any]:
    """By the share of a source of 30 ms beside one of 150 ms, and by what the profile says of them."""
    found: dict[str, Any] = {}
    for shares in ((0.95, 0.05), (0.05, 0.95), (0.5, 0.5)):
        case = replace(modal(2), peaks=(0.030, 0.150), shares=shares)
        case = replace(case, rate=1.76 / sum(share * peak for share, peak in zip(shares, case.peaks, strict=True)))
        weights = {str(source): share for source, share in enumerate(shares)}
        kinds = {
            "equal": with_places(VaryingProfile),
            "true": with_places(VaryingProfile, weights),
            "product": with_places(ProductProfile),
        }
        found[f"{shares[0]:g}"] = {
            kind: runs.shown(f"short {shares[0]:g} {kind}", case, make) for kind, make in kinds.items()
        }
    return found


def microseconds(work: Callable[[int], object], times: int) -> float:
    """The median time of one call, us."""
    spent = []
    for i in range(times):
        began = time.perf_counter()
        work(i)
        spent.append(time.perf_counter() - began)
    return round(1e6 * median(spent), 2)


def queue(counts: Sequence[int]) -> dict[str, Any]:
    """By implementation and by requests that wait."""
    kinds = {"SortedPending": Pending, "HullPending": HullPending, "NaivePending": NaivePending}
    return {name: {str(count): operations(kind, count) for count in counts} for name, kind in kinds.items()}


def operations(kind: type[Pending], count: int) -> dict[str, float]:
    """Microseconds of operations on one queue of batches of 16; of the hull also the nodes that an insertion visits."""
    rng, pending = random.Random(1), kind({16: modal(3).profile(1).times[16]}, ANTICIPATED_DELAY_RATE)

    def insert(number: int) -> None:
        pending.insert(rng.uniform(0.3, 1.0), number)

    for number in range(count):
        insert(-1 - number)
    row = {
        "insert": microseconds(insert, 100),
        "remove": microseconds(pending.remove, 100),
        "top": microseconds(lambda _: pending.best(16, 0.0), 20),
    }
    if isinstance(pending, HullPending):
        before = pending.visits
        for number in range(100):
            insert(number)
        row["visits_per_insert"] = (pending.visits - before) / 100
    say(f"{kind.__name__} of {count}: {row}")
    return row


def overhead(runs: Runs) -> dict[str, Any]:
    """The time of a decision, and what it costs where times are short."""
    former, rng = Orloj([modal(3).profile(1)]), random.Random(1)
    for number in range(1000):
        former.add(Request(number, "model", 0.0, rng.uniform(0.3, 3.0)))

    def decide(_: int) -> None:
        former.form(0.0)
        for request in former.take():
            former.add(request)

    spent = microseconds(decide, 100) / 1e6
    say(f"a decision: {1e3 * spent:.3f} ms")
    base = modal(3)
    p99 = sorted(load(base, 1.0, 1, 4000).alone.values())[3959]
    case = base.scaled(0.020 / p99)
    free = runs.shown("P99 of 20 ms", case, SIDES["orloj"])
    dear = runs.shown(
        "P99 of 20 ms, with the cost", case, lambda case, load, known: Worker(case, load, Orloj([known]), cost=spent)
    )
    return {"milliseconds": round(1e3 * spent, 3), "free": free, "dear": dear}


def scale(workers: int) -> dict[str, Any]:
    """Workers with 40 requests each, one after the other, on one core."""
    case, profile = modal(2), modal(2).profile(1)
    loads = [load(case, 3.0, seed, 40) for seed in range(workers)]
    began = time.process_time()
    good = sum(Worker(case, one, Orloj([profile])).run().good for one in loads)
    rate = round(40 * workers / (time.process_time() - began))
    return {"workers": workers, "requests_per_second": rate, "finish_rate": good / (40 * workers)}


def main() -> None:
    """The command."""
    arguments = parser((__doc__ or "").splitlines()[0])
    parts = ("columns", "b", "tasks", "places", "queue", "overhead", "scale")
    arguments.add_argument("--seeds", type=int, default=5, help="seeds of each row (5)")
    arguments.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    options = arguments.parse_args()
    runs = Runs(1, 200) if options.quick else Runs(options.seeds, 4000)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "columns": lambda: columns(runs),
        "b": lambda: by_b(runs),
        "tasks": lambda: tasks(runs),
        "places": lambda: places(runs),
        "queue": lambda: queue((10, 100) if options.quick else (10, 100, 1000, 10_000)),
        "overhead": lambda: overhead(runs),
        "scale": lambda: scale(20 if options.quick else 1000),
    }
    figures = result("orloj", "1 worker", "twin", seeds=len(runs.seeds), requests=runs.count, multiples=MULTIPLES)
    for part in options.only:
        figures[part] = makers[part]()
    figures["accepted"] = accepts_columns(figures["columns"]) if "columns" in figures else {}
    if "b" in figures:
        figures["accepted"]["b"] = accepts_b(figures["b"])
    finish(figures, options.json)


if __name__ == "__main__":
    main()

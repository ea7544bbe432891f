"""How long a bid and a clearing take, and how close the cleared value is to upper bounds.

``python -m benchmarks.auction --json [--quick] [--rounds N] [--seed N]``. There are rounds of 100 apps and 256 GPUs,
and of 500 apps and 4,096 GPUs. All GPUs are on offer at once, which is the worst case: an ordinary round offers only
the few whose leases end. ``filtered``: the worst ``1 - f`` of the apps bid, as under the arbiter with its default f;
``everyone``: all apps bid (256 GPUs only); ``large``: as filtered, on 4,096 GPUs. Apps are seeded: 10 % have one job,
the others 10 to 100; a job uses 1 to 8 GPUs.

Figures of each: ``bid_seconds`` and ``clear_seconds`` (median and p95, payments included); ``optimal``: whether all
clearings were proved optimal; ``of_relaxation``: the product of valuations divided by that of the linear relaxation,
as the geometric mean over bidders (``worst_of_relaxation``: the smallest of all rounds), which shows what is lost
because GPUs are indivisible; ``of_any_subset``: the same, divided by an upper bound for bids that list every subset on
a cluster where placement costs nothing, which also shows what the choice of rows loses. Nothing is run: kind "twin".
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common import finish, parser, result, say
from themis_bridge import Bid, JobInfo, clear_auction, independent_finish_time
from themis_bridge.auction import Shaped, bidder_rows
from themis_bridge.bids import Valuation, make_bid
from themis_bridge.fairness import kinds_of
from themis_bridge.locality import Gpu, Phase
from themis_bridge.settings import Settings
from themis_bridge.winner_determination import SilentHighs, WinnerDetermination


def cluster(machines: dict[int, int], racks: int) -> list[Gpu]:
    """The GPUs of a cluster. ``machines``: GPUs of a machine -> number of such machines."""
    gpus, number = [], 0
    for size, count in machines.items():
        for _ in range(count):
            name = f"m{number:04}"
            gpus += [Gpu(f"{name}g{i}", name, f"r{number % racks}") for i in range(size)]
            number += 1
    return gpus


#: GPUs of a machine -> number of such machines. Source: footnote 6 of the paper mixes machines of 8, 4 and 1 GPUs; the
#: machines that it lists have 168 GPUs, so there are more of the first kind here, for its 256.
SMALL = {8: 27, 4: 6, 1: 16}
#: The same mix with 16 times as many machines: 4,096 GPUs.
LARGE = {8: 432, 4: 96, 1: 256}


#: Rounds for which the bound over all subsets is computed. Judgement: it takes long and hardly varies.
ANY_SUBSET_ROUNDS = 3


def app(rng: random.Random, gpus: int, apps: int) -> Valuation:
    """A random app at a random point of its life."""
    width = rng.choice([1, 1, 2, 4, 8])
    jobs = 1 if rng.random() < 0.1 else rng.randint(10, 100)
    iterations = rng.lognormvariate(5, 1)
    phases = [[JobInfo(iterations, 60.0, width)] * max(1, jobs >> rung) for rung in range(4)]
    budget = sum(job.work for phase in phases for job in phase)
    independent = independent_finish_time(budget, gpus, jobs * width, apps)
    left = [Phase(kinds_of(jobs)) for jobs in phases[rng.randrange(4) :]]
    return Valuation(left, rng.random() * independent, independent)


def relaxed_value(bids: Sequence[Bid], where: Mapping[Any, Gpu]) -> float:
    """The optimum of the auction's linear relaxation: no allocation has a larger sum of log(1/rho)."""
    layout = Shaped(where)
    tables = [bidder_rows(bid, layout)[0] for bid in bids]
    solver = SilentHighs()
    rows = np.arange(sum(len(table.values) for table in tables))
    solver.passModel(WinnerDetermination(tables, layout.capacity).program(rows))
    solver.run()
    return float(-solver.getInfo().objective_function_value)


def any_subset(values: list[Valuation], gpus: int) -> float:
    """An upper bound on the sum of log(1/rho): each app may get any number of GPUs, and all lie together."""
    bids = []
    for number, value in enumerate(values):
        table = {frozenset(range(n)): value.rho([], {n: 1} if n else {}) for n in range(min(value.useful, gpus) + 1)}
        bids.append(Bid(str(number), table))
    where = {n: Gpu(str(n), "all") for n in range(gpus)}
    return relaxed_value(bids, where)


def measure(apps: int, gpus: list[Gpu], share: float, rounds: int, seed: int) -> dict[str, Any]:
    """Figures of ``rounds`` rounds of ``apps`` apps, of which the ``share`` with the worst rho bids."""
    rng = random.Random(seed)
    where = {gpu.id: gpu for gpu in gpus}
    bid_seconds, clear_seconds, relaxation, subsets, proved = [], [], [], [], True
    for number in range(rounds):
        values = [app(rng, len(gpus), apps) for _ in range(apps)]
        values.sort(key=lambda value: -value.rho([]))
        values = values[: max(1, round(share * apps))]
        bids = []
        for bidder, value in enumerate(values):
            began = time.perf_counter()
            bids.append(make_bid(f"app{bidder}", value, [], gpus))
            bid_seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        clearing = clear_auction(bids, where)
        clear_seconds.append(time.perf_counter() - began)
        proved = proved and clearing.exact
        relaxation.append(math.exp((clearing.value - relaxed_value(bids, where)) / len(bids)))
        if number < ANY_SUBSET_ROUNDS:
            subsets.append(math.exp((clearing.value - any_subset(values, len(gpus))) / len(bids)))
        say(f"[{number + 1}/{rounds}] {apps} apps, {len(bids)} bid on {len(gpus)} GPUs: {clear_seconds[-1]:.3f} s")
    return {
        "rounds": rounds,
        "apps": apps,
        "bidders": len(values),
        "gpus": len(gpus),
        "bid_seconds": _spread(bid_seconds),
        "clear_seconds": _spread(clear_seconds),
        "optimal": proved,
        "of_relaxation": statistics.mean(relaxation),
        "worst_of_relaxation": min(relaxation),
        "of_any_subset": statistics.mean(subsets),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p95": ordered[math.ceil(0.95 * len(ordered)) - 1]}


def main() -> None:
    """The command."""
    arguments = parser("Bid and clearing times of the auction, and its value.")
    arguments.add_argument("--rounds", type=int, default=40, help="rounds of 256 GPUs (40); a tenth as many of 4,096")
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    rounds = 5 if options.quick else options.rounds
    small, large = cluster(SMALL, 4), cluster(LARGE, 16)
    few = max(1, rounds // 10)
    figures = {
        "filtered": measure(100, small, 1 - Settings.f, rounds, options.seed),
        "everyone": measure(100, small, 1.0, few, options.seed),
        "large": measure(500, large, 1 - Settings.f, few, options.seed),
    }
    finish(result("auction", "256 and 4096 GPUs", "twin", f=Settings.f, seed=options.seed, **figures), options.json)


if __name__ == "__main__":
    main()

"""Plans of GPUs for models with made-up needs: USHER's rules as shipped, beside rivals and the optimum.

``python -m benchmarks.usher --json [--quick] [--seeds N] [--only PART ...]``. No needs are published, so they are drawn
(`drawn`): 20 models with the SLOs of USHER's table, compute over memory as its artefact draws them, seconds linear in
the batch. All is arithmetic; kind "twin".

- ``twenty``: 20 models whose load keeps 8 to 24 GPUs busy. By rival the median and the most of our GPUs divided by its
  GPUs, and the most seconds of the processor's time that a plan of ours took. ``dedicated``: one model on a GPU at a
  time (Shepherd as USHER's paper uses it). ``first_fit``: the largest batch, first fit decreasing. ``gslice``: shares
  of compute, tuned model by model. ``gpulet``: its elastic partitioning, without its factor of interference, which
  favours it. ``bound``: what the planner says that no plan goes below.
- ``optimum``: up to 8 models, against the same question as an integer program over all fillings of a GPU.
- ``attained``: the part of the requests that make their SLOs when they come at random (Poisson), if plans are made for
  the mean rate times a ``margin``: 20 models, load for 16 GPUs. ``wrong``: real compute and seconds of a model are each
  up to this part above or below those of the plan, and replicas whose compute sums to more than 1 take longer by that.
- ``scale``: 20 models on about 6,000 GPUs, and 1,000 models on about 1,000.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import finish, parser, result, say
from benchmarks.placement.configurations import Configuration, NeedyModel, configurations, plan_needs
from benchmarks.placement.integer_program import Rows
from benchmarks.placement.needs import BATCHES, Need

#: Milliseconds. Source: USHER's table of models.
SLOS_MS = (197, 284, 93, 108, 198, 116, 407, 14, 40, 64, 202, 405, 439, 116, 204, 217, 66, 35, 140, 834)
#: Compute over memory -> part of the models up to there. Source: USHER's artefact.
RATIOS = {0.65: 0.20, 0.75: 0.22, 0.85: 0.40, 1.25: 0.43, 1.35: 0.52, 1.45: 0.75, 1.65: 0.80, 1.75: 1.0}
#: GPUs that the models of a case keep busy. Of one to three nodes of eight.
LOADS = (8, 12, 16, 20, 24)
#: Percent of a GPU that gpulet gives. Source: casys-kaist/glet.
SHARES = (20, 40, 50, 60, 80, 100)
#: Seconds after which the integer program's best is taken, and not called an optimum.
OPTIMUM_S = 60.0


def drawn(count: int, busy: float, seed: int) -> list[NeedyModel]:
    """So many models that keep ``busy`` GPUs busy, each at its largest batch, by the larger of compute and memory."""
    draw = random.Random(seed)
    found, units = [], []
    for number in range(count):
        slo = SLOS_MS[number % len(SLOS_MS)] / 1000
        largest = draw.choice(BATCHES[1:])
        ratio = next(ratio for ratio, part in RATIOS.items() if draw.random() <= part or part == 1.0)
        heavy, idle, half = draw.uniform(0.3, 0.9), draw.uniform(4, 16), draw.uniform(8, 32)
        compute, memory = (heavy, heavy / ratio) if ratio > 1 else (heavy * ratio, heavy)
        weights = draw.uniform(0.2, 0.6)  # the part of the memory that does not grow with the batch
        needs = tuple(
            Need(
                batch,
                compute * batch / (batch + half) * (largest + half) / largest,
                memory * (weights + (1 - weights) * batch / largest),
                slo / 2 * (idle + batch) / (idle + largest) * (1 - 1e-9),
            )
            for batch in BATCHES
            if batch <= largest
        )
        rate = draw.random() + 0.1
        units.append(rate / needs[-1].capacity * max(needs[-1].compute, needs[-1].memory))
        found.append(NeedyModel(str(number), rate, slo, needs))
    return [one._replace(rate=one.rate * busy / sum(units)) for one in found]


def largest_batches(models: Sequence[NeedyModel]) -> list[Configuration]:
    """Each model's fewest replicas."""
    needs = [one.allowed()[-1] for one in models]
    return [Configuration(math.ceil(one.rate / need.capacity), need) for one, need in zip(models, needs, strict=True)]


def dedicated(models: Sequence[NeedyModel]) -> int:
    return sum(one.replicas for one in largest_batches(models))


def first_fit(models: Sequence[NeedyModel]) -> int:
    """First fit decreasing on the larger of compute and memory."""
    replicas = [one.need for one in largest_batches(models) for _ in range(one.replicas)]
    left: list[list[float]] = []
    for need in sorted(replicas, key=lambda one: -max(one.compute, one.memory)):
        _fill(left, need.compute, need.memory)
    return len(left)


def _fill(left: list[list[float]], compute: float, memory: float) -> None:
    """Take this from the first GPU that has it left, or from a new one."""
    for one in left:
        if one[0] >= compute - 1e-9 and one[1] >= memory - 1e-9:
            one[0] -= compute
            one[1] -= memory
            return
    left.append([1 - compute, 1 - memory])


def by_share(model: NeedyModel) -> dict[int, Need]:
    """By percent of a GPU's compute the batch with the most requests per second that allows the SLO.

    A batch on less compute than it needs takes longer in proportion.
    """
    found = {}
    for share in SHARES:
        slowed = [one._replace(seconds=one.seconds * max(1.0, 100 * one.compute / share)) for one in model.needs]
        possible = [one for one in slowed if 2 * one.seconds <= model.slo]
        if possible:
            found[share] = max(possible, key=lambda one: one.capacity)
    return found


def gpulet(models: Sequence[NeedyModel]) -> int:
    """Elastic partitioning: at most two shares a GPU; efficient ones, then the smallest that serves the rest."""
    count = 0
    halves: list[tuple[int, float]] = []  # open: percent and memory left
    for model in sorted(models, key=lambda one: -one.rate * one.slo):
        shares, rest = by_share(model), model.rate
        efficient = max(shares, key=lambda share: shares[share].capacity / share)
        while rest > 1e-9:
            wanted = min((one for one in shares if shares[one].capacity >= rest), default=efficient)
            wanted = min(wanted, efficient)
            fits = [one for one in halves if one[0] >= wanted and shares[one[0]].memory <= one[1] + 1e-9]
            if fits:
                taken = min(fits)
                halves.remove(taken)
                rest -= shares[taken[0]].capacity
                continue
            count += 1
            rest -= shares[wanted].capacity
            if wanted < 100 and 100 - wanted in SHARES:
                halves.append((100 - wanted, 1 - shares[wanted].memory))
    return count


def gslice(models: Sequence[NeedyModel]) -> int:
    """Each model by itself: the fewest replicas, each the smallest share that does its part; then first fit."""
    left: list[list[float]] = []
    for model in models:
        shares = by_share(model)
        replicas = math.ceil(model.rate / max(one.capacity for one in shares.values()))
        share = min(share for share, one in shares.items() if one.capacity * replicas >= model.rate - 1e-9)
        for _ in range(replicas):
            _fill(left, share / 100, shares[share].memory)
    return len(left)


RIVALS: dict[str, Callable[[Sequence[NeedyModel]], int]] = {
    "dedicated": dedicated,
    "first_fit": first_fit,
    "gslice": gslice,
    "gpulet": gpulet,
}


def fillings(options: Sequence[tuple[int, Need]]) -> list[tuple[int, ...]]:
    """The sets of options that fill a GPU and to which none can be added: one replica of a model at most."""
    found = []

    def add(chosen: tuple[int, ...], first: int, compute: float, memory: float) -> None:
        held = {options[one][0] for one in chosen}
        fits = [
            at
            for at, (model, need) in enumerate(options)
            if model not in held and need.compute <= compute + 1e-9 and need.memory <= memory + 1e-9
        ]
        if not fits:
            found.append(chosen)
        for at in fits:
            if at >= first:
                need = options[at][1]
                add((*chosen, at), at + 1, compute - need.compute, memory - need.memory)

    add((), 0, 1.0, 1.0)
    return found


def optimum(models: Sequence[NeedyModel], seconds: float) -> tuple[int, bool]:
    """The fewest GPUs with one batch for each model, and whether that was proved."""
    options = [(number, one) for number, model in enumerate(models) for one in configurations(model, 1.0)]
    filled = fillings([(number, one.need) for number, one in options])
    rows, uses = Rows(), [[at for at, its in enumerate(filled) if option in its] for option in range(len(options))]
    for option, (_, one) in enumerate(options):
        # As many GPUs with it as it has replicas, if it is chosen.
        rows.add([*uses[option], len(filled) + option], [1.0] * len(uses[option]) + [-one.replicas], 0.0, math.inf)
    for number in range(len(models)):
        its = [len(filled) + option for option, (of, _) in enumerate(options) if of == number]
        rows.add(its, [1.0] * len(its), 1.0, 1.0)
    cost = np.array([1.0] * len(filled) + [0.0] * len(options))
    upper = np.array([math.inf] * len(filled) + [1.0] * len(options))
    found = rows.least(cost, np.zeros(len(cost)), upper, np.ones(len(cost), dtype=bool), seconds)
    assert found.values is not None
    return round(float(cost @ found.values)), found.optimal


def planned(models: Sequence[NeedyModel]) -> tuple[int, int, float]:
    """GPUs of our plan, its bound, and the seconds of the processor's time that it took."""
    started = time.process_time()
    plan = plan_needs(models, None, 1.0)
    return len(plan.gpus), plan.least, time.process_time() - started


def twenty(seeds: int) -> dict[str, Any]:
    cases = []
    for seed in range(seeds):
        for busy in LOADS:
            models = drawn(20, busy, seed)
            ours, bound, cpu = planned(models)
            row = {"seed": seed, "busy": busy, "ours": ours, "bound": bound, "cpu_seconds": round(cpu, 3)}
            cases.append(row | {name: rival(models) for name, rival in RIVALS.items()})
            say(f"{cases[-1]}")
    ratios = {name: [one["ours"] / one[name] for one in cases] for name in (*RIVALS, "bound")}
    found = {name: {"median": round(median(its), 3), "most": round(max(its), 3)} for name, its in ratios.items()}
    return {"ratios": found, "most_cpu_seconds": max(one["cpu_seconds"] for one in cases), "cases": cases}


def against_optimum(seeds: int) -> dict[str, Any]:
    cases = []
    for seed in range(seeds):
        for count, busy in ((4, 3), (6, 6), (8, 8), (8, 16)):
            models = drawn(count, busy, seed)
            best, proved = optimum(models, OPTIMUM_S)
            ours, bound, _ = planned(models)
            cases.append({"models": count, "busy": busy, "seed": seed, "ours": ours, "optimum": best, "bound": bound})
            cases[-1]["proved"] = proved
            say(f"{cases[-1]}")
    ratios = [one["ours"] / one["optimum"] for one in cases if one["proved"]]
    return {"proved": len(ratios), "median": median(ratios), "most": max(ratios), "cases": cases}


def answered(model: NeedyModel, seconds: Sequence[float], slowness: Sequence[float], count: int, seed: int) -> float:
    """The part of ``count`` requests that a model's replicas answer in time.

    seconds: of a batch of 0, 1 and so on up to the largest. slowness: of each replica, its factor of them. A replica
    that is free takes what waits, the oldest first. What would be late is refused, and then occupies nothing.
    """
    times = np.random.default_rng(seed).exponential(1 / model.rate, count).cumsum()
    free = [(0.0, factor) for factor in slowness if seconds[1] * factor <= model.slo]
    first = done = 0
    while free and first < count:
        at, factor = heapq.heappop(free)
        now = max(at, times[first])
        first = max(first, int(np.searchsorted(times, now + seconds[1] * factor - model.slo)))
        if first == count:
            break
        now = max(now, times[first])
        size = min(len(seconds) - 1, int(np.searchsorted(times, now, side="right")) - first)
        while size > 1 and times[first] + model.slo < now + seconds[size] * factor - 1e-12:
            size -= 1
        first, done = first + size, done + size
        heapq.heappush(free, (now + seconds[size] * factor, factor))
    return done / count


def attained(seeds: int) -> list[dict[str, float]]:
    found = []
    for margin, wrong in itertools.product((1.0, 1.1, 1.2), (0.0, 0.1)):
        parts = []
        for seed in range(seeds):
            models, draw = drawn(20, 16, seed), random.Random(seed)
            plan = plan_needs([one._replace(rate=one.rate * margin) for one in models], None, 1.0)
            compute, seconds = ([1 + draw.uniform(-wrong, wrong) for _ in models] for _ in range(2))
            slowness: list[list[float]] = [[] for _ in models]
            for gpu in plan.gpus:
                stretch = max(1.0, sum(plan.chosen[one].need.compute * compute[one] for one in gpu))
                for one in gpu:
                    slowness[one].append(stretch * seconds[one])
            answers = 0.0
            for number, model in enumerate(models):
                few, many = model.needs[0], model.needs[-1]
                slope = (many.seconds - few.seconds) / (many.batch - few.batch)
                sizes = range(plan.chosen[number].need.batch + 1)
                times = [few.seconds + slope * (size - few.batch) for size in sizes]
                count = int(min(20_000, max(500, 20 * model.rate)))
                answers += model.rate * answered(model, times, slowness[number], count, 100 * seed + number)
            parts.append(answers / sum(one.rate for one in models))
        row = {"margin": margin, "wrong": wrong, "median": round(median(parts), 4), "least": round(min(parts), 4)}
        found.append(row)
        say(f"{row}")
    return found


def scale(quick: bool) -> dict[str, Any]:
    found = {}
    for name, count, busy in (("20_models", 20, 5800.0), ("1000_models", 1000, 800.0)):
        ours, bound, cpu = planned(
            drawn(count // 10 if quick and count > 20 else count, busy / (10 if quick else 1), 0)
        )
        found[name] = {"gpus": ours, "bound": bound, "cpu_seconds": round(cpu, 2)}
        say(f"{name}: {found[name]}")
    return found


def main() -> None:
    """The command."""
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--seeds", type=int, default=10, help="draws of the models (10)")
    made.add_argument(
        "--only", nargs="+", choices=("twenty", "optimum", "attained", "scale"), help="the parts; all by default"
    )
    given = made.parse_args()
    seeds = 1 if given.quick else given.seeds
    parts: dict[str, Callable[[], Any]] = {
        "twenty": lambda: twenty(seeds),
        "optimum": lambda: against_optimum(seeds),
        "attained": lambda: attained(seeds),
        "scale": lambda: scale(given.quick),
    }
    found = {name: part() for name, part in parts.items() if not given.only or name in given.only}
    finish(result("usher", "made up", "twin", seeds=seeds, **found), given.json)


if __name__ == "__main__":
    main()

"""Serving on the twin, beyond one setting: SLOs and arrivals, advice on GPUs, and sub-clusters.

``python -m benchmarks.serve_cluster --json [--quick] [--only PART ...] [--seed N]``. GPUs take exactly as long as the
profile says. Kind "twin". The models are ResNet50 of Table 2 unless said otherwise.

- ``figure_11``: 20 models on 32 GPUs; their goodput by arrivals (Poisson, Gamma gaps of shape 0.05), shares (equal,
  Zipf 0.9), SLO in ms, and side.
- ``figure_15``: 24 models whose rate follows a sinusoid with bursts, in steps of 10 s, and GPUs that follow the advice
  of `Autoscaler` one step later. ``bad_rate`` of all requests, ``calm_bad_rate`` of those in steps with a load below
  0.9 of the peak, ``gpus`` and ``needed`` (the rate divided by the peak of one GPU) as means, ``steps``. The video of
  the paper is not public.
- ``figure_16``: 800 models in 20 parts by `partition`, against the best of 10,000 random draws; by seed, the
  imbalance ``rate`` and ``memory`` of both: the largest part less the smallest, divided by the average.

A step of ``figure_15`` is simulated for 1 s. ``--quick`` measures fewer cases of each. ``accepted`` says of each part
that was run whether it is within the tolerance that `ACCEPTS` has for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common import finish, parser, result, say
from benchmarks.placement.partition import Limits, ModelLoad, partition
from benchmarks.rival_servers.clockwork import Clockwork
from benchmarks.rival_servers.nexus import Nexus
from benchmarks.rival_servers.shepherd import PreemptiveSimulation, Shepherd
from benchmarks.serve import WORKLOADS, MakeServer, Trial, find, model, ours, simulate, staggered_peak
from benchmarks.serve_arrivals import arrivals
from benchmarks.serve_twin import Outcome, goodput
from symphony_serve.autoscale import Autoscaler, Sample
from symphony_serve.model_side import Model

SIDES: dict[str, MakeServer] = {
    "deferred_window": ours,
    "nexus": Nexus,
    "shepherd": lambda models, rates: Shepherd(models),
    "clockwork": lambda models, rates: Clockwork(models),
}
#: Seconds of a step of figure 15: the time over which the advice measures.
STEP_S = 10.0
#: Mean rate of figure 15, how far the sinusoid goes from it, its steps, and the part of steps with twice the rate.
#: Judgement: some GPUs more or fewer in each minute.
MEAN, SWING, STEPS, BURSTS = 6000.0, 0.6, 60, 0.05


def zipf(models: Sequence[str], exponent: float) -> dict[str, float]:
    """Shares of the load by model that add up to 1: the i-th model has one in proportion to ``1/i**exponent``."""
    weights = [1 / place**exponent for place in range(1, len(models) + 1)]
    return {model: weight / sum(weights) for model, weight in zip(models, weights, strict=True)}


def figure_11(seed: int, quick: bool) -> dict[str, Any]:
    """20 models on 32 GPUs, Nexus' plan made for the true rates."""
    names = [f"m{number}" for number in range(4 if quick else 20)]
    gpus = 4 if quick else 32
    found: dict[str, Any] = {}
    for shape_name, shape in (("poisson", 1.0), ("gamma_0.05", 0.05)):
        for share_name, shares in (("equal", dict.fromkeys(names, 1 / len(names))), ("zipf_0.9", zipf(names, 0.9))):
            for slo in (25.0,) if quick else (15.0, 25.0, 50.0, 100.0):
                models = [model(name, *WORKLOADS["resnet50"][:2], slo) for name in names]
                row = {side: _goodput(make, models, gpus, shares, shape, seed, quick) for side, make in SIDES.items()}
                found.setdefault(shape_name, {}).setdefault(share_name, {})[f"{slo:g}"] = row
                say(f"figure 11, {shape_name}, {share_name}, SLO {slo:g} ms: {row}")
    return found


def _goodput(
    make: MakeServer, models: list[Model], gpus: int, shares: Mapping[str, float], shape: float, seed: int, quick: bool
) -> float:
    def run(rate: float) -> Outcome:
        rates = {name: share * rate for name, share in shares.items()}
        requests = arrivals(rates, {one.name: one.slo for one in models}, seed, shape)
        length = 0.5 if quick else 2.0
        return PreemptiveSimulation(make(models, rates), gpus, requests, length / 2, length).run()

    return round(goodput(run, 0.5 * staggered_peak(models[0], gpus), 0.1 if quick else 0.03))


def imbalance(values: Sequence[float], places: Sequence[int], parts: int) -> float:
    """The largest sum of a part less the smallest, divided by the average."""
    sums = np.bincount(np.asarray(places), weights=np.asarray(values, dtype=float), minlength=parts)
    return float((sums.max() - sums.min()) / sums.mean()) if sums.sum() else 0.0


def figure_15(seed: int, quick: bool) -> dict[str, Any]:
    """24 models with an SLO of 100 ms; it begins with a quarter of the GPUs that the mean needs."""
    models = [model(f"m{number}", *WORKLOADS["resnet50"][:2], 100.0) for number in range(24)]
    rng = random.Random(seed)
    trial = Trial(0.5, 1.0, seed, 0.05)
    base = 8 if quick else 16
    unit = find(ours, models, base, 0.8 * staggered_peak(models[0], base), trial)[0] / base
    scaler = Autoscaler({one.name: (one.profile, one.slo) for one in models})
    mean, steps = (MEAN / 5, 20) if quick else (MEAN, STEPS)
    gpus = max(1, round(mean / unit / 4))
    rows = []
    for step in range(steps):
        burst = 2.0 if rng.random() < BURSTS else 1.0
        rate = burst * mean * (1 + SWING * math.sin(2 * math.pi * step / steps))
        outcome = simulate(ours, models, gpus, rate, trial._replace(seed=seed + step))
        offered = {name: round(STEP_S * count.total) for name, count in outcome.models.items()}
        sample = Sample(STEP_S, gpus, STEP_S * sum(outcome.busy.values()), offered, round(STEP_S * outcome.good))
        rows.append({"rate": round(rate), "gpus": gpus, "needed": rate / unit, "bad": round(outcome.bad_rate, 4)})
        gpus = scaler.add(sample)
    total, calm = sum(row["rate"] for row in rows), [row for row in rows if row["needed"] < 0.9 * row["gpus"]]
    figures = {
        "bad_rate": round(sum(row["bad"] * row["rate"] for row in rows) / total, 4),
        "calm_bad_rate": round(sum(row["bad"] * row["rate"] for row in calm) / sum(row["rate"] for row in calm), 4),
        "gpus": round(sum(row["gpus"] for row in rows) / len(rows), 1),
        "needed": round(sum(row["needed"] for row in rows) / len(rows), 1),
    }
    say(f"figure 15: {figures}")
    return {**figures, "steps": [{**row, "needed": round(row["needed"], 1)} for row in rows]}


def figure_16(seed: int, quick: bool) -> list[dict[str, Any]]:
    """Rates are lognormal (sigma 1), memory is 1 to 10, and up to 1 more for a batch; parts of any size.

    With Zipf 0.9, the first of 800 models alone has twice the average of 20 parts, and no parts are even.
    """
    models, parts, draws = (100, 5, 1000) if quick else (800, 20, 10_000)
    rows = []
    for number in range(seed, seed + (2 if quick else 10)):
        rng = np.random.default_rng(number)
        memory, rates = rng.uniform(1, 10, models), rng.lognormal(3, 1, models)
        loads = [ModelLoad(str(place), rates[place], memory[place], rng.uniform(0, 1)) for place in range(models)]
        found = partition(loads, parts, Limits(math.inf), seconds=1.0)
        places = [found[one.name] for one in loads]

        def uneven(places: Any, rates: Any = rates, memory: Any = memory) -> tuple[float, float]:
            return imbalance(rates, places, parts), imbalance(memory, places, parts)

        best = min((uneven(rng.integers(0, parts, models)) for _ in range(draws)), key=sum)
        row = {
            "seed": number,
            "ours": dict(zip(("rate", "memory"), uneven(places), strict=True)),
            "random": dict(zip(("rate", "memory"), best, strict=True)),
        }
        rows.append(row)
        say(f"figure 16: {row}")
    return rows


PARTS: dict[str, Callable[[int, bool], Any]] = {
    "figure_11": figure_11,
    "figure_15": figure_15,
    "figure_16": figure_16,
}
#: SLOs of figure 11 in ms that are tight, and one at which all sides are alike. Source: the profile, whose batch of 1
#: takes 6 ms; the paper's figure begins at 15 and ends at 100.
TIGHT, LOOSE = ("15", "25"), "100"
#: Goodputs of figure 11 that differ by less are alike. Judgement: each is found to 3 %.
ALIKE = 0.06
#: At the loose SLO and Poisson arrivals all sides have this part of the best. Judgement: the paper's curves meet there.
MEET = 0.8


def accepts_figure_11(found: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> bool:
    """The paper's order: ahead of all at tight SLOs, all alike at loose ones, Nexus behind all in bursts."""
    poisson, bursty = found["poisson"], found["gamma_0.05"]
    ahead = all(
        rows[slo]["deferred_window"] >= (1 - ALIKE) * max(rows[slo].values())
        for shares in found.values()
        for rows in shares.values()
        for slo in TIGHT
        if slo in rows
    )
    alike = all(
        min(rows[LOOSE].values()) >= MEET * max(rows[LOOSE].values()) for rows in poisson.values() if LOOSE in rows
    )
    nexus = all(row["nexus"] <= min(row.values()) for rows in bursty.values() for row in rows.values())
    return ahead and alike and nexus


#: What a part must show. Source: the paper's figures; for figure 15, whose video is not public, ours: less than 1 % bad
#: while the load is below 0.9 of the peak, and GPUs within a tenth of the need.
ACCEPTS: dict[str, Callable[[Any], bool]] = {
    "figure_11": accepts_figure_11,
    "figure_15": lambda found: found["calm_bad_rate"] < 0.01 and abs(found["gpus"] / found["needed"] - 1) <= 0.1,
    "figure_16": lambda rows: all(row["ours"][what] < row["random"][what] for row in rows for what in row["ours"]),
}


def main() -> None:
    """The command."""
    options = parser("Serving on the twin: SLOs and arrivals, advice on GPUs, sub-clusters.")
    options.add_argument("--only", nargs="+", choices=PARTS, help="these parts (all)")
    options.add_argument("--seed", type=int, default=1, help="seed of the arrivals (1)")
    given = options.parse_args()
    figures = {part: PARTS[part](given.seed, given.quick) for part in given.only or PARTS}
    figures["accepted"] = {part: ACCEPTS[part](found) for part, found in figures.items()}
    finish(result("serve_cluster", "4 to 32 simulated GPUs", "twin", seed=given.seed, **figures), given.json)


if __name__ == "__main__":
    main()

"""Finish-time fairness and efficiency of Themis and other schedulers, on the virtual clock.

``python -m benchmarks.fairness --json [--quick] [--trace PATH] [--gpus N] [--seeds N] [--apps N] [--sweeps]``. All
policies run on the real arbiter; kind "twin".

- Without ``--trace``: ``--seeds`` workloads of tuning apps by the paper's distributions, on its 64-GPU testbed or the
  first ``--gpus`` GPUs of it; leases of 10 minutes.
- With ``--trace``: the jobs of a recorded trace (Gavel's and Shockwave's format) on ``--gpus`` GPUs; leases of 20
  minutes.
- ``--sweeps``: Themis alone, with one thing changed at a time. For tuning apps: f, the lease, the number of GPUs, the
  fraction of apps bound by the network, errors in the estimates, and lies about placements by each of eight equal apps
  in turn. For a trace: f, the lease, ``--seeds`` draws of errors, and lies about its work by every ninth job in turn.

A side has ``worst_rho`` and ``static_worst_rho`` (the largest of all workloads) and these means over workloads:
``median_rho``, ``jain`` (Jain's index of rho), ``mean_jct`` and ``makespan`` (s), ``gpu_time`` (GPU seconds held),
``placement_score`` (1 / slowdown, averaged over GPU time), ``above_1_05`` (fraction of apps with a rho above 1.05) and
``rounds``. ``ratios``: another side's worst rho divided by that of Themis; ``ratio`` is the smallest. ``equal``: the
worst rho if the cluster were divided equally at every moment, at no cost and as if all of it were in one place.

rho is the one of `themis_bridge.fairness`: T_id = work / min(GPUs / N, demand), where N is the number of apps in the
system, averaged over the app's life. ``static_worst_rho`` is by Shockwave's measure (`static_finish_time`), to compare
with what is published by it: there N is the number of jobs in the whole trace divided by the GPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common import finish, parser, ratios, result, say
from benchmarks.shared_cluster.apps import Spec
from benchmarks.shared_cluster.baselines import BASELINES
from benchmarks.shared_cluster.ideal import ends
from benchmarks.shared_cluster.simulate import Setup, rhos, simulate
from benchmarks.shared_cluster.workloads import TESTBED_64, machines, read_jobs, tuning_apps
from themis_bridge.locality import Gpu

#: One workload and the seed of the errors in its estimates.
Run = tuple[Sequence[Spec], int]
#: How a trace's jobs are run. Judgement for the lease: `--sweeps` shows what others give.
TRACE = Setup(lease_s=1200.0)


def side(runs: Sequence[Run], gpus: Sequence[Gpu], setup: Setup) -> dict[str, float]:
    """The figures of one policy over all runs."""
    began = time.perf_counter()
    each = [simulate(specs, gpus, replace(setup, seed=seed)).figures() for specs, seed in runs]
    figures = {key: statistics.mean(run[key] for run in each) for key in each[0]}
    for key in ("worst_rho", "static_worst_rho"):
        figures[key] = max(run[key] for run in each)
    say(
        f"{setup.policy:10} worst rho {figures['worst_rho']:.3f} ({figures['static_worst_rho']:.3f} static), "
        f"GPU time {figures['gpu_time'] / 3600:.0f} h, "
        f"mean JCT {figures['mean_jct'] / 3600:.1f} h, makespan {figures['makespan']:.0f} s "
        f"({time.perf_counter() - began:.0f} s)"
    )
    return figures


def equal(specs: Sequence[Spec], gpus: int) -> float:
    """The worst rho under equal shares that cost nothing."""
    return max(rhos(specs, ends(specs, gpus), gpus).values())


def alike(gpu_hours: float, seed: int = 5) -> tuple[list[Spec], list[Gpu]]:
    """The paper's truth-telling experiment (section 6.3): 8 equal apps, one machine of 8 GPUs and 28 of 2."""
    apps = tuning_apps(1, seed, days=gpu_hours / 24, network_bound=1.0)
    return [replace(apps[0], name=f"app{i}") for i in range(8)], machines(((1, 4, 2), (28, 1, 2)))


Sweeps = dict[str, dict[str, dict[str, float]]]


def trace_sweeps(jobs: Sequence[Spec], gpus: Sequence[Gpu], seeds: int) -> Sweeps:
    """Themis on a trace with one thing changed at a time. ``seeds``: how often errors are drawn."""
    runs: list[Run] = [(jobs, 0)]
    drawn = [(jobs, seed) for seed in range(seeds)]
    return {
        "f": {str(f): side(runs, gpus, replace(TRACE, f=f)) for f in (0.8, 0.9, 0.95, 0.97, 0.99, 1.0)},
        "lease_s": {str(s): side(runs, gpus, replace(TRACE, lease_s=s)) for s in (360.0, 600.0, 1200.0, 1800.0)},
        "error": {str(error): side(drawn, gpus, replace(TRACE, error=error)) for error in (0.1, 0.2)},
        "claim": lying(jobs, gpus, TRACE, jobs[3::9], "claim", (0.5, 0.75, 0.9, 1.33, 2.0)),
    }


def lying(
    specs: Sequence[Spec], gpus: Sequence[Gpu], setup: Setup, liars: Sequence[Spec], what: str, factors: Sequence[float]
) -> dict[str, dict[str, float]]:
    """What lies change: in a run of its own, each of ``liars`` lies with the field ``what`` of `Setup` set to a factor.

    Returns factor -> figures: ``jct``, ``best`` and ``worst`` are the mean, smallest and largest relative change of the
    liar's completion time; ``others_jct`` is the mean change of all others'.
    """
    honest = simulate(specs, gpus, setup).jct
    found = {}
    for factor in factors:
        changes, others = [], []
        for liar in liars:
            changed: dict[str, Any] = {"liar": liar.name, what: factor}
            jct = simulate(specs, gpus, replace(setup, **changed)).jct
            changes.append(jct[liar.name] / honest[liar.name] - 1)
            others.append(statistics.mean(jct[name] / honest[name] - 1 for name in jct if name != liar.name))
        figures = {"jct": statistics.mean(changes), "best": min(changes), "worst": max(changes)}
        say(f"{what} {factor:g}: {figures['jct']:+.1%} time ({figures['best']:+.1%} to {figures['worst']:+.1%})")
        found[str(factor)] = {**figures, "others_jct": statistics.mean(others), "liars": len(liars)}
    return found


def sweeps(make: Any, gpus: Sequence[Gpu]) -> Sweeps:
    """Themis on one workload with one thing changed at a time. ``make``: (seed, network_bound) -> apps."""
    known: dict[Any, dict[str, float]] = {}
    base = Setup()

    def one(setup: Setup, at: Sequence[Gpu] = gpus, network_bound: float = 0.5) -> dict[str, float]:
        key = setup, len(at), network_bound
        if key not in known:
            known[key] = side([(make(1, network_bound), 0)], at, setup)
        return known[key]

    found: Sweeps = {
        "f": {str(f): one(replace(base, f=f)) for f in (0.0, 0.4, 0.6, 0.8, 0.9, 1.0)},
        "lease_s": {str(s): one(replace(base, lease_s=s)) for s in (300.0, 600.0, 1200.0, 2400.0)},
        "gpus": {str(n): one(base, gpus[:n]) for n in (len(gpus), len(gpus) // 2)},
        "network_bound": {str(share): one(base, network_bound=share) for share in (0.0, 0.5, 1.0)},
        "error": {str(error): one(replace(base, error=error)) for error in (0.0, 0.1, 0.2)},
    }
    specs, at = alike(40.0)
    found["lie"] = lying(specs, at, base, specs, "lie", (0.1, 0.2, 0.3, 0.34, 0.45, 0.6, 0.8, 1.0))
    return found


def main() -> None:
    """The command."""
    arguments = parser("Fairness of all policies in the twin.")
    arguments.add_argument("--trace", help="path of a recorded trace of jobs; without it, tuning apps")
    arguments.add_argument(
        "--gpus", type=int, help="number of GPUs: for a trace, on machines of 4 (32), or for tuning apps (64)"
    )
    arguments.add_argument(
        "--seeds", type=int, help="number of workloads of tuning apps (1), or of draws of errors (3)"
    )
    arguments.add_argument("--apps", type=int, help="number of tuning apps in a workload (30; 12 with --sweeps)")
    arguments.add_argument("--sweeps", action="store_true", help="Themis alone, with one thing changed at a time")
    options = arguments.parse_args()
    count, days, gap = (8, 0.2, 200.0) if options.quick else (12 if options.sweeps else 30, 2.0, 4800.0)
    count = options.apps or count

    def make(seed: int, network_bound: float = 0.5) -> list[Spec]:
        return tuning_apps(count, seed, days=days, between_s=gap, network_bound=network_bound)

    if options.trace:
        gpus, base = machines((((options.gpus or 32) // 4, 4, 1),)), TRACE
        jobs = read_jobs(options.trace)
        runs: list[Run] = [(jobs, 0)]
        name = f"{len(jobs)} jobs of a recorded trace"
    else:
        gpus, base = machines(TESTBED_64)[: options.gpus], Setup()
        runs = [(make(seed), 0) for seed in range(1, 1 + (options.seeds or 1))]
        name = f"{len(runs)} workloads of {count} tuning apps"
    say(f"{name} on {len(gpus)} GPUs")
    figures: dict[str, Any] = {"workload": name, "f": base.f, "lease_s": base.lease_s}
    if options.sweeps:
        figures["sweeps"] = trace_sweeps(jobs, gpus, options.seeds or 3) if options.trace else sweeps(make, gpus)
    else:
        sides = {policy: side(runs, gpus, replace(base, policy=policy)) for policy in ("themis", *BASELINES)}
        against = ratios(sides, "themis", "worst_rho")
        ideal = max(equal(specs, len(gpus)) for specs, _ in runs)
        say(f"divided equally at no cost: worst rho {ideal:.3f}")
        figures |= {"sides": sides, "ratios": against, "ratio": min(against.values()), "equal": ideal}
    finish(result("fairness", f"{len(gpus)} GPUs", "twin", **figures), options.json)


if __name__ == "__main__":
    main()

"""The auction against orderings, on workloads that no constant of the arbiter was fitted on, on the virtual clock.

``python -m benchmarks.policies --json [--quick] [--traces DIR] [--only POLICY ...] [--workload NAME ...] [--halves]
[--past] [--gangs]``. Each policy runs on the same arbiter twice: ``plain`` (no recall of leases, no renewal) and
``both`` (with both, as Themis does). The workloads are five by the paper's distributions, on 8 to 128 GPUs, and five
recorded ones if DIR has them: the 120 jobs of Shockwave, the 96 jobs of Gavel, and 50 jobs each of the Philly trace and
of two traces of Muri, which were made of other clusters of Philly.

``--halves``: Themis alone, with each constant in `CONSTANTS` halved and increased by half. ``--past``: Themis alone,
with a half-life of past usage and with admission (`OPTIONS`). The apps then belong to `USERS` users; a trace does not
say whose a job is, so users are drawn by lot. ``options``: workload -> option -> its figures, with ``busiest`` and
``rest``, the mean rho of the apps of the user with most work and of all others, ``refused``, the part of the apps that
were not admitted when they came, and ``inside``, the worst rho if the time until an app is admitted does not count.
``--gangs``: Themis alone, once as before, where a job runs more slowly on fewer GPUs than it can use, and once where it
needs as many of one machine at once as it can use there. ``gangs``: workload -> side -> its figures, with ``narrow``
and ``wide``, the mean rho of the apps that need one GPU and of those that need several (in the first run: that will).

``workloads``: name -> side -> its figures, as of `benchmarks.fairness`, with the tally of the auctions. ``sides``: side
-> over all workloads the ``median`` and the ``low`` and ``high`` quartile of its worst rho divided by the smallest
worst rho of any side there, ``most`` (the largest such ratio), ``best`` (on how many workloads nobody is better),
``worst_rho`` (the median) and ``makespan`` (the median of its makespan divided by the straw man's).
"""

from __future__ import annotations

import ast
import csv
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.shared_cluster.apps import Spec
from benchmarks.shared_cluster.baselines import BASELINES
from benchmarks.shared_cluster.simulate import Setup, Simulation, rhos, simulate
from benchmarks.shared_cluster.workloads import machines, read_jobs, single_job, tuning_apps
from themis_bridge import app_record, policy
from themis_bridge.locality import Gpu

#: GPUs of the clusters. Judgement: the sizes of a group to those of the paper; four GPUs on each machine.
SIZES = (8, 16, 32, 64, 128)
#: Lease of recorded jobs, s; as in `benchmarks.fairness`.
TRACE_LEASE_S = 1200.0
#: Recorded traces of which a window is used: name -> (file, cluster in it or "", GPUs). Judgement for the GPUs: the
#: jobs of the window keep them busy for 0.6 to 0.75 of the time from its first arrival to its last.
WINDOWS = {
    "Philly ee9e8c": ("pollux/philly.csv", "ee9e8c", 16),
    "Muri trace 1": ("muri/trace1.csv", "", 8),
    "Muri trace 3": ("muri/trace3.csv", "", 12),
}
#: A window begins with this job in the order of arrival, and has so many. Judgement.
WINDOW_FROM, WINDOW_JOBS = 200, 50
#: Shorter and longer jobs are left out, s. Judgement: a change of GPUs takes 40 s, so that the rho of a job of a few
#: seconds is 40 under every policy; a job of two weeks has a thousand leases, which takes minutes to simulate.
SHORTEST_S, LONGEST_S = 600.0, 12 * 3600.0
#: What `--halves` changes: (module, name).
CONSTANTS = (
    (app_record, "WORK_POWER"),
    (app_record, "PLACEMENT_POWER"),
    (app_record, "SWITCH_S"),
    (policy, "LONG_WAIT"),
)
#: What `--past` sets. A week is Slurm's default half-life (PriorityDecayHalfLife). Judgement for the others: a day is
#: short beside traces of some days; and apps could use half as many GPUs again as there are, or three times as many.
OPTIONS: dict[str, dict[str, float]] = {
    "neither": {},
    "half-life of a day": {"half_life_s": 86400.0},
    "half-life of a week": {"half_life_s": 7 * 86400.0},
    "admission up to 1.5": {"most_demand": 1.5},
    "admission up to 3": {"most_demand": 3.0},
}
#: Users of `--past`; the k-th has 1 / k times as many apps as the first. Judgement: a few people have most of the jobs.
USERS = 8


@dataclass(frozen=True)
class Workload:
    """Apps, the cluster, and the length of leases."""

    specs: Sequence[Spec]
    gpus: Sequence[Gpu]
    lease_s: float = Setup.lease_s


def cluster(gpus: int) -> list[Gpu]:
    """Machines of four GPUs."""
    return machines(((gpus // 4, 4, 1),))


def read_gavel(trace: Path, throughputs: Path) -> list[Spec]:
    """Jobs of Gavel's format: steps (sixth field), GPUs (seventh), arrival (last); steps a second on V100s by file."""
    rates = {ast.literal_eval(key): rate["null"] for key, rate in json.loads(throughputs.read_text())["v100"].items()}
    specs = []
    for number, line in enumerate(trace.read_text().splitlines()):
        fields = line.split("\t")
        width = int(fields[6])
        specs.append(single_job(number, float(fields[-1]), int(fields[5]) / rates[fields[0], width], width))
    return specs


def read_window(path: Path, name: str) -> list[Spec]:
    """A window of the jobs of one cluster of the Philly trace, or, without ``name``, of a trace of Muri."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    if name:
        jobs = [
            (datetime.fromisoformat(row["timestamp"]).timestamp(), float(row["duration"]), int(row["num_gpus"]))
            for row in rows
            if row["cluster"] == name
        ]
    else:
        # Muri's times are milliseconds.
        jobs = [(int(row["submit_time"]) / 1e3, int(row["duration"]) / 1e3, int(row["num_gpu"])) for row in rows]
    window = sorted(job for job in jobs if SHORTEST_S <= job[1] <= LONGEST_S)[WINDOW_FROM : WINDOW_FROM + WINDOW_JOBS]
    return [single_job(number, at - window[0][0], seconds, width) for number, (at, seconds, width) in enumerate(window)]


def workloads(quick: bool, traces: Path | None) -> dict[str, Workload]:
    """Name -> workload. Judgement for the sizes: more work arrives than can be done, and a run takes seconds."""
    found = {
        f"12 tuning apps, {size} GPUs": Workload(
            tuning_apps(12, 300 + size, days=size / 160, between_s=1200.0), cluster(size)
        )
        for size in (SIZES[:2] if quick else SIZES)
    }
    if traces:
        gavel = traces / "gavel"
        found |= {
            "Shockwave, 32 GPUs": Workload(
                read_jobs(traces / "shockwave" / "120_jobs.trace"), cluster(32), TRACE_LEASE_S
            ),
            "Gavel, 32 GPUs": Workload(
                read_gavel(gavel / "max_min_fairness.trace", gavel / "simulation_throughputs.json"),
                cluster(32),
                TRACE_LEASE_S,
            ),
        }
        for name, (file, of, size) in WINDOWS.items():
            found[f"{name}, {size} GPUs"] = Workload(read_window(traces / file, of), cluster(size), TRACE_LEASE_S)
    return found


def run(workload: Workload, name: str, extra: bool) -> dict[str, float]:
    """The figures of one side on one workload. ``extra``: with recall and renewal."""
    setup = Setup(policy=name, recalls=extra, renews=extra, lease_s=workload.lease_s)
    return simulate(workload.specs, workload.gpus, setup).figures()


def compared(table: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """``sides`` of the module's docstring. ``table``: workload -> side -> its figures."""
    found = {}
    for side in next(iter(table.values())):
        ratios = [
            each[side]["worst_rho"] / min(figures["worst_rho"] for figures in each.values()) for each in table.values()
        ]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
        spans = [each[side]["makespan"] / each["strawman both"]["makespan"] for each in table.values()]
        found[side] = {
            "median": median,
            "low": low,
            "high": high,
            "most": max(ratios),
            "best": sum(ratio <= 1.0 for ratio in ratios),
            "worst_rho": statistics.median(each[side]["worst_rho"] for each in table.values()),
            "makespan": statistics.median(spans),
        }
    return found


def compare(there: dict[str, Workload], names: Sequence[str]) -> dict[str, Any]:
    """All policies on all workloads."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for title, workload in there.items():
        for name in names:
            for extra in (False, True):
                if extra and not getattr(BASELINES.get(name, lambda: None)(), "preempts", True):
                    continue  # Its leases never end.
                began, side = time.perf_counter(), f"{name} {'both' if extra else 'plain'}"
                table.setdefault(title, {})[side] = each = run(workload, name, extra)
                say(
                    f"{title:24} {side:15} worst rho {each['worst_rho']:7.3f}, makespan {each['makespan']:7.0f} s, "
                    f"mean JCT {each['mean_jct']:6.0f} s, {each['contested']:4} of {each['auctions']:4} auctions "
                    f"contested, {each['won'] - each['kept']:4} of {each['won']:5} GPUs paid "
                    f"({time.perf_counter() - began:.1f} s)"
                )
    sides = compared(table)
    for side, each in sorted(sides.items(), key=lambda pair: pair[1]["median"]):
        say(
            f"{side:15} worst rho {each['median']:.2f} times the best ({each['low']:.2f} to {each['high']:.2f}, "
            f"at most {each['most']:.2f}), best on {each['best']} of {len(table)}, makespan {each['makespan']:.3f}"
        )
    rest = {side: each["median"] / sides["themis both"]["median"] for side, each in sides.items()}
    del rest["themis both"]
    return {"workloads": table, "sides": sides, "ratios": rest, "ratio": min(rest.values())}


def halves(there: dict[str, Workload]) -> dict[str, Any]:
    """``halves``: constant -> by which fraction each worst rho of Themis changes, halved and increased by half."""
    base = {title: run(workload, "themis", True)["worst_rho"] for title, workload in there.items()}
    found = {}
    for module, name in CONSTANTS:
        usual = getattr(module, name)
        for factor in (0.5, 1.5):
            setattr(module, name, usual * factor)
            moved = [run(workload, "themis", True)["worst_rho"] / base[title] - 1 for title, workload in there.items()]
            found[f"{name} * {factor}"] = moved
            say(f"{name} * {factor}: {min(moved):+.1%} to {max(moved):+.1%}, median {statistics.median(moved):+.1%}")
        setattr(module, name, usual)
    return {"halves": found}


def with_users(specs: Sequence[Spec]) -> list[Spec]:
    """The apps with users drawn by lot."""
    rng, names = random.Random(0), [f"user{number}" for number in range(USERS)]
    weights = [1 / number for number in range(1, USERS + 1)]
    return [replace(spec, user=rng.choices(names, weights)[0]) for spec in specs]


def past(there: dict[str, Workload]) -> dict[str, Any]:
    """``options`` of the module's docstring."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for title, workload in there.items():
        specs = with_users(workload.specs)
        work: Counter[str] = Counter()
        for spec in specs:
            work[spec.user] += spec.budget
        busiest = work.most_common(1)[0][0]
        for option, changes in OPTIONS.items():
            simulation = Simulation(specs, workload.gpus, Setup(lease_s=workload.lease_s, **changes))
            result = simulation.run()
            own, others = (
                statistics.mean(result.rho[spec.name] for spec in specs if (spec.user == busiest) is his)
                for his in (True, False)
            )
            ends = {spec.name: spec.arrives + result.jct[spec.name] for spec in specs}
            since = [replace(spec, arrives=simulation.admitted[spec.name]) for spec in specs]
            inside = rhos(since, ends, len(workload.gpus))
            table.setdefault(title, {})[option] = each = {
                **result.figures(),
                "busiest": own,
                "rest": others,
                "refused": len(simulation.refused) / len(specs),
                "inside": max(inside.values()),
            }
            say(
                f"{title:24} {option:20} worst rho {each['worst_rho']:6.3f}, makespan {each['makespan']:7.0f} s, mean "
                f"JCT {each['mean_jct']:6.0f} s, mean rho of the busiest {own:.3f}, of the rest {others:.3f}, "
                f"{each['refused']:.0%} refused, worst rho once admitted {each['inside']:.3f}"
            )
    return {"options": table}


def in_gangs(spec: Spec, most: int) -> Spec:
    """The app with jobs that need all their GPUs at once, but no more than ``most`` of one machine."""
    width = min(most, *(job.max_gpus for jobs in spec.phases for job in jobs))
    return replace(spec, together=1 << (width.bit_length() - 1))


def gangs(there: dict[str, Workload]) -> dict[str, Any]:
    """``gangs`` of the module's docstring."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for title, workload in there.items():
        machine = max(Counter(gpu.machine for gpu in workload.gpus).values())
        rigid = [in_gangs(spec, machine) for spec in workload.specs]
        for side, specs in (("shrink", workload.specs), ("gangs", rigid)):
            result = simulate(specs, workload.gpus, Setup(lease_s=workload.lease_s))
            means = [
                statistics.mean([result.rho[spec.name] for spec in rigid if (spec.together > 1) is wide] or [0.0])
                for wide in (False, True)
            ]
            figures = {**result.figures(), "narrow": means[0], "wide": means[1]}
            table.setdefault(title, {})[side] = figures
            say(
                f"{title:24} {side:7} worst rho {figures['worst_rho']:6.3f}, makespan {figures['makespan']:7.0f} s, "
                f"mean JCT {figures['mean_jct']:6.0f} s, mean rho of the narrow {means[0]:.3f}, the wide {means[1]:.3f}"
            )
    return {"gangs": table}


def main() -> None:
    """The command."""
    arguments = parser("The auction and other policies, each with and without recall and renewal.")
    names = ["themis", "paper", *BASELINES]
    arguments.add_argument("--traces", type=Path, help="folder of recorded traces, for five further workloads")
    arguments.add_argument("--only", nargs="+", choices=names, default=names, help="themis, strawman and these")
    arguments.add_argument("--halves", action="store_true", help="Themis alone, with constants moved by half")
    arguments.add_argument("--past", action="store_true", help="Themis alone, with past usage and with admission")
    arguments.add_argument("--gangs", action="store_true", help="Themis alone, with jobs that need all their GPUs")
    arguments.add_argument("--workload", nargs="+", default=[], help="only these workloads")
    options = arguments.parse_args()
    there = workloads(options.quick, options.traces)
    for name in set(options.workload) - there.keys():
        arguments.error(f"--workload {name!r}: use one of {', '.join(there)}")
    there = {name: workload for name, workload in there.items() if name in options.workload or not options.workload}
    chosen = [name for name in names if name in {"themis", "strawman", *options.only}]
    if options.gangs:
        figures = gangs(there)
    else:
        figures = halves(there) if options.halves else past(there) if options.past else compare(there, chosen)
    finish(result("policies", f"{len(there)} workloads", "twin", **figures), options.json)


if __name__ == "__main__":
    main()

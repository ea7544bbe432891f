"""The four policies over a 100-job trace on one GPU, on the virtual clock: the dissertation's table 2.1.

``python -m benchmarks.lanes --json [--quick] [--trace CSV] [--seeds N]``. Sides: FIFO, SRTF, PACK, FAIR, each with
makespan, mean queueing, mean JCT and 95 % JCT in minutes, for the first seed. ``ratios``: FIFO's time over ours, of
`mean_jct` under SRTF and of `makespan` under PACK. ``ratio`` is `mean_jct`. `smallest` has the least of both over all
seeds. `fair` has the share of each of three equal jobs, which start at 0, 15 and 30 s, in each span.

`benchmarks.shared_device.twin` says what is a model (kind "twin"), `benchmarks.salus_trace` what the trace assumes.
With ``--trace`` the jobs' memory and iteration times are those of the recorded jobs in that file, and `as_recorded` has
the two ratios for every recorded job once, as long as it was recorded (1, 5 or 10 minutes: no long tail).
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, quantiles

from benchmarks.common import finish, parser, result, say
from benchmarks.salus_trace import CAPACITY, as_recorded, generated, recorded, trace
from benchmarks.shared_device.twin import TwinJob, simulate
from salus_share import Need, policy

POLICIES = ("FIFO", "SRTF", "PACK", "FAIR")


def run(jobs: list[TwinJob]) -> dict[str, dict[str, float]]:
    """Figures by policy, in minutes."""
    sides = {}
    for name in POLICIES:
        records = list(simulate(jobs, CAPACITY, policy(name)).values())
        completions = [record.completion / 60 for record in records]
        sides[name] = {
            "makespan": max(record.ended for record in records) / 60,
            "mean_queueing": mean(record.queueing for record in records) / 60,
            "mean_jct": mean(completions),
            "p95_jct": quantiles(completions, n=20)[-1],
            "pauses": float(sum(record.pauses for record in records)),
        }
    return sides


def gains(sides: dict[str, dict[str, float]]) -> dict[str, float]:
    """FIFO's times over ours."""
    return {
        "mean_jct": sides["FIFO"]["mean_jct"] / sides["SRTF"]["mean_jct"],
        "makespan": sides["FIFO"]["makespan"] / sides["PACK"]["makespan"],
    }


def fair_shares() -> list[list[float]]:
    """The share of each of three equal jobs, by span and job: its iterations over those of one job alone."""
    jobs = [TwinJob(str(i), 15.0 * i, Need(400 << 20, 4 << 30), 600, 0.1) for i in range(3)]
    records = simulate(jobs, CAPACITY, policy("FAIR"), keep_iterations=True)
    return [
        [
            0.1 * sum(start < end <= stop for end, _ in records[str(i)].iterations) / (stop - start)
            for i in range(present)
        ]
        for present, (start, stop) in enumerate(((0.0, 15.0), (15.0, 30.0), (30.0, 120.0)), 1)
    ]


def main() -> None:
    """The command."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--trace", type=Path, help="recorded jobs: job,runtime_s,peak_memory_mb,iterations")
    arguments.add_argument("--seeds", type=int, default=10, help="how many traces; the first one is shown (10)")
    options = arguments.parse_args()
    seeds, coarse = (2, 10.0) if options.quick else (options.seeds, 1.0)
    shown: dict[str, dict[str, float]] = {}
    found = []
    for seed in range(1, seeds + 1):
        kinds = recorded(options.trace) if options.trace else generated(seed)
        sides = run(trace(kinds, seed, coarse_s=coarse))
        shown = shown or sides
        found.append(gains(sides))
        say(
            f"seed {seed}: FIFO over SRTF in mean JCT {found[-1]['mean_jct']:.2f}, over PACK in makespan "
            f"{found[-1]['makespan']:.3f}"
        )
    more = {}
    if options.trace:
        whole = gains(run(as_recorded(options.trace, 1, coarse_s=coarse)))
        more["as_recorded"] = {key: round(value, 4) for key, value in whole.items()}
    figures = result(
        "lanes",
        "gpu:1 of 16 GB",
        "twin",
        trace=options.trace.name if options.trace else "generated",
        seeds=seeds,
        sides={side: {key: round(value, 2) for key, value in row.items()} for side, row in shown.items()},
        ratios={key: round(value, 4) for key, value in found[0].items()},
        ratio=round(found[0]["mean_jct"], 4),
        smallest={key: round(min(one[key] for one in found), 4) for key in found[0]},
        fair=[[round(share, 4) for share in span] for span in fair_shares()],
        **more,
    )
    finish(figures, options.json)


if __name__ == "__main__":
    main()

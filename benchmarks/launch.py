"""How long a trial waits from a free place until its first result: the median over the trials of a job.

``python -m benchmarks.launch --json [--devices cpu:2] [--quick]``. The job is a grid of trials whose first iteration
takes a tenth of a second, on the three sides of sides.py. job.py says when a place is free for a trial. Every side has
decided before that moment which trial is next. So the time is that of the launch alone: stopping the old trial,
providing a process, loading the new trial, its first iteration, and its report.
"""

from __future__ import annotations

from benchmarks.common import cores, finish, parser, ratios, result
from benchmarks.side_limit import SideLimit, repeat
from benchmarks.sides import OURS, sides

#: Seconds of a trial's first iteration. Short beside a stock launch of seconds.
FIRST_ITERATION = 0.1


def launch_job(quick: bool) -> list[str]:
    """The arguments of job.py."""
    trials, steps = (6, 2) if quick else (16, 5)
    job = ["--algorithm", "grid", "--trainable", "sleep", "--trials", str(trials)]
    return [*job, "--steps", str(steps), "--seconds", str(steps * FIRST_ITERATION)]


def main() -> None:
    options = parser("Seconds from a free place to a trial's first result, beside stock Ray Tune.", True, limit=True)
    options.add_argument("--devices", default="cpu:2", help="what all sides run on, cpu:N")
    args = options.parse_args()
    cores(args.devices)
    limit = SideLimit(args.limit)
    measured = repeat(sides(args.devices, launch_job(args.quick)), args.repeats, limit)
    limit.require(OURS)
    found = ratios(measured, OURS, "launch_seconds")
    figures = result(
        "launch",
        args.devices,
        "real",
        first_iteration_seconds=FIRST_ITERATION,
        sides=measured,
        ratio=min(found.values(), default=None),
        ratios=found,
        not_ended=limit.not_ended,
    )
    finish(figures, args.json)


if __name__ == "__main__":
    main()

"""How long a trial waits from being chosen to its first result.

``python -m benchmarks.launch --json [--devices cpu:2] [--quick]``. A grid of trials whose first iteration is a
tenth of a second, on the three sides of sides.py; the median over a job's trials. A trial is *chosen* when a
place to run becomes free for it: when ``fit`` begins, for as many trials as there are cores, and for any other
when the trial whose place it takes is complete (job.py says how they are matched, by one Tune callback on every
side). Who is next was decided before that, on every side, so that from this moment on only the launch is in its
way: stopping the old trial, bringing a process, loading the new trial, its first iteration, and reporting it.
"""

from __future__ import annotations

from benchmarks.common import cores, finish, parser, ratios, repeat, result
from benchmarks.sides import OURS, sides

FIRST_ITERATION = 0.1


def main() -> None:
    options = parser("Seconds from a free place to a trial's first result, beside stock Ray Tune.", repeats=True)
    options.add_argument("--devices", default="cpu:2", help="what all sides run on, cpu:N")
    args = options.parse_args()
    cores(args.devices)
    trials, steps = (6, 2) if args.quick else (16, 5)
    job = ["--algorithm", "grid", "--trainable", "sleep", "--trials", str(trials)]
    length = ["--steps", str(steps), "--seconds", str(steps * FIRST_ITERATION)]
    measured = repeat(sides(args.devices, [*job, *length]), args.repeats)
    found = ratios(measured, OURS, "launch_seconds")
    figures = result(
        "launch",
        args.devices,
        "real",
        first_iteration_seconds=FIRST_ITERATION,
        sides=measured,
        ratio=min(found.values()),
        ratios=found,
    )
    finish(figures, args.json)


if __name__ == "__main__":
    main()

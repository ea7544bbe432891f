"""What the driver grows by in a search of very many trials that report once, or of two trials that report very often.

``python -m benchmarks.driver_growth --json [--trials N | --results N] [--limit SECONDS] [--quick]``. The search is
driver_growth_job.py on two cores, with ``reuse_actors=True``. It runs under FluidTune (`fluid`), and then under stock
Ray Tune (`stock_reuse`). A side that is ended after ``--limit`` has the figures of the trials, or results, that it got
to.

A side has ``done`` (trials that ended, or results), ``per_second``, ``kib_each`` (growth of the driver's resident
memory for each of them after the first tenth of the side's), and ``mib_after_1000`` (growth from number 1,000 to 4,000,
or to the last one; null where fewer ran). ``ratio`` is our number per second divided by theirs. ``lines`` has by side
what the script wrote. Compare sides that got equally far: stock's rate falls, and its growth changes, with the number
of trials.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import PROCESS_LIMIT_S, NotEnded, environment, finish, parser, result, run_process, say
from benchmarks.sides import OURS, under_fluidtune

JOB = str(Path(__file__).with_name("driver_growth_job.py"))
#: Side -> the command before the script's options.
COMMANDS = {OURS: under_fluidtune("cpu:2", JOB), "stock_reuse": [sys.executable, JOB]}
#: ray#64231 has 4,000 trials. Issue J wants the driver flat after the first 1,000 of them.
FIRST, LAST = 1_000, 4_000


def measured(side: str, size: list[str], limit: float) -> list[dict[str, float]]:
    """The lines of one run of a side that takes at most ``limit`` seconds."""
    with tempfile.TemporaryDirectory(prefix="dg-", ignore_cleanup_errors=True) as directory:
        out = Path(directory, "lines")
        command = [*COMMANDS[side], *size, "--storage", directory, "--out", str(out)]
        environ = environment() | {"TMPDIR": directory, "RAY_TMPDIR": directory}
        try:
            run_process(command, limit, environ=environ)
        except NotEnded:
            say(f"{side} was ended after {limit:.0f} s")
            if not out.exists():
                raise
        return [json.loads(line) for line in out.read_text().splitlines()]


def figures(lines: list[dict[str, float]]) -> dict[str, Any]:
    """The figures of a side that the first paragraphs name."""
    last = lines[-1]
    tenth = next(line for line in lines if line["done"] * 10 >= last["done"])
    until = [line for line in lines if FIRST <= line["done"] <= LAST]
    grown = last["done"] - tenth["done"]
    return {
        "done": last["done"],
        "per_second": last["done"] / last["seconds"],
        "kib_each": (last["resident"] - tenth["resident"]) / 2**10 / grown if grown else None,
        "mib_after_1000": (until[-1]["resident"] - until[0]["resident"]) / 2**20 if len(until) > 1 else None,
    }


def main() -> None:
    options = parser("The driver's memory with very many trials, or results.")
    options.add_argument("--trials", type=int, default=10_000, help="trials of a side (10000; quick: 200)")
    options.add_argument("--results", type=int, help="two trials, and their results (quick: 400)")
    options.add_argument("--limit", type=float, default=2 * PROCESS_LIMIT_S, help="seconds of a side (1800)")
    args = options.parse_args()
    lines = {}
    for side in COMMANDS:
        few, many = (400, args.results) if args.results else (200, args.trials)
        size = ["--results" if args.results else "--trials", str(few if args.quick else many)]
        lines[side] = measured(side, size, args.limit)
        say(f"{side}: {figures(lines[side])}")
    sides = {side: figures(of) for side, of in lines.items()}
    rates = {side: of["per_second"] for side, of in sides.items()}
    ratios = {side: rates[OURS] / rate for side, rate in rates.items() if side != OURS}
    shown = {"sides": sides, "ratios": ratios, "ratio": min(ratios.values()), "lines": lines}
    finish(result("driver_growth", "cpu:2", "real", **shown), args.json)


if __name__ == "__main__":
    main()

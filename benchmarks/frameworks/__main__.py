"""Scripts of other people's frameworks under FluidTune and under stock Ray Tune.

``python -m benchmarks.frameworks --json [--only NAME ...] [--pairs N] [--trials N]
[--quick]``.

Each script of `scripts` is a stock Ray Tune script. It runs on the three sides of sides.py: `fluid`, `stock` and
`stock_reuse`. A round runs all three one after the other; every second round runs them in the other order. ``--quick``
runs one round of one script, with four trials a side; ``--trials`` sets how many a side of each script has.

``scripts`` has by script and side the medians of ``fit_seconds``, ``seconds`` (the whole process) and ``processes``
(how many processes the trials ran in), the trials, and the errors. ``equal`` says for each other side whether its
trials reported in the first round what ours did, to a millionth. ``differs`` has the trials that did not, and what
trials left behind outside Tune, such as runs of MLflow. ``fit_ratios`` are other sides' ``fit_seconds`` divided by
ours.

A side that takes longer than ``--limit``, by default 20 times the script's first run, is ended and not run again. It
is in the script's ``not_ended``, with the seconds that it had taken, and has no other figures. A script that ends with
an error, or that does not end under FluidTune, has ``failed`` (on which side) and ``why`` instead. The other scripts
run all the same, and the exit status is 1.

``sides`` has sums of the medians over the scripts that ended on all sides; ``ratios`` divides these sums' ``seconds``.
``not_installed`` names the scripts that did not run, each with the modules that it lacks; requirements.txt has all of
them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.common import finish, parser, ratios, result, say
from benchmarks.frameworks.catalogue import NEEDS, missing
from benchmarks.frameworks.runs import COMMANDS, LIMIT_S, Outcome, differences, medians, run
from benchmarks.side_limit import SideLimit
from benchmarks.sides import OURS

#: Trials of a script with --quick.
QUICK_TRIALS = 4


def compared(runs: dict[str, list[Outcome]], not_ended: dict[str, float]) -> dict[str, Any]:
    """The figures of one script, ``runs`` by side, as the first paragraphs name them."""
    sides = {side: medians(of) for side, of in runs.items()}
    differs = {side: differences(runs[OURS][0], of[0]) for side, of in runs.items() if side != OURS}
    return {
        "sides": sides,
        "ratios": ratios(sides, OURS, "seconds"),
        "fit_ratios": ratios(sides, OURS, "fit_seconds"),
        "equal": {side: not found for side, found in differs.items()},
        "differs": differs,
        "not_ended": not_ended,
    }


def measured(name: str, pairs: int, trials: int | None, limit: SideLimit) -> dict[str, Any]:
    """Run one script ``pairs`` times on each side. A side that fails ends the script, which has no figures then.

    ``trials``: how many trials a run has, None for all.
    """
    runs: dict[str, list[Outcome]] = {side: [] for side in COMMANDS}
    for turn in range(pairs):
        for side in COMMANDS if turn % 2 == 0 else reversed(COMMANDS):
            try:
                done = limit.run(side, partial(run, name, side, trials))
            except RuntimeError as error:
                say(f"[{turn + 1}/{pairs}] {name}, {side}: {error}")
                return {"failed": side, "why": str(error)}
            if OURS in limit.not_ended:
                return {"failed": OURS, "why": f"did not end within {limit.not_ended[OURS]:.0f} s"}
            if done is not None:
                runs[side].append(done)
                shown = f"fit {done['fit_seconds']:.1f} s, whole {done['seconds']:.1f} s, {done['processes']} processes"
                say(f"[{turn + 1}/{pairs}] {name}, {side}: {shown}, {done['errors']} errors")
    return compared({side: of for side, of in runs.items() if side not in limit.not_ended}, limit.not_ended)


def main() -> None:
    options = parser("Scripts of other people's frameworks under FluidTune and under stock Ray Tune.", limit=True)
    options.add_argument("--only", nargs="+", choices=NEEDS, metavar="NAME", help=f"of {', '.join(NEEDS)} (all)")
    options.add_argument("--pairs", type=int, default=1, help="rounds of all sides; medians are compared (1)")
    options.add_argument("--trials", type=int, help="trials of a side of each script, if it has as many (all)")
    args = options.parse_args()
    chosen = args.only or list(NEEDS)
    lacking = {name: missing(name) for name in chosen if missing(name)}
    for name, modules in lacking.items():
        say(f"{name}: not run, {', '.join(modules)} not installed")
    names = [name for name in chosen if name not in lacking]
    if not names:
        options.error("none of the frameworks is installed; pip install -r benchmarks/frameworks/requirements.txt")
    if args.quick:
        args.pairs, names = 1, names if args.only else names[-1:]
    trials = args.trials or (QUICK_TRIALS if args.quick else None)
    found = {name: measured(name, args.pairs, trials, SideLimit(args.limit, LIMIT_S)) for name in names}
    ended = [of for of in found.values() if "failed" not in of]
    whole = [of["sides"] for of in ended if not of["not_ended"]]
    sides = {side: {key: sum(of[side][key] for of in whole) for key in whole[0][side]} for side in COMMANDS if whole}
    by_side = ratios(sides, OURS, "seconds") if whole else {}
    figures = result(
        "frameworks",
        "cpu:2",
        "real",
        pairs=args.pairs,
        sides=sides,
        ratios=by_side,
        ratio=min(by_side.values(), default=None),
        scripts=found,
        not_installed=lacking,
    )
    finish(figures, args.json)
    if len(ended) < len(found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

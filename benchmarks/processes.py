"""A HyperBand search on digits whose trials have forked processes, or plain new ones.

``python -m benchmarks.processes --json [--repeats N] [--devices cpu:N]``. The search is that of `tune_vs_fluid` on
cores. Each side is a run under FluidTune, start-up included: `forked` as it is by default, `plain` with
``--no-fork-server``. Sides run in turn; every second round runs them in the other order. ``sides`` has medians;
``ratios`` divide the ``seconds`` of `plain` by those of `forked`.
"""

from __future__ import annotations

from statistics import median

from benchmarks.commits import jobs
from benchmarks.common import Figures, cores, finish, parser, ratios, result, say
from benchmarks.sides import OURS, sides

#: Side -> further options of ``fluidtune run``.
SETTINGS = {"forked": [], "plain": ["--no-fork-server"]}


def main() -> None:
    made = parser(__doc__.splitlines()[0], repeats=True)
    made.add_argument("--devices", default="cpu:2", help="cpu:N")
    options = made.parse_args()
    cores(options.devices)
    job = jobs(emulated=False, quick=options.quick)["hyperband"]
    run = {name: sides(options.devices, job, settings=settings)[OURS] for name, settings in SETTINGS.items()}
    runs: dict[str, list[Figures]] = {name: [] for name in SETTINGS}
    for turn in range(options.repeats):
        for name in sorted(SETTINGS, reverse=bool(turn % 2)):
            runs[name].append(run[name]())
            say(f"{name}: {runs[name][-1]['seconds']:.2f} s")
    keys = ("seconds", "fit_seconds", "first_result_seconds", "best")
    found = {name: {key: median(each[key] for each in of) for key in keys} for name, of in runs.items()}
    shown = {"sides": found, "all": runs, "ratios": ratios(found, "forked", "seconds")}
    finish(result("processes", options.devices, "real", **shown, ratio=shown["ratios"]["plain"]), options.json)


if __name__ == "__main__":
    main()

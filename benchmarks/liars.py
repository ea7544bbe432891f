"""What an app gains by lying to the arbiter, in the twin.

``python -m benchmarks.liars --json [--quick] [--trace FILE] [--liars N] [--draws N] [--only KIND ...]
[--scene NAME ...]``. In each scene, each of N apps (24, or all) lies in runs of its own, in each of the ways of `LIES`;
all else is as in the honest runs. The scenes are seeded workloads that no constant of the arbiter was fitted on, and a
recorded trace of jobs on 32 GPUs if its file is given.

An app that knew the exact second of every arrival could gain from any change, because a round then has another order of
apps. It cannot know that. So every run is repeated with arrivals that are later by up to `SHIFT_S`, drawn anew, and a
gain is that of the mean time.

What chance still does, placebos show: each liar also makes changes that cannot help it (`PLACEBOS`). In the same scene,
with the same draws, its app then ends sooner or later by chance alone. If a lie is no better than a placebo, it makes
no difference which of the liar's runs is called the lie. So that label is drawn by lot for each liar, `LOTS` times: a
randomization test in which each liar is a block (with p as Phipson and Smyth compute it: Permutation P-values Should
Never Be Zero, 2010). ``p_gain`` is the part of the lots in which the mean gain is at least the lie's, ``p_over`` that
in which at least as many liars gain more than `MOST`. Small: more than chance. (Of rows without any gain, one in twenty
is below 0.05.)

``lies``: way -> ``gain`` (mean), ``q10``, ``median``, ``q90``, ``best`` and ``worst``: by which fraction the liar ends
sooner than in the honest run; ``each``: the same of each liar, rounded; ``over``: the part of the liars of which it is
more than `MOST`; ``others``: the mean of the same for all other apps; ``liars``: how many there were; ``p_gain`` and
``p_over``, see above. ``scenes``: the same by scene. In both, `CHANCE` are all placebos together. ``gain`` and ``best``
are over all lies. ``doubt``: the largest doubt about any app in the honest runs (1: none). ``doubted``: scene -> the
same.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common import finish, parser, result, say
from benchmarks.fairness import TRACE, alike
from benchmarks.shared_cluster.apps import Spec
from benchmarks.shared_cluster.liars import Lie, come_back, split
from benchmarks.shared_cluster.simulate import Setup, Simulation
from benchmarks.shared_cluster.workloads import TESTBED_64, machines, read_jobs, single_jobs, tuning_apps
from themis_bridge.locality import Gpu


@dataclass(frozen=True)
class Way:
    """One way to lie: what it changes in the `Setup`, or how it changes the liar's app."""

    changes: dict[str, Any]
    parts: Callable[[Spec], list[Spec]] | None = None


#: Arrivals are later by up to so many seconds. Judgement: long beside the time between two rounds in which equal apps
#: would take turns, short beside a lease.
SHIFT_S = 60.0
#: The name of all placebos together.
CHANCE = "placebo"
#: More than this any single liar should not gain. Source: issue 19.
MOST = 0.1
#: Lots of the permutation test. Judgement: a p of 0.05 is then known to within 0.005.
LOTS = 10_000


def later(seconds: float) -> Callable[[Spec], list[Spec]]:
    """The app comes so much later, and ties fall by another lot: its time of arrival is part of the lot."""
    return lambda spec: [replace(spec, arrives=spec.arrives + seconds)]


def gangs(number: int) -> Callable[[Spec], list[Spec]]:
    """The app says that it needs so many GPUs of one machine at once."""
    return lambda spec: [replace(spec, claims=number)]


#: Changes that cannot help. A claim that is wrong by 1 % is none of them: it decides the order of equal apps.
PLACEBOS = {f"{seconds} s later": Way({}, later(seconds)) for seconds in range(1, 7)}
LIES = {
    "work * 0.99": Way({"claim": 0.99}),
    "work left * 3": Way({"false": Lie(behind=3.0)}),
    "work done / 4": Way({"false": Lie(done=0.25)}),
    "1e9 s left": Way({"false": Lie(always=1e9)}),
    "work * 0.5": Way({"claim": 0.5}),
    "work * 0.75": Way({"claim": 0.75}),
    "work * 0.9": Way({"claim": 0.9}),
    "work * 0.95": Way({"claim": 0.95}),
    "work * 1.5": Way({"claim": 1.5}),
    "work * 3": Way({"claim": 3.0}),
    "placements * 1.3": Way({"lie": 0.3}),
    "placements * 2": Way({"lie": 1.0}),
    "split in two": Way({}, split),
    "come back": Way({}, come_back),
    "gangs of 2": Way({}, gangs(2)),
    "gangs of 4": Way({}, gangs(4)),
}


#: How tuning apps and single jobs are run.
TUNING = Setup()


@dataclass(frozen=True)
class Scene:
    """A workload on a cluster. ``draws``: how many draws of arrivals are as good as one of another scene."""

    specs: Sequence[Spec]
    gpus: Sequence[Gpu]
    setup: Setup = TUNING
    draws: int = 1


def scenes(quick: bool, trace: str | None) -> dict[str, Scene]:
    """Name -> scene. Judgement for the sizes: a run takes seconds, and apps are fewer and more than GPUs."""
    testbed = machines(TESTBED_64)
    # Where all apps are equal chance decides most, and a run takes a tenth of a second. (The app of seed 201 could use
    # an eighth of the GPUs, so that nobody waits.)
    found = {"equal apps, 64 GPUs": Scene(*alike(10.0, 202), draws=8)}
    if not quick:
        found |= {
            "12 tuning apps, 32 GPUs": Scene(tuning_apps(12, 202, days=0.2, between_s=1600.0), testbed[:32], draws=2),
            "12 tuning apps, 64 GPUs": Scene(tuning_apps(12, 203, days=0.4, between_s=800.0), testbed, draws=2),
            "40 jobs, 16 GPUs": Scene(single_jobs(40, 204, hours=1.0, between_s=900.0), machines(((4, 4, 1),))),
            "30 tuning apps, 16 GPUs": Scene(tuning_apps(30, 205, days=0.1, between_s=240.0), testbed[:16]),
        }
    if trace:
        found["trace, 32 GPUs"] = Scene(read_jobs(trace), machines(((8, 4, 1),)), TRACE)
    return found


def run(scene: Scene, specs: Sequence[Spec], changes: dict[str, Any]) -> tuple[dict[str, float], float]:
    """App, or user -> seconds from its first arrival to its last end; and the largest doubt."""
    simulation = Simulation(specs, scene.gpus, replace(scene.setup, **changes))
    simulation.run()
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for app in simulation.apps.values():
        name = app.spec.user or app.spec.name
        begun[name] = min(begun.get(name, app.spec.arrives), app.spec.arrives)
        ended[name] = max(ended.get(name, 0.0), app.finished or 0.0)
    return {name: ended[name] - begun[name] for name in begun}, simulation.doubted


def shifted(specs: Sequence[Spec], draw: int) -> list[Spec]:
    """The apps with arrivals that are later by up to `SHIFT_S`."""
    rng = random.Random(draw)
    return [replace(spec, arrives=spec.arrives + rng.uniform(0, SHIFT_S)) for spec in specs]


def mean_times(scene: Scene, drawn: Sequence[Sequence[Spec]], way: Way, liar: int | None) -> dict[str, float]:
    """App, or user -> mean of its seconds over all draws; "" -> the largest doubt. ``liar``: number of the app."""
    runs, most = [], 1.0
    for specs in drawn:
        who = "" if liar is None else specs[liar].name
        parts = [] if liar is None or way.parts is None else way.parts(specs[liar])
        there = [*(spec for spec in specs if spec.name != who), *parts] if parts else specs
        found, doubt = run(scene, sorted(there, key=_arrival), {**way.changes, "liar": who} if who else {})
        runs.append(found)
        most = max(most, doubt)
    return {app: statistics.mean(each[app] for each in runs) for app in runs[0]} | {"": most}


#: (gain of a liar, mean gain of the others), of each liar.
Gains = list[tuple[float, float]]


def figures(found: Gains) -> dict[str, Any]:
    """The figures of one way."""
    gains = [gain for gain, _ in found]
    low, median, high = np.quantile(gains, (0.1, 0.5, 0.9))
    return {
        "gain": statistics.mean(gains),
        "q10": float(low),
        "median": float(median),
        "q90": float(high),
        "best": max(gains),
        "worst": min(gains),
        "over": statistics.mean(gain > MOST for gain in gains),
        "others": statistics.mean(others for _, others in found),
        "liars": len(gains),
        "each": [round(gain, 4) for gain in gains],
    }


def beyond_chance(lie: Sequence[float], placebos: Sequence[Sequence[float]]) -> dict[str, float]:
    """``p_gain`` and ``p_over``, see the module. ``placebos``: of each placebo the gains of the same liars."""
    gains = np.array([lie, *placebos])
    rng = np.random.default_rng(0)
    lots = np.take_along_axis(gains, rng.integers(len(gains), size=(LOTS, gains.shape[1])), axis=0)
    # The lie itself is one of the lots. Sums of the same numbers in another order may differ in the last bits.
    least, over = gains[0].mean() - 1e-12, (gains[0] > MOST).sum()
    return {
        "p_gain": (1 + int((lots.mean(axis=1) >= least).sum())) / (LOTS + 1),
        "p_over": (1 + int(((lots > MOST).sum(axis=1) >= over).sum())) / (LOTS + 1),
    }


def rows(found: dict[str, Gains]) -> dict[str, dict[str, Any]]:
    """Way -> its figures. ``found``: way -> the gains of the same liars, of all placebos and of lies."""
    placebos = [[gain for gain, _ in found[kind]] for kind in PLACEBOS]
    table = {CHANCE: figures([each for kind in PLACEBOS for each in found[kind]])}
    for kind, gains in found.items():
        table[kind] = figures(gains)
        if kind in LIES:
            table[kind] |= beyond_chance([gain for gain, _ in gains], placebos)
    return table


def gains_in(scene: Scene, liars: int, draws: int, ways: dict[str, Way]) -> tuple[dict[str, Gains], float]:
    """Way -> what each liar of a scene gains; and the largest doubt without a lie."""
    drawn = [shifted(scene.specs, draw) for draw in range(draws * scene.draws)]
    honest = mean_times(scene, drawn, Way({}), None)
    doubt = honest.pop("")
    step = max(1, len(scene.specs) // liars)
    chosen = range(step // 2, len(scene.specs), step)[:liars]
    found: dict[str, Gains] = {kind: [] for kind in ways}
    for kind, way in ways.items():
        for liar in chosen:
            times = mean_times(scene, drawn, way, liar)
            gains = {app: 1 - times[app] / honest[app] for app in honest}
            mine = gains.pop(scene.specs[liar].name)
            found[kind].append((mine, statistics.mean(gains.values())))
    return found, doubt


def measure(there: dict[str, Scene], liars: int, draws: int, only: Sequence[str]) -> dict[str, Any]:
    """The figures of all scenes."""
    ways = PLACEBOS | {kind: LIES[kind] for kind in only or LIES}
    table: dict[str, dict[str, Any]] = {}
    every: dict[str, Gains] = {kind: [] for kind in ways}
    doubted: dict[str, float] = {}
    for name, scene in there.items():
        found, doubted[name] = gains_in(scene, liars, draws, ways)
        for kind, gains in found.items():
            every[kind] += gains
        table[name] = rows(found)
        for kind, row in table[name].items():
            say(line(name, kind, row))
    lies = rows(every)
    for kind, row in lies.items():
        say(line("all", kind, row))
    together = figures([each for kind in ways if kind in LIES for each in every[kind]])
    return {
        "scenes": table,
        "lies": lies,
        "gain": together["gain"],
        "best": together["best"],
        "doubt": max(doubted.values()),
        "doubted": doubted,
    }


def line(scene: str, kind: str, row: dict[str, Any]) -> str:
    """One row of the table, for people."""
    return (
        f"{scene:24} {kind:17} {row['gain']:+7.1%} ({row['worst']:+.1%}, 10 % {row['q10']:+.1%}, "
        f"90 % {row['q90']:+.1%}, {row['best']:+.1%}), over {row['over']:.0%}, others {row['others']:+.2%}"
        + (f", p {row['p_gain']:.4f} and {row['p_over']:.4f}" if "p_gain" in row else "")
    )


def _arrival(spec: Spec) -> tuple[float, str]:
    return spec.arrives, spec.name


def main() -> None:
    """The command."""
    arguments = parser("What lies to the arbiter gain.")
    arguments.add_argument("--trace", help="path of a recorded trace of jobs, for a further scene")
    arguments.add_argument("--liars", type=int, help="apps that lie in turn, in each scene (24; 2 with --quick)")
    arguments.add_argument("--scene", nargs="+", default=[], help="only these scenes")
    arguments.add_argument("--draws", type=int, default=1, help="draws of arrivals for each run (1)")
    arguments.add_argument("--only", nargs="+", choices=list(LIES), default=[], help="only these ways to lie")
    options = arguments.parse_args()
    liars = options.liars or (2 if options.quick else 24)
    there = scenes(options.quick, options.trace)
    for name in set(options.scene) - there.keys():
        arguments.error(f"--scene {name!r}: use one of {', '.join(there)}")
    there = {name: scene for name, scene in there.items() if name in options.scene or not options.scene}
    found = measure(there, liars, options.draws, options.only)
    say(f"on average {found['gain']:+.1%}, at most {found['best']:+.1%}; largest doubt {found['doubt']:.3f}")
    finish(result("liars", f"{liars} liars in each scene, {options.draws} draws", "twin", **found), options.json)


if __name__ == "__main__":
    main()

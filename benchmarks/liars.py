"""What an app gains by lying to the arbiter, in the twin.

``python -m benchmarks.liars --json [--quick] [--trace FILE] [--liars N] [--draws N] [--only KIND ...]
[--scene NAME ...]``. In each scene, each of N apps (8) lies in runs of its own, in each of the ways of `LIES`; all else
is as in the honest runs. The scenes are seeded workloads that no constant of the arbiter was fitted on, and a recorded
trace of jobs on 32 GPUs if its file is given.

An app that knew the exact second of every arrival could gain from any change, because a round then has another order of
apps. It cannot know that. So every run is repeated with arrivals that are later by up to `SHIFT_S`, drawn anew, and a
gain is that of the mean time. What chance still does, the row `CHANCE` shows: it lies by a thousandth.

``lies``: way -> ``gain`` (mean), ``best`` and ``worst``: by which fraction the liar ends sooner than in the honest run;
``others``: the mean of the same for all other apps; ``liars``: how many there were. ``scenes``: the same by scene.
``gain`` and ``best`` are over all ways but `CHANCE`. ``doubt``: the largest doubt about any app in the honest runs (1:
none). ``doubted``: scene -> the same.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.fairness import TRACE, alike
from themis_bridge.locality import Gpu
from themis_bridge.twin.apps import Spec
from themis_bridge.twin.liars import Lie, come_back, split
from themis_bridge.twin.simulate import Setup, Simulation
from themis_bridge.twin.workloads import TESTBED_64, machines, read_jobs, single_jobs, tuning_apps


@dataclass(frozen=True)
class Way:
    """One way to lie: what it changes in the `Setup`, or how it changes the liar's app."""

    changes: dict[str, Any]
    parts: Callable[[Spec], list[Spec]] | None = None


#: Arrivals are later by up to so many seconds. Judgement: long beside the time between two rounds in which equal apps
#: would take turns, short beside a lease.
SHIFT_S = 60.0
#: A lie that is too small to be one: what it changes is chance.
CHANCE = "work * 0.999"
LIES = {
    CHANCE: Way({"claim": 0.999}),
    "rho * 3": Way({"false": Lie(behind=3.0)}),
    "T_id / 4": Way({"false": Lie(shorter=4.0)}),
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
            "12 tuning apps, 32 GPUs": Scene(tuning_apps(12, 202, days=0.2, between_s=1600.0), testbed[:32]),
            "12 tuning apps, 64 GPUs": Scene(tuning_apps(12, 203, days=0.4, between_s=800.0), testbed),
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


def figures(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The figures of one way. ``found``: (gain of the liar, mean gain of the others) of each run."""
    gains = [gain for gain, _ in found]
    return {
        "gain": statistics.mean(gains),
        "best": max(gains),
        "worst": min(gains),
        "others": statistics.mean(others for _, others in found),
        "liars": len(gains),
    }


def measure(there: dict[str, Scene], liars: int, draws: int, only: Sequence[str]) -> dict[str, Any]:
    """The figures of all scenes."""
    table: dict[str, dict[str, Any]] = {}
    every: dict[str, list[tuple[float, float]]] = {}
    doubted: dict[str, float] = {}
    for name, scene in there.items():
        drawn = [shifted(scene.specs, draw) for draw in range(draws * scene.draws)]
        honest = mean_times(scene, drawn, Way({}), None)
        doubted[name] = honest.pop("")
        step = max(1, len(scene.specs) // liars)
        chosen = range(step // 2, len(scene.specs), step)[:liars]
        for kind in only or LIES:
            found = []
            for liar in chosen:
                times = mean_times(scene, drawn, LIES[kind], liar)
                gains = {app: 1 - times[app] / honest[app] for app in honest}
                mine = gains.pop(scene.specs[liar].name)
                found.append((mine, statistics.mean(gains.values())))
            table.setdefault(name, {})[kind] = row = figures(found)
            every.setdefault(kind, []).extend(found)
            say(line(name, kind, row))
    lies = {kind: figures(found) for kind, found in every.items()}
    for kind, row in lies.items():
        say(line("all", kind, row))
    together = figures([each for kind, found in every.items() for each in found if kind != CHANCE or only == [CHANCE]])
    return {
        "scenes": table,
        "lies": lies,
        "gain": together["gain"],
        "best": together["best"],
        "doubt": max(doubted.values()),
        "doubted": doubted,
    }


def line(scene: str, kind: str, row: dict[str, float]) -> str:
    """One row of the table, for people."""
    return (
        f"{scene:24} {kind:17} {row['gain']:+7.1%} ({row['worst']:+.1%} to {row['best']:+.1%}), "
        f"others {row['others']:+.2%}"
    )


def _arrival(spec: Spec) -> tuple[float, str]:
    return spec.arrives, spec.name


def main() -> None:
    """The command."""
    arguments = parser("What lies to the arbiter gain.")
    arguments.add_argument("--trace", help="path of a recorded trace of jobs, for a further scene")
    arguments.add_argument("--liars", type=int, help="apps that lie in turn, in each scene (8; 2 with --quick)")
    arguments.add_argument("--scene", nargs="+", default=[], help="only these scenes")
    arguments.add_argument("--draws", type=int, default=1, help="draws of arrivals for each run (1)")
    arguments.add_argument("--only", nargs="+", choices=list(LIES), default=[], help="only these ways to lie")
    options = arguments.parse_args()
    liars = options.liars or (2 if options.quick else 8)
    there = scenes(options.quick, options.trace)
    for name in set(options.scene) - there.keys():
        arguments.error(f"--scene {name!r}: use one of {', '.join(there)}")
    there = {name: scene for name, scene in there.items() if name in options.scene or not options.scene}
    found = measure(there, liars, options.draws, options.only)
    say(f"on average {found['gain']:+.1%}, at most {found['best']:+.1%}; largest doubt {found['doubt']:.3f}")
    finish(result("liars", f"{liars} liars in each scene, {options.draws} draws", "twin", **found), options.json)


if __name__ == "__main__":
    main()

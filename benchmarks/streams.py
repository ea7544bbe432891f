"""How far the engine is from the least possible makespan, on the twin: searches that live, and batches.

``python -m benchmarks.streams --json [--seeds N] [--devices 8 16] [--quick]``. No Ray cluster is started.

*Searches*: Ray Tune's own ASHAScheduler decides after each iteration of each trial, as in a real run, so that another
order of the trials leads to other decisions. A case is a kind of learning curve, a profile, costs of start-up, and how
many trials the searcher offers at once; each seed has its own curves. For each number of devices it has the means over
the seeds of ``seconds``, of ``bound_ratio`` (seconds divided by the least that any schedule of the same iterations
could have had, docs/engine.md), of ``iterations``, of ``long`` (trials that did more than a third of the most
iterations) and of ``best`` (the best metric). ``one_each`` has the same with one device for each trial, as stock Ray
Tune gives them.

*Batches*: grid, HyperBand and PBT of `tune_vs_fluid`'s sizes and a larger HyperBand, whose decisions do not depend on
the order: ``seconds``, ``bound_ratio``. ``no_start_up`` has the same where processes are there at once, and
``packing_known`` where in addition the engine is told how many trials to put on a device, which it finds out otherwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from benchmarks.common import finish, parser, result, say
from benchmarks.emulated_task import accuracy
from fluidtune.profiles import DEFAULT, Profile
from fluidtune.twin import Costs, RecordedJob, RecordedTrial, Stage, Twin, grid, least_makespan

#: Trials and most iterations of a search: those of `tune_vs_fluid --algorithm asha` on emulated devices.
TRIALS, ITERATIONS, ETA = 81, 81, 3
#: Start-up about as on a machine with two cores that does nothing else (`benchmarks.twin --devices emulated:8`), and
#: none, as where an iteration takes minutes.
TWO_CORES = Costs(begin=0.5, cold=0.9, at_once=1.5, first=0.4, turn=0.02)
NONE = Costs()
#: What the search for the packing limit finds with the default profile: a third trial on a device does not pay.
PACKING = 2
#: Trials that nearly double with each doubling of their devices and cannot be packed, and trials that hardly
#: gain from a second device.
SCALES = Profile("scales", {"1": 1.0, "2": 0.52, "4": 0.28, "8": 0.16, "16": 0.12}, {2: 1.9}, memory=0.2)
POOR = Profile("poor", {"1": 1.0, "2": 0.7, "4": 0.55, "8": 0.5}, {2: 1.2, 3: 1.5, 4: 1.9}, memory=0.2)

#: The metric of a trial after an iteration, to be maximised.
Curve = Callable[[int], float]


def emulated(rng: random.Random) -> Curve:
    """The curve of a random configuration of `emulated_task`."""
    config = {
        "lr": 10 ** rng.uniform(-4, 0),
        "momentum": rng.uniform(0.5, 0.99),
        "width": rng.choice([16, 32, 48]),
    }
    return lambda iteration: accuracy(config, iteration)


def power(rng: random.Random) -> Curve:
    """A power law with noise of 0.01. Curves of different speeds that cross late."""
    top, speed, seed = rng.betavariate(4, 2), rng.uniform(0.3, 1.2), rng.random()
    return lambda iteration: top - 0.6 * iteration**-speed + random.Random(f"{seed} {iteration}").gauss(0, 0.01)


def noise(rng: random.Random) -> Curve:
    """A new random metric at each iteration: nothing that a trial has done says how it goes on."""
    seed = rng.random()
    return lambda iteration: random.Random(f"{seed} {iteration}").random()


@dataclass(frozen=True)
class Case:
    """A kind of search. ``varied``: iterations of some trials take longer. ``pending``: as in `RecordedJob`."""

    curve: Callable[[random.Random], Curve]
    profile: Profile = DEFAULT
    costs: Costs = TWO_CORES
    varied: bool = False
    pending: int | None = None


CASES = {
    "emulated": Case(emulated),
    "emulated, no start-up": Case(emulated, costs=NONE),
    "emulated, searcher": Case(emulated, pending=1),
    "power, scales": Case(power, SCALES, varied=True),
    "power, poor": Case(power, POOR, NONE),
    "noise": Case(noise, varied=True),
}


class _Trial:
    """All that ASHAScheduler reads of a trial."""

    def __init__(self, trial_id: str):
        self.trial_id = trial_id


class LiveTwin(Twin):
    """The twin with a tuning algorithm that lives.

    ``stops`` gets a trial and the number of iterations that the trial has done in its stage, after each one, and says
    whether the stage ends there.
    """

    def __init__(self, work: RecordedJob, devices: int, stops: Callable[[str, int], bool]):
        super().__init__(work, devices)
        self._stops = stops

    def _done(self, run: Any, step: Any) -> None:
        progress = self._trials[run.trial]
        if self._stops(run.trial, progress.trial.stages[progress.stage].iterations - progress.left + 1):
            progress.left = 1
        super()._done(run, step)


class Search:
    """One search: the job, and the algorithm that lives (``stops``). ``done``: iterations of each trial so far."""

    def __init__(self, case: Case, seed: int, trials: int = TRIALS, iterations: int = ITERATIONS):
        rng = random.Random(seed)
        self._asha: Any = ASHAScheduler("t", "metric", "max", max_t=iterations, grace_period=1, reduction_factor=ETA)
        names = [f"trial{number}" for number in range(trials)]
        self._curves = {name: case.curve(rng) for name in names}
        self._trials = {name: _Trial(name) for name in names}
        for trial in self._trials.values():
            self._asha.on_trial_add(None, trial)
        stage = Stage("stream", iterations, float(iterations))
        self.job = RecordedJob(
            tuple(RecordedTrial(name, (stage,), math.exp(rng.gauss(0, 0.5)) if case.varied else 1.0) for name in names),
            case.profile,
            {"stream": False},
            pending=case.pending,
            costs=case.costs,
        )
        self.done = dict.fromkeys(names, 0)

    def stops(self, name: str, iteration: int) -> bool:
        """Whether ASHA stops the trial after this iteration."""
        self.done[name] = iteration
        found = {"t": iteration, "metric": self._curves[name](iteration)}
        return bool(self._asha.on_trial_result(None, self._trials[name], found) == TrialScheduler.STOP)

    def figures(self, seconds: float, devices: int) -> dict[str, float]:
        """What it came to, when all trials have ended after ``seconds``."""
        trials = tuple(
            replace(trial, stages=(replace(trial.stages[0], iterations=self.done[trial.trial]),))
            for trial in self.job.trials
        )
        bound = least_makespan(replace(self.job, trials=trials), devices).seconds
        longest = max(stage.iterations for trial in self.job.trials for stage in trial.stages)
        return {
            "seconds": seconds,
            "bound_ratio": seconds / bound,
            "iterations": sum(self.done.values()),
            "long": sum(done > longest / ETA for done in self.done.values()),
            "best": max(self._curves[name](done) for name, done in self.done.items()),
        }


def run(case: Case, seed: int, devices: int, one_each: bool, **size: int) -> dict[str, float]:
    """One search on the twin."""
    search = Search(case, seed, **size)
    if one_each:
        search.job = replace(search.job, kind="plain", growable=False, max_packing=1)
    seconds = LiveTwin(search.job, devices, search.stops).run()
    # Also with one device for each trial the bound is that of a job whose trials may be packed and grow.
    search.job = replace(search.job, kind="elastic", growable=True, max_packing=None)
    return search.figures(seconds, devices)


def mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: fmean(one[key] for one in found) for key in found[0]}


def hyperband(trials: int = 49, limit: int = 27) -> RecordedJob:
    """One band of Tune's HyperBand: brackets of 27, 12, 6 and 4 trials where there are 49."""
    deepest = round(math.log(limit, ETA))
    made: list[RecordedTrial] = []
    groups: dict[str, bool] = {}
    for halvings in range(deepest, -1, -1):
        count = min(math.ceil((deepest + 1) / (halvings + 1) * ETA**halvings), trials - len(made))
        stages: list[list[Stage]] = [[] for _ in range(count)]
        left, end = count, 0
        for rung in range(halvings + 1):
            begin, end = end, limit // ETA ** (halvings - rung)
            group = f"bracket{halvings}/rung{rung}"
            groups[group] = True
            for own in stages[:left]:
                own.append(Stage(group, end - begin, float(end - begin)))
            left = math.ceil(left / ETA)
        made += [RecordedTrial(f"{halvings}/{number}", tuple(own)) for number, own in enumerate(stages)]
    return RecordedJob(tuple(made), DEFAULT, groups, costs=TWO_CORES)


def perturbed(trials: int = 27, iterations: int = 27) -> RecordedJob:
    """Synchronous PBT with a perturbation every third of the budget."""
    stages = tuple(Stage(f"interval{k}", iterations // 3, float(iterations // 3)) for k in range(3))
    made = tuple(RecordedTrial(f"trial{number}", stages) for number in range(trials))
    return RecordedJob(made, DEFAULT, {stage.group: True for stage in stages}, costs=TWO_CORES)


def distance(job: RecordedJob, devices: int) -> dict[str, float]:
    seconds = Twin(job, devices).run()
    return {"seconds": seconds, "bound_ratio": seconds / least_makespan(job, devices).seconds}


def batch(job: RecordedJob, devices: int) -> dict[str, Any]:
    """A batch's figures, as the first paragraphs say."""
    bare = replace(job, costs=NONE)
    return {
        **distance(job, devices),
        "no_start_up": distance(bare, devices),
        "packing_known": distance(replace(bare, max_packing=PACKING), devices),
    }


def main() -> None:
    options = parser("The engine's distance to the least possible makespan, on the twin.")
    options.add_argument("--seeds", type=int, default=24, help="searches of each case (24; quick 2)")
    options.add_argument("--devices", type=int, nargs="*", default=[8, 16], help="numbers of devices (8 16)")
    args = options.parse_args()
    seeds = range(2 if args.quick else args.seeds)
    size = {"trials": 9, "iterations": 9} if args.quick else {}
    searches: dict[str, dict[int, Any]] = {}
    for name, case in CASES.items():
        for devices in args.devices:
            found = mean([run(case, seed, devices, False, **size) for seed in seeds])
            single = mean([run(case, seed, devices, True, **size) for seed in seeds])
            searches.setdefault(name, {})[devices] = {**found, "one_each": single}
            say(f"{name} on {devices}: {found}; one device for each trial: {single}")
    jobs = {
        "grid": grid(81, 9, DEFAULT, costs=TWO_CORES),
        "hyperband": hyperband(),
        "hyperband, 143 x 81": hyperband(143, 81),
        "pbt": perturbed(),
    }
    batches = {name: {devices: batch(job, devices) for devices in args.devices} for name, job in jobs.items()}
    devices = ", ".join(map(str, args.devices))
    finish(result("streams", devices, "twin", seeds=len(seeds), searches=searches, batches=batches), args.json)


if __name__ == "__main__":
    main()

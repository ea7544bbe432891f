"""Which trial should share a GPU with which: rules for partners on recorded pairs of training jobs.

``python -m benchmarks.partners --pairs FILE --json [--draws N] [--searches N] [--seed N]``. FILE is
``colocate_info.csv`` of Lucid (S-Lab, ASPLOS'23): for pairs of training jobs on one GPU of 24 GiB their speeds beside
each other, as parts of their speeds alone, and the pair's utilisation of GPU and DRAM. No Ray cluster is started.

A draw is a job, and some other jobs that are alone on a device each. A rule says whom the job joins. ``speed`` has, by
rule and number of devices, the mean speed of the two trials over all draws. A job's compute is taken from its pair
with itself: half of the pair's utilisation, which is too little where the pair fills the GPU, or ``scale`` times that.

- ``random``, ``best``: the partner by chance, and the one of the fastest recorded pair.
- ``least_busy``: `salus_share.choose_device`, as the engine uses it.
- ``fullest``: the rule that the engine had before: the fullest device by memory whose computes sum to at most 1.05.
- ``leftover``: the fullest device by compute and memory together, then the one where these two sums differ least (what
  USHER's kinds come to for two trials).
- ``least_dram``: the partner with the least utilisation of DRAM.

Then whole HyperBand searches run on the twin, ``--searches`` of them with other seeds, on `DEVICES` devices that two
trials may share. Each trial is one of the recorded jobs, drawn: beside another one it has the recorded speed. Its
memory and compute are known after its first iteration. ``searches`` has by side the mean ``seconds``; and by other
side ``ratio``, its seconds divided by those of ``least_busy``: mean, least and largest. ``by_count`` is the engine
without lanes, which joins trials without looking at their needs.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.common import finish, parser, result, say
from benchmarks.streams import hyperband
from fluidtune.engine import Engine
from fluidtune.engine import messages as m
from fluidtune.twin import RecordedJob, Twin
from salus_share import LaneTable, Need, choose_device

#: Bytes of the recorded GPUs, in MiB as in the records.
CAPACITY_MIB = 24 * 1024
#: Of the searches on the twin.
DEVICES = 8
#: Model, data set, batch size, mixed precision.
Job = tuple[str, str, str, str]


class Traits(NamedTuple):
    """Of a job: parts of the GPU's time, of DRAM's bandwidth and of memory."""

    compute: float
    dram: float
    memory: float


class Records(NamedTuple):
    """speeds: of both of a pair, in its order. traits: of each job with a recorded pair with itself."""

    speeds: dict[tuple[Job, Job], tuple[float, float]]
    traits: dict[Job, Traits]

    def mean_speed(self, job: Job, partner: Job) -> float:
        """Of the two, as a part of their speeds alone."""
        return fmean(self.speeds[job, partner])


def read(path: Path) -> Records:
    """The records of the file. Raises ValueError if it has none."""
    records = Records({}, {})
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            one, other = (tuple(row[f"{of}{i}"] for of in ("model", "dataset", "batchsize", "amp")) for i in (1, 2))
            try:
                first, second, gpu, dram, memory = (
                    float(row[of]) for of in ("speed1", "speed2", "gpu_util", "gmem_util", "gmem")
                )
            except ValueError:
                continue  # a pair that did not run
            records.speeds[one, other] = first, second  # type: ignore[index]
            records.speeds.setdefault((other, one), (second, first))  # type: ignore[arg-type]
            if one == other:
                records.traits[one] = Traits(gpu / 200, dram / 200, memory / 2 / CAPACITY_MIB)  # type: ignore[index]
    if not records.traits:
        raise ValueError(f"{path} has no pair of a job with itself; expected Lucid's colocate_info.csv")
    return records


#: Gives the partner of the job among others.
Rule = Callable[[Job, Sequence[Job]], Job]


def rules(records: Records, scale: float, draw: random.Random) -> dict[str, Rule]:
    """By name. ``scale`` is that of the computes."""
    of = {job: traits._replace(compute=min(1.0, scale * traits.compute)) for job, traits in records.traits.items()}

    def joins(choose: Callable[..., Job | None]) -> Rule:
        """The rule by which the engine chooses a device, each of the others alone on one."""

        def rule(job: Job, others: Sequence[Job]) -> Job:
            needs = {one: Need(of[one].memory, 0, of[one].compute) for one in {job, *others}}
            tables = {one: LaneTable(1) for one in others}
            for one, table in tables.items():
                table.admit("alone", needs[one].persistent, 0)
            found = choose(needs[job], {one: (tables[one], [needs[one]]) for one in others})
            return others[0] if found is None else found

        return rule

    def leftover(job: Job, others: Sequence[Job]) -> Job:
        def rank(one: Job) -> tuple[float, float, float]:
            compute, memory = of[job].compute + of[one].compute, of[job].memory + of[one].memory
            return (0.0 if compute <= 1.05 else compute), -compute - memory, abs(compute - memory)

        return min(others, key=rank)

    return {
        "random": lambda job, others: draw.choice(others),
        "best": lambda job, others: max(others, key=lambda one: records.mean_speed(job, one)),
        "least_busy": joins(choose_device),
        "fullest": joins(_fullest_first),
        "leftover": leftover,
        "least_dram": lambda job, others: min(others, key=lambda one: of[one].dram),
    }


def speeds(records: Records, devices: int, scale: float, draws: int, seed: int) -> Mapping[str, float]:
    """By rule, the mean speed of the two trials over the draws."""
    jobs = sorted(records.traits)
    found: dict[str, float] = {}
    for name in rules(records, scale, random.Random(seed)):
        draw = random.Random(seed)
        rule, got = rules(records, scale, random.Random(seed))[name], []
        for _ in range(draws):
            job = draw.choice(jobs)
            others = [one for one in draw.sample(jobs, min(devices, len(jobs))) if (job, one) in records.speeds]
            if others:
                got.append(records.mean_speed(job, rule(job, others)))
        found[name] = round(fmean(got), 4)
    return found


class PairedTwin(Twin):
    """The twin with a recorded job for each trial. ``lanes``: the engine knows what a trial needs once it has run."""

    def __init__(self, work: RecordedJob, records: Records, kinds: Mapping[str, Job], lanes: bool):
        super().__init__(work, DEVICES)
        self._records, self._kinds = records, kinds
        self.engine = Engine(lanes="PACK" if lanes else None, max_packing=2)

    def _seconds(self, run: Any) -> float:
        alone = self.job.profile.iteration((len(run.devices),), 1) * self._trials[run.trial].trial.cost
        mates = [one.trial for one in self._training[run.devices[0]] if one is not run]
        for mate in mates:
            alone /= self._records.speeds[self._kinds[run.trial], self._kinds[mate]][0]
        return alone

    def _advance(self) -> None:
        self._events = [self._measured(event) for event in self._events]
        super()._advance()

    def _measured(self, event: m.Event) -> m.Event:
        if not isinstance(event, m.Result):
            return event
        traits = self._records.traits[self._kinds[event.trial]]
        return replace(event, memory=traits.memory, ephemeral=0.0, compute=traits.compute)


def _fullest_first(need: Need, devices: Mapping[Any, tuple[LaneTable, Sequence[Need]]]) -> Any:
    """`salus_share.choose_device` as it was."""
    ranks = {}
    for device, (table, residents) in devices.items():
        lane = table.find(need.persistent, need.ephemeral)
        if lane is not None:
            both = max(1.0, sum(one.compute or 1.0 for one in [*residents, need]))
            ranks[device] = (lane in table.lanes, 0.0 if both <= 1.05 else both, -table.reserved)
    return min(ranks, key=ranks.__getitem__) if ranks else None


def searches(records: Records, count: int) -> dict[str, Any]:
    """Of the sides: mean seconds of the searches, and the ratios to ``least_busy``."""
    jobs = sorted(records.traits)
    known: list[Job] = []  # each of its pairs is recorded
    for job in jobs:
        if all((job, other) in records.speeds for other in known):
            known.append(job)
    found: dict[str, list[float]] = {"least_busy": [], "fullest": [], "by_count": []}
    for seed in range(count):
        draw = random.Random(seed)
        work = hyperband()
        kinds = {trial.trial: draw.choice(known) for trial in work.trials}
        found["least_busy"].append(_search(work, records, kinds, lanes=True))
        found["by_count"].append(_search(work, records, kinds, lanes=False))
        with patch("fluidtune.engine.sharing.choose_device", _fullest_first):
            found["fullest"].append(_search(work, records, kinds, lanes=True))
    ours = found["least_busy"]
    ratios = {side: [other / own for other, own in zip(took, ours, strict=True)] for side, took in found.items()}
    kept = {"mean": fmean, "least": min, "most": max}
    return {
        side: {
            "seconds": round(fmean(took), 2),
            "ratio": {name: round(of(ratios[side]), 4) for name, of in kept.items()},
        }
        for side, took in found.items()
    }


def _search(work: RecordedJob, records: Records, kinds: Mapping[str, Job], lanes: bool) -> float:
    return PairedTwin(work, records, kinds, lanes).run()


def run_all(path: Path, draws: int, count: int, seed: int) -> dict[str, Any]:
    """The benchmark's JSON object."""
    records = read(path)
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for scale in (1.0, 1.5, 2.0):
        for devices in (2, 4, 8, 16):
            row = speeds(records, devices, scale, draws, seed)
            found.setdefault(f"{scale:g}", {})[str(devices)] = row
            say(f"scale {scale:g}, {devices} devices: {row}")
    on_twin = searches(records, count)
    say(f"searches: {on_twin}")
    counts = {"jobs": len(records.traits), "pairs": len(records.speeds)}
    return result("partners", "recorded", "recorded", speed=found, searches=on_twin, draws=draws, seed=seed, **counts)


def main() -> None:
    """The command."""
    options = parser("Rules for partners on one GPU, on recorded pairs of training jobs.")
    options.add_argument("--pairs", type=Path, required=True, help="Lucid's colocate_info.csv")
    options.add_argument("--draws", type=int, default=4000, help="draws of each row (4000)")
    options.add_argument("--searches", type=int, default=30, help="HyperBand searches on the twin (30)")
    options.add_argument("--seed", type=int, default=1, help="seed of the draws (1)")
    given = options.parse_args()
    draws, searches = (200, 1) if given.quick else (given.draws, given.searches)
    finish(run_all(given.pairs, draws, searches, given.seed), given.json)


if __name__ == "__main__":
    main()

"""`benchmarks.placement.gpu_shares` against ParvaGPU's own answers to its six scenarios on A100 GPUs divided by MIG.

``python -m benchmarks.duel_parvagpu --data DIR --json``. DIR has ParvaGPU's files (MunQ-Lee/ParvaGPU_SC24): for each of
11 models what was measured in instances of each size, the rates and SLOs of the scenarios, and its own placements.
ParvaGPU's rule for latency is stricter than ours (below .9 of half the SLO), so the SLO here is .9 of the scenario's.

``scenarios`` has for each: ``gpus`` and ``gpcs`` here, of ``parvagpu`` those of its answer; ``least_gpus``, the bound
that the plan says; ``knapsack``, the bound of each model by itself; and ``cpu_seconds`` of the processor's time for
the plan. Both answers are checked here by ParvaGPU's rules against its data; ``valid`` says that
capacities, latencies and our slots keep them. ``collisions``: GPUs of its answer on which two instances have the same
slot as they are written there; by their sizes, the instances of each of these GPUs have room on one.
"""

from __future__ import annotations

import csv
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import finish, parser, result, say
from benchmarks.placement.gpu_shares import MIG, Segment, SharedModel, plan_shares

#: Batches end within this part of half the SLO. Source: ParvaGPU's code.
MARGIN = 0.9
#: Size in GPCs -> slices of memory, and the slots at which an instance may begin. Source: NVIDIA's MIG user guide.
PLACES = {7: (8, {0}), 4: (4, {0}), 3: (4, {0, 4}), 2: (2, {0, 2, 4}), 1: (1, set(range(7)))}


class Instance(NamedTuple):
    """On ``gpu`` from ``slot`` on: ``processes`` of a model."""

    gpu: str
    slot: int
    model: str
    size: int
    batch: int
    processes: int


class Scenario(NamedTuple):
    """rates: requests per second; slos: seconds; by model."""

    rates: dict[str, int]
    slos: dict[str, float]


#: Model -> size, batch, processes -> requests per second of all processes, and seconds.
Measured = dict[str, dict[tuple[int, int, int], tuple[float, float]]]


def read(data: Path) -> tuple[Measured, list[Scenario]]:
    """What was measured, and the scenarios. A row without throughput did not run, and is left out."""
    measured: Measured = {}
    for path in sorted(data.glob("[a-z]*.csv")):
        rows = csv.reader(path.read_text().splitlines()[1:])
        of = {tuple(map(int, row[:3])): (float(row[3]) * int(row[2]), float(row[4])) for row in rows if float(row[3])}
        measured[path.stem] = of  # type: ignore[assignment]
    lines = (csv.reader((data / f"SLO_{name}.csv").read_text().splitlines()) for name in ("req_rate", "latency"))
    scenarios = []
    for rates, slos in zip(*lines, strict=True):
        asked = [(model, rate, slo) for model, rate, slo in zip(measured, rates, slos, strict=True) if rate != "N/A"]
        its_slos = {model: int(float(slo)) / 1000 for model, _, slo in asked}
        scenarios.append(Scenario({model: int(rate) for model, rate, _ in asked}, its_slos))
    return measured, scenarios


def faults(measured: Measured, scenario: Scenario, answer: Iterable[Instance]) -> list[str]:
    """What is wrong with the segments of an answer, by ParvaGPU's rules."""
    found: list[str] = []
    capacity: dict[str, float] = defaultdict(float)
    for one in answer:
        throughput, latency = measured[one.model][one.size, one.batch, one.processes]
        capacity[one.model] += throughput
        if not latency < MARGIN * scenario.slos[one.model] / 2:
            found.append(f"{one}: a batch takes {latency} s")
    short = [model for model, rate in scenario.rates.items() if capacity[model] < rate]
    return found + [f"{model}: {capacity[model]} of {scenario.rates[model]} requests/s" for model in short]


def collisions(answer: Iterable[Instance]) -> list[str]:
    """The GPUs of which a slot is used twice, or where an instance begins at a slot that MIG does not allow."""
    slots: dict[str, list[int]] = defaultdict(list)
    found = set()
    for one in answer:
        length, starts = PLACES[one.size]
        slots[one.gpu] += range(one.slot, one.slot + length)
        found |= set() if one.slot in starts else {one.gpu}
    return sorted(found | {gpu for gpu, used in slots.items() if len(used) != len(set(used)) or max(used) > 7})


def knapsack(measured: Measured, scenario: Scenario) -> int:
    """GPUs by the fewest GPCs of each model by itself."""
    total = 0
    for model, rate in scenario.rates.items():
        best: dict[int, float] = defaultdict(float)
        for (size, _, _), (throughput, latency) in measured[model].items():
            if latency < MARGIN * scenario.slos[model] / 2:
                best[size] = max(best[size], throughput)
        most = [0.0]  # requests/s by GPCs
        while most[-1] < rate:
            spent = len(most)
            most.append(max([most[-1], *(most[spent - size] + best[size] for size in best if size <= spent)]))
        total += len(most) - 1
    return math.ceil(total / 7)


def its_answer(path: Path) -> list[Instance]:
    """ParvaGPU's own."""
    with path.open(newline="") as file:
        return [
            Instance(f"{row['Num instance']}/{row['Num GPU']}", int(row["Placement"]), row["Model"],
                     *(int(row[key]) for key in ("Instance size", "Batch size", "Num proc")))
            for row in csv.DictReader(file)
        ]  # fmt: skip


def models_of(measured: Measured, scenario: Scenario) -> list[SharedModel]:
    """The scenario's models, with what was measured of each in instances of MIG."""
    return [
        SharedModel(
            model,
            rate,
            MARGIN * scenario.slos[model],
            tuple(
                Segment(size, batch, processes, throughput / processes, latency)
                for (size, batch, processes), (throughput, latency) in measured[model].items()
            ),
        )
        for model, rate in scenario.rates.items()
    ]


def run_all(data: Path, count: int) -> dict[str, Any]:
    """The benchmark's JSON object."""
    measured, scenarios = read(data)
    found = []
    for number, scenario in enumerate(scenarios[:count], start=1):
        models, started = models_of(measured, scenario), time.process_time()
        plan = plan_shares(models, MIG, None, math.inf, 1.0, 60.0)
        cpu = time.process_time() - started
        ours = [
            Instance(str(at), one.slot, models[one.model].name, *one.segment[:3])
            for at, gpu in enumerate(plan.gpus)
            for one in gpu
        ]
        theirs = its_answer(data / f"SLO{number}_ParvaGPU_deploy.csv")
        wrong = faults(measured, scenario, ours) + collisions(ours) + faults(measured, scenario, theirs)
        row = {name: {"gpus": len({one.gpu for one in answer}), "gpcs": sum(one.size for one in answer)}
               for name, answer in (("ours", ours), ("parvagpu", theirs))}  # fmt: skip
        row["parvagpu"]["collisions"] = len(collisions(theirs))
        found.append(
            row["ours"]
            | {"parvagpu": row["parvagpu"], "least_gpus": plan.bound, "knapsack": knapsack(measured, scenario)}
            | {"ended": plan.ended, "cpu_seconds": round(cpu, 3), "valid": not wrong, "faults": wrong}
        )
        say(f"scenario {number}: {found[-1]}")
    total = {"ours": sum(one["gpus"] for one in found), "parvagpu": sum(one["parvagpu"]["gpus"] for one in found)}
    return result("duel_parvagpu", "recorded", "recorded", scenarios=found, gpus=total)


def main() -> None:
    """The command."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--data", type=Path, required=True, help="the folder of ParvaGPU's files")
    given = options.parse_args()
    finish(run_all(given.data, 2 if given.quick else 6), given.json)


if __name__ == "__main__":
    main()

"""What ``make demo`` shows: one real tuning job under stock Ray Tune and under FluidTune, side by side.

``python -m benchmarks.demo --out DIR``. The job is examples/digits_elastic.py: a HyperBand search over a convolutional
network on scikit-learn's digits. Both runs have the same configurations and use all cores of the machine, at most four.
Each run is a whole process, and its time includes start-up.

Written to DIR: timeline.png (trials over devices under FluidTune), utilisation.png (both runs), and the results of
both runs. A run that takes longer than ``--limit`` is ended; if it is stock's, the pictures are of ours alone.
Utilisation here is the part of the devices' time inside an iteration of some trial. Nobody outside stock Ray
Tune can see when it gives a core to a trial, but its results say, to the second, when iterations ran. So in both runs
the time in which a trial is brought to its device counts as idle.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, run_process
from benchmarks.side_limit import SideLimit
from benchmarks.sides import under_fluidtune
from benchmarks.stock_events import beside_png, events_from_tune_results
from fluidtune.report import EVENT_LOG_NAME, read_events, summarise, write_report
from fluidtune.report.fold import fold_of

SCRIPT = ROOT / "examples" / "digits_elastic.py"
NAME = SCRIPT.stem
METRIC = "accuracy"


def results(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Trial -> its results as Tune keeps them in a run's directory, in the order in which they came."""
    return {
        file.parent.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(run.glob("*/result.json"))
    }


def stock_iterations(run: Path) -> list[dict[str, Any]]:
    """When each iteration of a run under stock Ray Tune began and ended, from Tune's results.

    Tune keeps the times of results as whole seconds. An iteration that would begin before the trial's previous one has
    ended, or less than a second after, is placed directly after it.
    """
    found = []
    for trial, rows in results(run).items():
        over = 0.0
        for row in rows:
            seconds = row["time_this_iter_s"]
            start = row["timestamp"] - seconds
            if start < over + 1:
                start = over
            over = start + seconds
            found.append({"trial": trial, "start": start, "end": over})
    return found


def fluid_iterations(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """When each iteration of a run under FluidTune began and ended, and on which devices."""
    found = []
    held: dict[str, list[int]] = {}
    for event in events:
        if event["event"] in ("trial_started", "resized"):
            held[event["trial"]] = event["devices"]
        elif event["event"] == "trial_result":
            devices, share = held[event["trial"]], min(1.0, event.get("width") or 1.0)
            # Several iterations in one line are drawn as one of their length.
            seconds = event["seconds"] * event.get("iterations", 1)
            start = event.get("began", event["t"] - seconds)
            record = {"trial": event["trial"], "start": start, "end": start + seconds, "device": devices}
            found.append({**record, "share": share} if share < 1 else record)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="One tuning job under stock Ray Tune and under FluidTune.")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where the pictures and results go")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end a run after so long")
    args = parser.parse_args()
    out = args.out.resolve()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    console = Console()
    cores = max(1, min(4, os.cpu_count() or 1))
    devices = f"cpu:{cores}"
    # Ray takes the number of cores from here, so that both runs have the same number of cores.
    os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": cores})
    seconds, best = {}, {}
    commands = {
        "stock Ray Tune": [sys.executable, str(SCRIPT)],
        "FluidTune": under_fluidtune(devices, str(SCRIPT)),
    }
    runs = {name: out / name.split()[0].lower() for name in commands}
    limit = SideLimit(args.limit)
    for name, command in commands.items():
        console.rule(f"{SCRIPT.name} under {name}, {cores} cores")
        storage = ["--storage", str(runs[name])]
        ran = limit.run(name, lambda most, of=[*command, *storage]: run_process(of, most, show=True))
        if ran is None:
            continue
        seconds[name] = ran.seconds
        trials = results(runs[name] / NAME)
        best[name] = max(row[METRIC] for rows in trials.values() for row in rows)
        console.print(f"{name}: {len(trials)} trials in {seconds[name]:.1f} s, best accuracy {best[name]:.4f}")
    limit.require("FluidTune")

    ours, stock = runs["FluidTune"] / NAME, runs["stock Ray Tune"] / NAME
    shutil.copy(ours / EVENT_LOG_NAME, out)
    fold = fold_of(out)
    pictures = write_report(fold, summarise(fold), out)
    _, utilisation = pictures
    records = {"FluidTune": fluid_iterations(read_events(ours / EVENT_LOG_NAME))}
    if "stock Ray Tune" in seconds:
        records["stock Ray Tune"] = stock_iterations(stock)
    in_iterations = [
        events_from_tune_results(of, devices=cores, run="time in iterations", kind="cpu") for of in records.values()
    ]
    beside_png(in_iterations[0], next(iter(in_iterations[1:]), None), utilisation)

    table = Table(title=f"HyperBand on handwritten digits, {cores} cores")
    for column in ("", "seconds, start-up included", "best accuracy"):
        table.add_column(column, justify="right" if column else "left")
    for name in seconds:
        table.add_row(name, f"{seconds[name]:.1f}", f"{best[name]:.4f}")
    console.print(table)
    console.print(f"best digits accuracy: {best['FluidTune']:.4f}")
    if "stock Ray Tune" in seconds:
        console.print(f"speed-up over stock Ray Tune: {seconds['stock Ray Tune'] / seconds['FluidTune']:.2f}x")
    for picture in pictures:
        console.print(f"picture: {picture}", soft_wrap=True)


if __name__ == "__main__":
    main()

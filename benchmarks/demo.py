"""What ``make demo`` shows: one real tuning job under stock Ray Tune and under FluidTune, and how they differ.

``python -m benchmarks.demo --out DIR``. The job is examples/digits_elastic.py, a HyperBand search over a
convolutional network on scikit-learn's digits, with the same configurations both times, on all cores of the machine
up to four. Each run is a whole process, and its time includes start-up. Written to DIR: timeline.png (trials over
devices under FluidTune), utilisation.png (how much of the devices trials held, stock Ray Tune beside it; of stock
only the time inside iterations is known, so that the seconds in which it starts a process for a trial count as
idle), and both runs' results.
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
from benchmarks.sides import under_fluidtune
from fluidtune.report import events_from_tune_results, read_events, utilisation_png, write_report

SCRIPT = ROOT / "examples" / "digits_elastic.py"
NAME = SCRIPT.stem
METRIC = "accuracy"
#: Seconds between two iterations of a trial from which on it has been off its device.
GAP = 1.0


def results(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Each trial's results as Tune keeps them in a run's directory, in the order in which they came."""
    return {
        file.parent.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(run.glob("*/result.json"))
    }


def spells(trial: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """When a trial was running: one record for each spell without a gap between its iterations."""
    found: list[dict[str, Any]] = []
    for row in rows:
        start = row["timestamp"] - row["time_this_iter_s"]
        if found and start - found[-1]["end"] < GAP:
            found[-1]["end"] = row["timestamp"]
        else:
            found.append({"trial": trial, "start": start, "end": row["timestamp"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="One tuning job under stock Ray Tune and under FluidTune.")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where the pictures and results go")
    out = parser.parse_args().out.resolve()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    console = Console()
    cores = max(1, min(4, os.cpu_count() or 1))
    devices = f"cpu:{cores}"
    # Ray takes the number of cores from here, so that both runs have the same, whatever the machine has.
    os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": cores})
    seconds, best = {}, {}
    commands = {
        "stock Ray Tune": [sys.executable, str(SCRIPT)],
        "FluidTune": under_fluidtune(devices, str(SCRIPT)),
    }
    runs = {name: out / name.split()[0].lower() for name in commands}
    for name, command in commands.items():
        console.rule(f"{SCRIPT.name} under {name}, {cores} cores")
        seconds[name] = run_process([*command, "--storage", str(runs[name])], show=True)
        trials = results(runs[name] / NAME)
        best[name] = max(row[METRIC] for rows in trials.values() for row in rows)
        console.print(f"{name}: {len(trials)} trials in {seconds[name]:.1f} s, best accuracy {best[name]:.4f}")

    ours, stock = runs["FluidTune"] / NAME, runs["stock Ray Tune"] / NAME
    stock_events = events_from_tune_results(
        [record for trial, rows in results(stock).items() for record in spells(trial, rows)],
        devices=cores,
        run="stock Ray Tune, time in iterations",
        kind="cpu",
    )
    written = write_report(ours, out)
    utilisation_png(read_events(ours / "fluid_events.jsonl"), written.utilisation, stock_events)

    table = Table(title=f"HyperBand on handwritten digits, {cores} cores")
    for column in ("", "seconds, start-up included", "best accuracy"):
        table.add_column(column, justify="right" if column else "left")
    for name in commands:
        table.add_row(name, f"{seconds[name]:.1f}", f"{best[name]:.4f}")
    console.print(table)
    console.print(f"best digits accuracy: {best['FluidTune']:.4f}")
    console.print(f"speed-up over stock Ray Tune: {seconds['stock Ray Tune'] / seconds['FluidTune']:.2f}x")
    for picture in (written.timeline, written.utilisation):
        console.print(f"picture: {picture}", soft_wrap=True)


if __name__ == "__main__":
    main()

"""What a guide's run has left in its directories, and what differs between two runs of it.

`read` finds each experiment of Tune below a directory. `differences` compares what must be the same:

- the exit status of the script, the experiments, and the names of their trials without what is random in them;
- by trial its status, its error's last line, the values of all its reports to a millionth, and the names of its files
  with the numbers in them left out.

A scheduler stops a trial by what others have reported until then, and a search algorithm chooses by it. Trials of both
sides take turns as the machine lets them, so less is compared there: with a scheduler the reports that both sides
have with the same configuration, with a search algorithm only what is reported and not its values. Nor are values
compared where the script keeps actors (``reuse_actors=True``): a trial may go on with what the one before has left.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.frameworks.runs import same

#: The status of a run that took too long, as that of the command ``timeout``.
NOT_ENDED = 124
#: Keys of a report that Tune adds, and that differ from run to run or are looked at elsewhere. "done" depends on it
#: whether the trial ended before or after its last report was taken, "training_iteration" on whose checkpoint PBT
#: gives.
VOLATILE = {"timestamp", "date", "pid", "hostname", "node_ip", "trial_id", "experiment_tag", "config", "done"}
VOLATILE |= {"time_this_iter_s", "time_total_s", "time_since_restore", "iterations_since_restore"}
VOLATILE |= {"checkpoint_dir_name", "training_iteration"}
#: The number of a trial in its directory's name, such as ``train_1a2b3_00007_7_lr=0.1_2026-01-01_00-00-00``. With a
#: search algorithm it is ``train_1a2b3c4d_8_lr=0.1_2026-01-01_00-00-00``.
_NUMBER = re.compile(r"_(?:[0-9a-f]{5}|[0-9a-f]{8})_(\d+)(?:_|$)")
_DATE = re.compile(r"_\d{4}-\d\d-\d\d_.*$")

#: What a run has found: ``status``, ``error``, ``scheduler``, ``searcher``, whether it keeps actors (``kept``), and
#: ``experiments``, by name their trials by number.
Outcome = dict[str, Any]


def read(directory: Path, status: int, output: str, notes: Path) -> Outcome:
    """The outcome of a run. ``notes``: the file of guide_hook; ``output``: what the run printed."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    # FluidTune makes configurations of its own from the script's, which came first.
    scheduler, searcher, kept = lines[0] if lines else (None, None, False)
    states = sorted(directory.rglob("experiment_state-*.json"))
    return {
        "status": status,
        "error": _error(output) if status else None,
        "scheduler": scheduler if scheduler != "FIFOScheduler" else None,
        "searcher": searcher if searcher != "BasicVariantGenerator" else None,
        "kept": kept,
        "experiments": {_DATE.sub("", state.parent.name): _trials(state) for state in states},
    }


def _error(text: str) -> str | None:
    """The last line that names an error."""
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*[\w.]*(Error|Exception|Interrupt)\b", line)]
    return lines[-1][:300] if lines else None


def _trials(state: Path) -> dict[str, Any]:
    """By number the trials of an experiment, whose newest state file this is."""
    trials = [json.loads(each[0]) for each in json.loads(state.read_text())["trial_data"]]
    statuses = {trial["trial_id"]: trial["status"] for trial in trials}
    found = {}
    for directory in sorted(each.parent for each in state.parent.glob("*/params.json")):
        number = _NUMBER.search(directory.name)
        error = directory / "error.txt"
        results = directory / "result.json"
        reports = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        found[number[1] if number else directory.name] = {
            "config": json.loads((directory / "params.json").read_text()),
            "status": next((status for trial, status in statuses.items() if trial in directory.name), None),
            "error": _error(error.read_text()) if error.exists() else None,
            "reports": [{k: v for k, v in each.items() if k not in VOLATILE} for each in reports],
            "configs": [each.get("config") for each in reports],
            "processes": sorted({each["pid"] for each in reports if "pid" in each}),
            "files": Counter(
                re.sub(r"\d+", "N", str(each.relative_to(directory))) for each in directory.rglob("*") if each.is_file()
            ),
        }
    return found


def differences(ours: Outcome, stock: Outcome) -> list[str]:
    """What differs, one line each. Of a side that did not end nothing can be said."""
    if NOT_ENDED in (ours["status"], stock["status"]):
        return [f"not compared: status {ours['status']} (stock: {stock['status']})"]
    found = [
        f"{key}: {ours[key]} (stock: {stock[key]})" for key in ("status", "error") if not same(ours[key], stock[key])
    ]
    if ours["experiments"].keys() != stock["experiments"].keys():
        return [*found, f"experiments: {sorted(ours['experiments'])} (stock: {sorted(stock['experiments'])})"]
    for name, trials in stock["experiments"].items():
        mine = ours["experiments"][name]
        if mine.keys() != trials.keys():
            found.append(f"{name}: trials {sorted(mine)} (stock: {sorted(trials)})")
        for number in sorted(mine.keys() & trials.keys()):
            decides = (stock["scheduler"] is not None, stock["searcher"] is not None, stock["kept"])
            found += [f"{name} {number}: {each}" for each in _trial(mine[number], trials[number], *decides)]
    return found


def _trial(mine: Mapping[str, Any], stock: Mapping[str, Any], stopped: bool, chosen: bool, kept: bool) -> Iterator[str]:
    """What differs of a trial.

    ``stopped``: a scheduler decides when it ends; ``chosen``: a searcher what it gets; ``kept``: actors are kept.
    """
    for key in ("status", "error"):
        if mine[key] != stock[key]:
            yield f"{key} {mine[key]} (stock: {stock[key]})"
    if not chosen and not stopped and not same(mine["config"], stock["config"]):
        yield f"config {mine['config']} (stock: {stock['config']})"
    names = [sorted({name for report in each["reports"] for name in report}) for each in (mine, stock)]
    if names[0] != names[1]:
        yield f"reports {names[0]} (stock: {names[1]})"
    lengths = [len(each["reports"]) for each in (mine, stock)]
    if not chosen and not stopped and lengths[0] != lengths[1]:
        yield f"reports {lengths[0]} times (stock: {lengths[1]})"
    if not chosen and not kept:
        yield from _values(mine, stock)
    # A trial that goes on elsewhere may have other numbers of files, but none of another kind.
    files = [each["files"] if not stopped and not chosen else set(each["files"]) for each in (mine, stock)]
    if files[0] != files[1]:
        only = [sorted(Counter(one) - Counter(other)) for one, other in (files, files[::-1])]
        yield f"files that only one side has: {only[0]} (stock: {only[1]})"


def _values(mine: Mapping[str, Any], stock: Mapping[str, Any]) -> Iterator[str]:
    """The first of the reports that both have made with one configuration, and in which they differ."""
    first = mine["configs"][:1]
    pairs = zip(mine["reports"], stock["reports"], mine["configs"], stock["configs"], strict=False)
    for number, (one, other, *configs) in enumerate(pairs, 1):
        if not all(same(config, first[0]) for config in configs):
            return
        if not same(one, other):
            keys = sorted(key for key in {*one, *other} if not same(one.get(key), other.get(key)))
            values = [{key: each.get(key) for key in keys} for each in (one, other)]
            yield f"report {number} {values[0]} (stock: {values[1]})"
            return

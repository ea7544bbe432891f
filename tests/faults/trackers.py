"""Count the records that trackers have kept when trials end without closing them, under stock and under FluidTune.

    python -m tests.faults.trackers --trials 20

It needs ``pip install tensorboard wandb``, and no account: W&B's runs are offline. Each kind is run twice, each time in
a process with a Ray cluster of its own: under stock Ray Tune, and under FluidTune with warm workers. It prints one JSON
object: by kind and side the trials whose records are complete, the records, and the processes that ran the trials. Exit
status 0: under FluidTune no kind has fewer complete trials than under stock.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune import RunConfig

import fluidtune
from benchmarks.common import finish, result, run_process, say

#: Values that a trial records. Not a multiple of 10, after which a TensorBoard writer writes by itself.
RECORDS = 37
#: Reports of a trial to Tune.
REPORTS = 3


def tensorboard(config: dict[str, Any]) -> None:
    """Its writer is left open, as in many scripts; ``keep`` holds it as a global does."""
    from torch.utils.tensorboard import SummaryWriter

    global keep
    keep = writer = SummaryWriter(os.path.join(config["folder"], f"trial{config['x']}"))
    for step in range(RECORDS):
        writer.add_scalar("loss", 1.0 / (step + 1), step)
    for step in range(REPORTS):
        tune.report({"loss": 1.0 / (step + 1), "pid": os.getpid()})


def wandb(config: dict[str, Any]) -> None:
    """W&B's own guide, without ``finish()``."""
    import wandb

    run = wandb.init(project="trackers", name=f"trial{config['x']}", dir=config["folder"], config=config)
    for step in range(RECORDS):
        run.log({"loss": 1.0 / (step + 1)})
    for step in range(REPORTS):
        tune.report({"loss": 1.0 / (step + 1), "pid": os.getpid()})


def wandb_function(config: dict[str, Any]) -> None:
    """The same by ``wandb.log``, with ``finish()`` at the end."""
    import wandb

    wandb.init(project="trackers", name=f"trial{config['x']}", dir=config["folder"], config=config)
    for step in range(RECORDS):
        wandb.log({"loss": 1.0 / (step + 1)})
    for step in range(REPORTS):
        tune.report({"loss": 1.0 / (step + 1), "pid": os.getpid()})
    wandb.finish()


def setup_wandb(config: dict[str, Any]) -> None:
    """Ray's guide: ``setup_wandb``, which takes the names from the trial."""
    from ray.air.integrations.wandb import setup_wandb

    run = setup_wandb(config, project="trackers", dir=config["folder"])
    for step in range(RECORDS):
        run.log({"loss": 1.0 / (step + 1)})
    for step in range(REPORTS):
        tune.report({"loss": 1.0 / (step + 1), "pid": os.getpid()})


def callback(config: dict[str, Any]) -> None:
    """Ray's guide: ``WandbLoggerCallback`` records what is reported."""
    for step in range(RECORDS):
        tune.report({"loss": 1.0 / (step + 1), "pid": os.getpid()})


KINDS = {each.__name__: each for each in (tensorboard, wandb, wandb_function, setup_wandb, callback)}


def run_trials(kind: str, side: str, trials: int, folder: Path) -> None:
    """One side, in this process; leaves the trackers' files and ``processes`` in the folder."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    callbacks = []
    if kind == "callback":
        from ray.air.integrations.wandb import WandbLoggerCallback

        callbacks = [WandbLoggerCallback(project="trackers", dir=str(folder))]
    space = {"x": tune.grid_search(list(range(trials))), "folder": str(folder)}
    run = RunConfig(name="trackers", storage_path=str(folder / "tune"), verbose=0, callbacks=callbacks)
    tuner = (tune.Tuner if side == "stock" else fluidtune.Tuner)(KINDS[kind], param_space=space, run_config=run)
    results = tuner.fit()
    if results.errors:
        raise RuntimeError(f"{kind}, {side}: {results.errors[0]}")
    (folder / "processes").write_text(str(len({each.metrics["pid"] for each in results})))
    ray.shutdown()


def runs_of_tensorboard(folder: Path) -> list[int]:
    """The scalars in each trial's files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for trial in sorted(folder.glob("trial*")):
        events = (event for path in trial.iterdir() for event in EventFileLoader(str(path)).Load())
        found.append(sum(len(event.summary.value) for event in events))
    return found


def blocks(path: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: LevelDB's log format after a header of 7 bytes (wandb's ``datastore.py``)."""
    data, place, parts = path.read_bytes(), 7, []
    while place + 7 <= len(data):
        rest = 32768 - place % 32768
        if rest < 7:  # what is left of a block is filled up
            place += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if not 1 <= kind <= 4 or place + 7 + length > len(data):
            return
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def runs_of_wandb(folder: Path) -> list[int]:
    """The history records of each run; 0 where the record of the run's exit is missing."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("**/*.wandb")):
        kinds = []
        for block in blocks(path):
            record = Record()
            record.ParseFromString(block)
            kinds.append(record.WhichOneof("record_type"))
        found.append(kinds.count("history") if "exit" in kinds else 0)
    return found


def counted(kind: str, side: str, trials: int) -> dict[str, int]:
    """The figures of one kind on one side."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.faults.trackers", "--kinds", kind, "--side", side, "--folder", folder]
        run_process([*command, "--trials", str(trials)])
        runs = (runs_of_tensorboard if kind == "tensorboard" else runs_of_wandb)(Path(folder))
        processes = int(Path(folder, "processes").read_text())
    # W&B may keep a history record of its own at the end of a run.
    complete = sum(count >= RECORDS for count in runs)
    figures = {"complete": complete, "records": sum(runs), "runs": len(runs), "processes": processes}
    say(f"{kind}, {side}: {json.dumps(figures)}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--side", choices=("stock", "fluid"), help="run this side here (used by the command itself)")
    parser.add_argument("--folder", type=Path, help="where it leaves its files")
    options = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    if options.side:
        run_trials(options.kinds[0], options.side, options.trials, options.folder)
        return
    found = {kind: {side: counted(kind, side, options.trials) for side in ("stock", "fluid")} for kind in options.kinds}
    finish(result("trackers", "cpu:2", "real", trials=options.trials, records=RECORDS, kinds=found), True)
    lost = [kind for kind, sides in found.items() if sides["fluid"]["complete"] < sides["stock"]["complete"]]
    sys.exit(f"fewer complete records than under stock: {', '.join(lost)}" if lost else 0)


if __name__ == "__main__":
    main()

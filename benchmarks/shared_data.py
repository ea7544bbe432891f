"""Memory of a node whose trials use one large data set: `fluidtune.shared` beside stock Ray Tune.

``python -m benchmarks.shared_data --json [--gib X] [--trials N]``. Trials on two cores each sum up an array of random
numbers. `fluid` gets it by `fluidtune.shared` under FluidTune; `stock_reuse` keeps its actors, and each trial loads it;
`stock_parameters` gets it by ``tune.with_parameters``. Each side is a process with its own Ray cluster.

Each side runs twice, with the data and with a small part of them, so that what the job takes without data counts in
neither. ``peak``: by how much the most memory that the job's processes had was larger with the data, divided by their
size, from the first load to the last sum; ``median`` likewise, of all samples from the first sum to the last. A page
that several processes have counts once (Pss, proc(5)), and files in memory count whole. ``loads``: how often the data
were loaded. ``ratio``: the peak of `stock_parameters` divided by ours.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.common import finish, parser, result, run_process, say

SIDES = ("fluid", "stock_reuse", "stock_parameters")
#: The small part of the data is so many times smaller.
SMALL = 64
#: Seconds between two looks at the memory. Judgement: writing 2 GB takes a second.
LOOK_S = 0.2
#: The environment variable by which processes of this benchmark are known.
MARK = "FLUIDTUNE_BENCHMARK"


def job(side: str, size: int, trials: int, place: Path) -> None:
    """One side's job, in a process of its own. It writes into ``place``: a file for each load and for each sum."""
    import numpy as np
    import ray
    from ray import tune

    import fluidtune

    def load() -> Any:
        (place / f"load-{time.time_ns()}").touch()
        return np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8)

    def train(config: dict[str, Any], data: Any = None) -> None:
        if data is None:
            data = fluidtune.shared(load) if side == "fluid" else load()
        for _ in range(3):
            total = sum(int(data[begin : begin + (1 << 24)].sum()) for begin in range(0, size, 1 << 24))
            (place / f"sum-{time.time_ns()}").touch()
            tune.report({"total": total})

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=int(1.25 * size) + (1 << 28))
    made = {"fluid": fluidtune.Tuner}.get(side, tune.Tuner)
    grid = made(
        tune.with_parameters(train, data=load()) if side == "stock_parameters" else train,
        param_space={"number": tune.grid_search(list(range(trials)))},
        tune_config=tune.TuneConfig(reuse_actors=side == "stock_reuse"),
        run_config=tune.RunConfig(storage_path=str(place / "runs"), verbose=0),
    ).fit()
    assert not grid.errors
    assert len({each.metrics["total"] for each in grid}) == 1


def in_use() -> int:
    """Bytes of memory that the side's processes have, each page once, and files in memory whole, mapped or not."""
    found, files = [], dict[int, Path]()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == os.environ[MARK]:
                found.append(Path(f"/proc/{process.pid}"))
                for each in (found[-1] / "fd").iterdir():
                    if os.readlink(each).startswith(("/memfd:", "/dev/shm/")):
                        files[each.stat().st_ino] = each
    # What is copied between these two reads counts in neither or twice. So nothing else is done between them.
    total = 0
    for each in files.values():
        with suppress(OSError):
            total += each.stat().st_blocks * 512
    for folder in found:
        with suppress(OSError):
            lines = (folder / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon", "Pss_File")))
    return total


def times(place: Path, kind: str) -> list[int]:
    """When (ns) a trial wrote down that it loads, or has summed up."""
    return [int(each.name.split("-")[1]) for each in place.glob(f"{kind}-*")]


def ran(side: str, size: int, trials: int) -> dict[str, float]:
    """One run: bytes in use above what was in use before, at the most and in the median, loads, and seconds."""
    with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as directory:
        samples: list[tuple[int, int]] = []
        over = threading.Event()
        before = in_use()

        def sample() -> None:
            while not over.wait(LOOK_S):
                samples.append((time.time_ns(), in_use() - before))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            command = [sys.executable, "-m", "benchmarks.shared_data", "--side", side, "--place", directory]
            seconds = run_process([*command, "--bytes", str(size), "--trials", str(trials)]).seconds
        finally:
            over.set()
            thread.join()
        loads, sums = (times(Path(directory), kind) for kind in ("load", "sum"))
    peak = max(used for when, used in samples if min(loads) < when < max(sums))
    middle = median(used for when, used in samples if min(sums) < when < max(sums))
    return {"peak": peak, "median": middle, "loads": len(loads), "seconds": seconds}


def measured(side: str, size: int, trials: int) -> dict[str, float]:
    """The figures of one side."""
    large, small = ran(side, size, trials), ran(side, size // SMALL, trials)
    more = {key: (large[key] - small[key]) / (size - size // SMALL) for key in ("peak", "median")}
    return {**more, "loads": large["loads"], "seconds": large["seconds"]}


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--gib", type=float, default=2.0, help="size of the data")
    made.add_argument("--trials", type=int, default=8)
    made.add_argument("--side", choices=SIDES, help="run this side's job here; used by the command itself")
    made.add_argument("--place", type=Path)
    made.add_argument("--bytes", type=int)
    options = made.parse_args()
    if options.side:
        job(options.side, options.bytes, options.trials, options.place)
        return
    os.environ[MARK] = str(os.getpid())
    size = int((0.1 if options.quick else options.gib) * 2**30)
    sides = {}
    for side in SIDES[:1] + SIDES[-1:] if options.quick else SIDES:
        sides[side] = measured(side, size, options.trials)
        say(f"{side}: {json.dumps(sides[side])}")
    shown = {"bytes": size, "trials": options.trials, "sides": sides}
    ratio = sides["stock_parameters"]["peak"] / sides["fluid"]["peak"]
    finish(result("shared_data", "cpu:2", "real", **shown, ratio=ratio), options.json)


if __name__ == "__main__":
    main()

"""Kills and notices of searches: `python -m tests.faults.search_kills --kills 100` has so many of both for each search.

A driver gets SIGKILL or SIGTERM at a seeded moment and is started again, until its search is over. Where trials run one
at a time, the order of results is fixed: what they report must be what they report in a search that nobody disturbs.
All drivers use one cluster, and are forked from one process that has imported Ray.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from fluidtune.tune.notice import AGAIN
from tests.faults.search_job import SEARCHES, done_twice, outcome, search

FORK = multiprocessing.get_context("fork")


def _cluster(other: Any, pipe: Any) -> None:
    other.close()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    pipe.send(ray.get_runtime_context().gcs_address)
    pipe.poll(None)
    ray.shutdown()


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a cluster that lives in a process of its own."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or Ray makes a token, of which a forked process does not know
    ours, its = FORK.Pipe()
    process = FORK.Process(target=_cluster, args=(ours, its))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


def _drive(name: str, storage: Path, address: str) -> None:
    out = os.open(storage / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    search(name, storage, address)


def _results(log: Path) -> int:
    return log.read_text().count('"trial_result"') if log.exists() else 0


def driven(name: str, storage: Path, address: str, moments: random.Random, wanted: Counter[str]) -> None:
    """Run a search to its end. ``wanted``: how many kills and notices are to come; those that were are taken off."""
    storage.mkdir(parents=True)
    log = storage / "job" / "fluid_events.jsonl"
    while True:
        driver = FORK.Process(target=_drive, args=(name, storage, address))
        driver.start()
        assert driver.pid is not None
        if kinds := sorted(+wanted):
            kind, until, pause = moments.choice(kinds), _results(log) + moments.randint(1, 6), moments.uniform(0.0, 0.1)
            while _results(log) < until and driver.is_alive():
                time.sleep(0.01)
            time.sleep(pause)
            if driver.is_alive():
                os.kill(driver.pid, signal.SIGKILL if kind == "kills" else signal.SIGTERM)
        driver.join(180)
        if driver.exitcode is None:
            driver.kill()
            driver.join()
            raise AssertionError(f"{storage}: the driver does not end")
        if driver.exitcode == 0:
            return
        assert kinds and driver.exitcode == (-signal.SIGKILL if kind == "kills" else AGAIN), f"{storage}/out.txt"
        wanted[kind] -= 1


def compared(name: str, kills: int, seed: int, address: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Searches with so many kills and notices in all: for each, how many it had, and what differs, if anything does."""
    moments, left, number = random.Random(f"{name} {seed}"), Counter(kills=kills, notices=kills), 0
    driven(name, folder / "whole", address, moments, Counter())
    whole = outcome(folder / "whole")
    while +left:
        before, number = Counter(left), number + 1
        storage = folder / str(number)
        driven(name, storage, address, moments, left)
        found = outcome(storage)
        differ = {each: (whole.get(each), found.get(each)) for each in sorted({*whole, *found})}
        differ = {each: pair for each, pair in differ.items() if pair[0] != pair[1]}
        yield {"search": name, **(before - left), "done_twice": done_twice(storage), "differ": differ}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="kills, and as many notices, of each search")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(SEARCHES), nargs="*", default=list(SEARCHES))
    options = parser.parse_args()
    wrong, folder = 0, Path(tempfile.mkdtemp(prefix="fluidtune-kills-"))
    with cluster() as address:
        for name in options.only:
            for line in compared(name, options.kills, options.seed, address, folder / name):
                wrong += bool(line["differ"])
                print(json.dumps(line), flush=True)
    print(json.dumps({"folder": str(folder), "wrong": wrong}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

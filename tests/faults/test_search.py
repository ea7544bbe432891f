"""The driver of a search is killed, and told to end: what is restored decides as a search that nobody disturbs.

A driver gets SIGKILL or SIGTERM at a seeded moment and is started again, until its search is over. Where trials run one
at a time, the order of results is fixed: what they report must be what they report in a search that nobody disturbs.
All drivers use one cluster, and are forked from one process that has imported Ray. `pytest tests/faults/test_search.py
--kills 100 -s` has a hundred of both for each search.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from fluidtune.report.fold import fold_of
from fluidtune.tune.notice import AGAIN
from tests.faults.search_job import SEARCHES, done_again, note_end, outcome, search

pytestmark = [pytest.mark.ray, pytest.mark.faults]

#: Its server has imported Ray and never used it. (A fork of this process hangs where tests before have.)
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.faults.search_job"])


def _cluster(other: Any, pipe: Any) -> None:
    other.close()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    pipe.send(ray.get_runtime_context().gcs_address)
    pipe.poll(None)
    ray.shutdown()


@pytest.fixture
def address(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a cluster that lives in a process of its own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or Ray makes a token, of which a forked process does not know
    ours, its = FORK.Pipe()
    process = FORK.Process(target=_cluster, args=(ours, its))
    process.start()
    yield ours.recv()
    ours.send(None)
    process.join()


def _drive(name: str, storage: Path, address: str) -> None:
    out = os.open(storage / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    search(name, storage, address)


def _results(log: Path) -> int:
    return log.read_text().count('"trial_result"') if log.exists() else 0


def driven(name: str, storage: Path, address: str, moments: random.Random, wanted: Counter[str]) -> dict[str, Any]:
    """Run a search to its end. ``wanted``: how many kills and notices are to come; those that were are taken off."""
    storage.mkdir()
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
        driver.join(600)
        if driver.exitcode is None:
            driver.kill()
            pytest.fail(f"{storage}: the driver does not end")
        if driver.exitcode == 0:
            ends = {trial.trial: trial.state for trial in fold_of(log).trials.values()}
            assert set(ends.values()) == {"stopped"}, ends
            return outcome(storage)
        assert kinds and driver.exitcode == (-signal.SIGKILL if kind == "kills" else AGAIN), f"{storage}/out.txt"
        wanted[kind] -= 1
        note_end(storage)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", SEARCHES)
def test_a_disturbed_search_decides_as_one_that_is_not(name: str, kills: int, address: str, tmp_path: Path) -> None:
    moments, left, number = random.Random(name), Counter(kills=kills, notices=kills), 0
    whole = driven(name, tmp_path / "whole", address, moments, Counter())
    while +left:
        before, number = Counter(left), number + 1
        storage = tmp_path / str(number)
        found = driven(name, storage, address, moments, left)
        again = done_again(storage)
        print(name, dict(before - left), "again:", sum(again.values(), Counter()), "as whole:", found == whole)
        assert all(times[True] <= 1 for times in again.values()), "more than the one that proves the commit"
        assert found == whole

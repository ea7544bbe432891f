"""The processes of the contract suites leave nothing running."""

from __future__ import annotations

import multiprocessing
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.contracts.processes import peer_processes, until

_kept: list[Any] = []


def open_loader() -> list[int]:
    """Start a DataLoader's worker processes, and keep them; their process ids."""
    loader = DataLoader(TensorDataset(torch.zeros(4)), num_workers=2, persistent_workers=True)
    _kept.append(iter(loader))
    return [process.pid for process in _kept[-1]._workers]


def start_method() -> str:
    return multiprocessing.get_start_method()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_peer_starts_processes_as_a_ray_worker_does():
    with peer_processes(1) as (peer,):
        assert peer.call(start_method) == "fork"


def test_what_a_peer_started_is_gone_with_it():
    with peer_processes(2) as peers:
        pids = [pid for peer in peers for pid in peer.call(open_loader)]
        peers[0].kill()  # as a test of faults does; its children are still to be ended
        assert len(pids) == 4 and not any(map(gone, pids[2:]))
    until(lambda: all(map(gone, pids)))

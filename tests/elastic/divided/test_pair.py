"""Tensors of GPUs go through a group of two processes. Here the group is gloo's, and all tensors count as a GPU's."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fluidtune.device_kinds import KINDS
from fluidtune.elastic.divided import leader, tensor_link
from tests.elastic.divided.grown import grown
from tests.elastic.divided.test_faults import STEPS, Loop, alone


class Transfer(threading.Thread):
    """Gloo's work, which is completed only where somebody waits for it."""

    def __init__(self, work: Any) -> None:
        super().__init__(daemon=True)
        self._work, self._error = work, None
        self.start()

    def run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self.is_alive()

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


class gloo:
    """The group that an entry of `KINDS` names."""

    def __init__(self, store: Any, rank: int) -> None:
        self._group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    def send(self, *args: Any) -> Transfer:
        return Transfer(self._group.send(*args))

    def recv(self, *args: Any) -> Transfer:
        return Transfer(self._group.recv(*args))

    def abort(self) -> None:
        """Its threads end with the process."""


@pytest.fixture
def all_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_link, "on_accelerator", lambda tensor: tensor.dtype.is_floating_point)
    monkeypatch.setitem(KINDS, "gpu", replace(KINDS["gpu"], group=f"{__name__}:gloo"))
    greet = leader.DataParallelLeader._greet

    def paired(self: leader.DataParallelLeader, *args: Any) -> None:
        self._device = "cuda"
        device, torch.device = torch.device, lambda name: device("cpu")  # type: ignore[assignment, misc]
        try:
            greet(self, *args)
        finally:
            torch.device = device  # type: ignore[misc]

    monkeypatch.setattr(leader.DataParallelLeader, "_greet", paired)


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_equal_to_alone(all_on_gpus: None, host: str | None) -> None:
    expected, loop = alone(True), Loop(True)
    with grown(3, host=host) as trial:
        for _ in range(STEPS):
            loop.step()
        assert trial.division.followers.divided
        assert all(peer.link.pair is not None for peer in trial.division.followers.present)
    assert loop.result() == pytest.approx(expected, rel=1e-9)


def test_a_killed_process_ends_the_transfer(all_on_gpus: None) -> None:
    expected, loop = alone(False), Loop(False)
    with grown(2) as trial:
        for step in range(STEPS):
            if step == 6:
                os.kill(trial.pids[0], signal.SIGKILL)
            loop.step()
    assert loop.result() == pytest.approx(expected, rel=1e-9)


def test_gpus_that_are_not_connected(all_on_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two processes on one GPU, which NCCL refuses in the first transfer."""

    def refuse(self: gloo, *args: Any) -> Transfer:
        raise RuntimeError("Duplicate GPU detected")

    monkeypatch.setattr(gloo, "send", refuse)
    expected, loop = alone(False), Loop(False)
    with grown(2) as trial:
        for _ in range(STEPS):
            loop.step()
        assert not trial.division.followers.present
    assert loop.result() == pytest.approx(expected, rel=1e-9)

"""Several trials in one process: threads on a CPU, and lanes with streams and pools where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from salus_share import Need, Refused
from salus_share.board import Board
from salus_share.streams import InProcessLanes
from tests.salus.processes import home


@pytest.fixture
def directory():
    with home() as made:
        yield made


def losses(job, seed: int = 3, device: str = "cpu", fail_at: int | None = None) -> list[float]:
    """A small training that draws from a generator of its own."""
    source = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 4, generator=source).to(device).requires_grad_()
    found = []
    for step in range(20):
        x = torch.randn(64, 16, generator=source).to(device)
        with job.iteration():
            if step == fail_at:
                raise MemoryError
            loss = ((x @ weight - 1) ** 2).mean()
            (gradient,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight -= 0.05 * gradient
            found.append(loss.item())
    return found


class Alone:
    """A job without a device service."""

    def iteration(self):
        return torch.enable_grad()


@pytest.mark.parametrize("ephemeral", [10, 60], ids=["own lanes", "one lane"])
def test_trials_have_the_losses_they_have_alone_and_fail_alone(directory, ephemeral) -> None:
    lanes = InProcessLanes("cpu", "device", capacity=100, policy="FAIR", directory=directory)
    need = Need(5, ephemeral)
    started = [lanes.start(f"t{seed}", lambda job, s=seed: losses(job, s), need) for seed in range(2)]
    failing = lanes.start("fails", lambda job: losses(job, 9, fail_at=7), need)
    assert [future.result(30) for future in started] == [losses(Alone(), seed) for seed in range(2)]
    with pytest.raises(MemoryError):
        failing.result(30)
    with pytest.raises(Refused):
        lanes.start("large", losses, Need(50, 51)).result(30)
    board = Board(directory)
    with board.lock():
        assert all(seat.state == 7 for seat in board.seats())


@pytest.mark.gpu
def test_lanes_on_a_gpu_reuse_their_pool(directory) -> None:
    lanes = InProcessLanes("cuda:0", "device", capacity=4 << 30, policy="FAIR", directory=directory)
    need = Need(64 << 20, 3 << 30)
    started = [lanes.start(f"t{seed}", lambda job, s=seed: losses(job, s, "cuda"), need) for seed in range(3)]
    expected = [losses(Alone(), seed, "cuda") for seed in range(3)]
    for future, alone in zip(started, expected, strict=True):
        assert future.result(60) == pytest.approx(alone, rel=1e-5)

"""What NCCL waits for without end is ended: with `nccl_standin`, as no machine of ours has two GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fluidtune.elastic import GroupLost
from fluidtune.elastic.errors import CannotDivide
from fluidtune.elastic.transport.stuck_collectives import WATCH_S
from fluidtune.elastic.transport.torch_backend import NCCL_SETTINGS
from tests.contracts.collective_backends import HERE, SECRET, ask, everyone, everyone_dissolves, form, place, together
from tests.contracts.processes import PeerProcess, peer_processes, until

from .nccl_standin import NcclStandIn

pytestmark = pytest.mark.slow

#: Issue 22: seconds within which the others go on when one is killed. A test counts looks, as a busy machine's clock
#: says nothing.
GO_ON_S = 2.0


def build(gpu: str, comes: str = "", raises: str = "", stops: bool = False) -> None:
    if "backend" in HERE:
        HERE["backend"].close()
    HERE["backend"] = NcclStandIn(gpu=gpu, making=(comes, raises, stops), secret=SECRET)


@pytest.fixture
def pool() -> Iterator[list[PeerProcess]]:
    with peer_processes(3) as started:
        for rank, worker in enumerate(started):
            worker.call(build, f"GPU-{rank}")
        yield started


def summed(computing: float = 0.0) -> list[float] | str:
    """A sum on the GPU, and a look at it. ``computing``: seconds that the GPU has to do before."""
    backend = HERE["backend"]
    tensor = torch.ones(4)
    if computing:
        backend.communicator.compute(computing)
    try:
        backend.allreduce_(tensor)
        backend.communicator.synchronize()
        seen = tensor.tolist()
        backend.barrier()
        return seen
    except GroupLost as error:
        return f"{type(error).__name__}: {error}"


def sum_and_do_not_look() -> None:
    """Start a sum, and go on to the next collective of the CPU."""
    backend = HERE["backend"]
    backend.allreduce_(torch.ones(4))
    backend.barrier()


def train() -> str:
    """A loop that ends with an error of its own if its gradients are not finite."""
    backend = HERE["backend"]

    def loop() -> None:
        gradient = torch.ones(4)
        backend.allreduce_(gradient)
        backend.communicator.synchronize()
        assert gradient.isnan().all()
        raise ValueError("diverged")

    try:
        loop()
    except (GroupLost, ValueError) as error:
        return f"{type(error).__name__}, {backend.lost is not None}"
    raise AssertionError("the loop has ended")


def leave_out_a_step() -> str:
    try:
        HERE["backend"].barrier()
    except CannotDivide as error:
        return str(error)
    raise AssertionError("the barrier has ended")


def joined(address: Any, rank: int, world: int = 2) -> str | None:
    """Become one of the workers; returns what GroupLost said."""
    try:
        HERE["backend"].form(address, 1, rank, world)
    except GroupLost as error:
        return f"{type(error).__name__}: {error}"
    return None


def meet_a_failed_kernel() -> str:
    """Sum after a kernel of the trial's own has failed, by which CUDA is lost to the process."""
    backend = HERE["backend"]
    backend.cuda_error = "CUDA error: device-side assert triggered"
    try:
        backend.allreduce_(torch.ones(4))
    except RuntimeError as error:
        backend.close()
        return f"{type(error).__name__}: {error}, lost: {backend.lost}"
    raise AssertionError("the sum has ended")


def synchronize() -> str | None:
    HERE["backend"].communicator.synchronize()
    return HERE["backend"].lost


def break_connection() -> None:
    HERE["backend"].communicator.break_connection()


def fact(name: str) -> Any:
    return getattr(HERE["backend"], name)


def doom(pid: int) -> None:
    HERE["backend"].doomed = pid


def doom_one(pool: list[PeerProcess], dying: int) -> list[PeerProcess]:
    """Have the others count their looks from this worker's death on. Returns the others."""
    left = [worker for rank, worker in enumerate(pool) if rank != dying]
    everyone(left, doom, pool[dying].process.pid)
    return left


def noticed_in_time(worker: PeerProcess, leads: bool) -> bool:
    """Whether it has looked few times, and at least once. The leader sees a death, and a follower hears of it then."""
    taken = worker.call(fact, "looks")
    return 1 <= taken <= (2 if leads else GO_ON_S / WATCH_S)


def resize(address: Any, rank: int, generations: list[int]) -> None:
    """Be in these generations, one after another. Every tenth is left while its leader's sum waits for the others."""
    backend = HERE["backend"]
    for generation in generations:
        backend.form(address, generation, rank, world_of(generation))
        stuck = generation % 10 == 0
        if not stuck or rank == 0:
            backend.allreduce_(torch.ones(4))
        backend.dissolve(orderly=not stuck)


def world_of(generation: int) -> int:
    return 2 + generation % 2


def open_things() -> tuple[int, int]:
    """Threads, those of libraries too, and file descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def more_than(before: tuple[int, int]) -> bool:
    return any(now > then for now, then in zip(open_things(), before, strict=True))


def test_sums(pool):
    form(pool, 1)
    assert everyone(pool, summed) == [[3.0] * 4] * 3
    everyone_dissolves(pool)
    assert everyone(pool, fact, "aborts") == [0, 0, 0]
    form(pool[:2], 2)
    assert everyone(pool[:2], summed) == [[2.0] * 4] * 2


@pytest.mark.parametrize("dying", [2, 0])
def test_the_others_go_on_when_one_dies_before_its_part_of_a_sum(pool, dying):
    form(pool, 1)
    left = doom_one(pool, dying)
    for worker in left:
        worker.send(summed)
    time.sleep(0.3)
    pool[dying].kill()
    for worker in left:
        said = worker.result()
        assert isinstance(said, str) and said.startswith("GroupLost"), said
        assert "has died" in said if dying else "is gone" in said
        assert noticed_in_time(worker, leads=worker is pool[0])
    assert everyone(left, fact, "aborts") == [1, 1]
    assert everyone_dissolves(left, orderly=False) == [None, None]
    assert everyone(left, place) == [(0, 1)] * 2
    form(left, 2)
    assert everyone(left, summed) == [[2.0] * 4] * 2


def test_an_error_over_what_an_aborted_sum_left_behind_is_a_lost_group(pool):
    form(pool, 1)
    doom_one(pool, 2)
    pool[0].send(train)
    time.sleep(0.3)
    pool[2].kill()
    assert pool[0].result() == "ValueError, True"
    assert noticed_in_time(pool[0], leads=True)


def test_a_worker_that_leaves_out_a_sum_is_named(pool):
    form(pool[:2], 1)
    pool[0].send(summed)
    pool[1].send(leave_out_a_step)
    said = [pool[0].result(), pool[1].result()]
    assert said[0].startswith("CannotDivide") and "left out a step" in said[0]
    assert all("the sum of gradients" in line and "the end of a group" in line for line in said)


def test_a_gpu_that_computes_for_long_is_waited_for(pool):
    form(pool[:2], 1)
    pool[0].send(summed, 3.0)
    pool[1].send(sum_and_do_not_look)
    assert pool[0].result() == [2.0] * 4
    assert pool[1].result() is None


def test_a_group_that_is_left_while_a_sum_runs_aborts_it_first(pool):
    form(pool[:2], 1)
    pool[0].call(ask, "allreduce_", torch.ones(4))
    assert everyone_dissolves(pool[:2], orderly=False) == [None, None]
    assert pool[0].call(fact, "aborts") == 1


def test_many_resizes_leave_no_thread_and_no_connection_behind(pool):
    address = pool[0].call(ask, "serve")

    def go_through(first: int, last: int) -> None:
        generations = range(first, last + 1)
        together(
            pool, lambda rank: (resize, address, rank, [each for each in generations if rank < world_of(each)]), 240
        )

    go_through(1, 30)
    time.sleep(2 * WATCH_S)  # a watching thread ends when it looks next
    before = everyone(pool, open_things)
    go_through(31, 130)
    until(lambda: not any(worker.call(more_than, then) for worker, then in zip(pool, before, strict=True)))


def test_two_workers_on_one_gpu_are_refused(pool):
    pool[1].call(build, "GPU-0")
    address = pool[0].call(ask, "serve")
    for said in together(pool[:2], lambda rank: (joined, address, rank)):
        assert "CannotDivide: workers 0 and 1 of the trial have one GPU, GPU-0" in said
    assert everyone(pool[:2], place) == [(0, 1)] * 2
    everyone(pool[:2], ask, "dissolve")
    others = [pool[0], pool[2]]
    form(others, 2)
    assert everyone(others, summed) == [[2.0] * 4] * 2


@pytest.mark.parametrize("dying", [2, 0])
def test_the_others_go_on_when_one_dies_before_its_part_of_a_communicator(pool, dying, tmp_path):
    for rank, worker in enumerate(pool):
        worker.call(build, f"GPU-{rank}", str(tmp_path / f"{rank}"), "", rank == dying)
    left = doom_one(pool, dying)
    address = pool[0].call(ask, "serve")
    for rank, worker in enumerate(pool):
        worker.send(joined, address, rank, 3)
    until(lambda: len(list(tmp_path.iterdir())) == 3)
    pool[dying].kill()
    for worker in left:
        said = worker.result()
        assert said is not None and said.startswith("GroupLost"), said
        assert "has died" in said if dying else "is gone" in said
        assert noticed_in_time(worker, leads=worker is pool[0])
    form(left, 2)
    assert everyone(left, summed) == [[2.0] * 4] * 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version 2.27.5\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
            "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            "CannotDivide: NCCL does not connect the GPUs of the trial's workers: Duplicate GPU detected : rank 1",
        ),
        (
            "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.5\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
            "CannotDivide: a worker's GPU has no memory left for NCCL: Cuda failure 2 'out of memory'",
        ),
        (
            "NCCL error in: NCCLUtils.cpp:77, unhandled system error, NCCL version 2.27.5\n"
            "ncclSystemError: System call (e.g. socket, malloc) failed\nLast error:\nsocketStartConnect failed",
            "GroupLost: forming generation 1 failed in generation 1: socketStartConnect failed",
        ),
    ],
    ids=["refused", "no memory", "network"],
)
def test_a_communicator_that_is_not_made(pool, error, said):
    """Those whom NCCL told nothing hear it from the others, if it is no use to try again."""
    pool[1].call(build, "GPU-1", "", error)
    address = pool[0].call(ask, "serve")
    for rank in (0, 1):
        pool[rank].send(joined, address, rank)
    assert pool[1].result().startswith(said)
    if said.startswith("GroupLost"):
        pool[1].kill()
    assert pool[0].result().startswith(said.split(":")[0])


def test_a_failed_kernel_of_the_trial_is_no_lost_group(pool):
    form(pool[:2], 1)
    pool[0].send(summed)
    assert pool[1].call(meet_a_failed_kernel) == "RuntimeError: CUDA error: device-side assert triggered, lost: None"
    assert "has died" in pool[0].result()


def test_a_sum_that_nccl_has_given_up_is_ended(pool):
    form(pool[:2], 1)
    pool[0].call(ask, "allreduce_", torch.ones(4))
    pool[0].call(break_connection)
    pool[0].send(synchronize)
    assert "NCCL has given up the sum of gradients" in pool[0].result()


def test_the_watchdog_of_torch_never_ends_the_process(pool):
    form(pool[:2], 1)
    assert everyone(pool[:2], fact, "settings") == [NCCL_SETTINGS] * 2
    assert {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"} <= NCCL_SETTINGS.keys()

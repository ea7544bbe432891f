"""What `probes` asks of NCCL on one GPU: workers that it refuses, peers that are killed, and groups of one.

NCCL allows one worker a GPU, so that a sum over two workers needs two GPUs (`benchmarks.resize`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from fluidtune.elastic import GroupLost
from fluidtune.elastic.transport import TorchBackend
from fluidtune.elastic.transport.base import PATIENCE
from fluidtune.elastic.transport.torch_backend import NCCL_SETTINGS, gloo_group, nccl_group

MB = 1 << 20
#: How long workers may take to start, and then to answer, seconds. To import torch and start CUDA takes half
#: of the first; the second is the part's end, should NCCL never answer.
START_S, ANSWER_S = 35.0, 10.0
#: The first on a core, which a rehearsal may share with others.
START_ON_CORE_S = 120.0
#: How long the others may wait in NCCL before their peers are killed, seconds. They are there at once.
WAITS_S = 1.0


class OneOfSeveral(TorchBackend):
    """A worker that takes its GPU for one of its own, so that NCCL itself is asked.

    ``stops``: it says so and stays where NCCL would connect it to the others.
    """

    def __init__(self, device: str, gpu: str, pipe: Connection, stops: bool = False) -> None:
        super().__init__(device=device, secret=b"of the probes")
        self.gpu, self.pipe, self.stops = gpu, pipe, stops

    def _gpu(self) -> str:
        return self.gpu

    def _connect_gpus(self, world: int) -> None:
        self.stop_if_it_should()
        super()._connect_gpus(world)

    def stop_if_it_should(self) -> None:
        if self.stops:
            self.pipe.send("stops")
            threading.Event().wait()


def _worker(pipe: Connection, rank: int, world: int, device: str, stops: bool) -> None:
    backend = OneOfSeveral(device, f"GPU-{rank}", pipe, stops)
    if rank == 0:
        pipe.send(backend.serve())
    address = pipe.recv()
    try:
        backend.form(address, 1, rank, world)
        backend.stop_if_it_should()
        tensor = torch.ones(4, device=device)
        backend.allreduce_(tensor)
        pipe.send(tensor.tolist())
    except (Exception, GroupLost) as error:
        pipe.send(f"{type(error).__name__}: {str(error)[:300]}")
    backend.dissolve()
    try:
        pipe.send(_alone(device))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error)[:300]}")


def _alone(device: str) -> str:
    """Make a group of this process alone, as a trial does that grows again, and sum in it."""
    with _group(device) as group:
        tensor = torch.ones(1 << 20, device=device)
        group.allreduce([tensor]).wait()
        return "summed" if float(tensor.sum()) == 1 << 20 else "wrong sum"


@contextlib.contextmanager
def _group(device: str) -> Iterator[Any]:
    """A group of this process alone, made as a trial's is."""
    os.environ.update(NCCL_SETTINGS)
    store = dist.HashStore()
    group = gloo_group(store, 0, 1, PATIENCE) if device == "cpu" else nccl_group(store, 0, 1)
    try:
        yield group
    finally:
        if device != "cpu":
            group.shutdown()


@contextlib.contextmanager
def _workers(device: str, stops: tuple[bool, ...]) -> Iterator[list[tuple[Connection, BaseProcess]]]:
    """Workers of one trial on one device, which have each other's address. They are killed in the end."""
    spawn = multiprocessing.get_context("spawn")
    started: list[tuple[Connection, BaseProcess]] = []
    process: BaseProcess
    try:
        for rank, each in enumerate(stops):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_worker, args=(theirs, rank, len(stops), device, each), daemon=True)
            process.start()
            theirs.close()
            started.append((ours, process))
        address = _first_answer(started[0][0], device)
        for pipe, _ in started:
            pipe.send(address)
        yield started
    finally:
        for _, process in started:
            process.kill()


def _answer(pipe: Connection, seconds: float = ANSWER_S) -> Any:
    return pipe.recv() if pipe.poll(seconds) else f"no answer in {seconds:g} s"


def _first_answer(pipe: Connection, device: str) -> Any:
    return _answer(pipe, START_ON_CORE_S if device == "cpu" else START_S)


def two_ranks(device: str) -> dict[str, Any]:
    with _workers(device, (False, False)) as workers:
        said = [_first_answer(pipe, device) for pipe, _ in workers]
        return {"ranks": said, "after": [_answer(pipe) for pipe, _ in workers]}


def killed_peers(device: str) -> dict[str, Any]:
    """Two of three workers are killed while the first waits for them: for NCCL to connect; on a core, for a sum."""
    with _workers(device, (False, True, True)) as workers:
        (first, _), *others = workers
        there = [_first_answer(pipe, device) for pipe, _ in others]
        time.sleep(WAITS_S)
        began = time.monotonic()
        for _, process in others:
            process.kill()
        lost = _answer(first)
        # A core that is shared has no clock.
        seconds = 0.0 if device == "cpu" else time.monotonic() - began
        return {"there": there, "lost": lost, "seconds": seconds, "after": _answer(first)}


def communicator(device: str) -> dict[str, Any]:
    """What a group of one costs, and whether its abort waits for a kernel that stands before its sum."""

    def held() -> int:
        free, total = torch.cuda.mem_get_info()
        return (total - free) // MB

    seconds = []
    _alone(device)  # what NCCL loads once
    torch.cuda.empty_cache()
    before = held()
    for _ in range(5):
        began = time.perf_counter()
        _alone(device)
        seconds.append(time.perf_counter() - began)
    torch.cuda.empty_cache()
    found: dict[str, Any] = {"made_and_left_s": seconds, "grown_mb": held() - before}
    with _group(device) as group:
        tensor = torch.ones(4, device=device)
        group.allreduce([tensor]).wait()
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(6_000_000_000)  # cycles: some seconds
        group.allreduce([tensor])
        asked = time.perf_counter()
        group.abort()
        found["abort_s"] = time.perf_counter() - asked
        torch.cuda.synchronize()
        found["kernel_s"] = time.perf_counter() - began
    return found

"""Questions that one GPU answers and no stand-in: ``python -m benchmarks.gpu.probes NAME`` prints the answer as JSON.

Each is asked by `benchmarks.gpu` in a process of its own with an end, so that one that hangs costs its limit only. What
is expected of an answer stands in `PROBES`. ``mps_killed`` is asked only by its name: it kills a client of MPS while
that computes, and nobody knows what becomes of the user's other programs on that GPU. ``--rehearse``: on a core, where
the question can be asked there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from salus_share.memory import CONTEXT, is_out_of_memory
from salus_share.mps import Mps, apply, is_fault
from salus_share.telemetry import Telemetry

Answer = dict[str, Any]
MB = 1 << 20
_spawn = multiprocessing.get_context("spawn")
#: How long a process that a question starts may take to answer, seconds. To import torch and start CUDA.
CHILD_S = 20.0


@dataclass(frozen=True)
class Probe:
    """A question. ``right``: whether an answer is the expected one; None: it cannot tell.

    ``limit``: seconds. ``cores``: it can be asked on a core, too. ``named``: it is asked only by its name.
    """

    ask: Callable[[str], Answer]
    expected: str
    right: Callable[[Answer], bool | None]
    limit: float = 20.0
    cores: bool = False
    named: bool = False


def context(device: str) -> Answer:
    import torch

    telemetry = Telemetry()
    before = {gpu.uuid: gpu.memory_used for gpu in telemetry.sample()}
    x = torch.ones(1024, 1024, device=device)
    float((x @ x).sum())
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    after = {gpu.uuid: gpu.memory_used for gpu in telemetry.sample()}
    grown = [after[name] - before[name] for name in after if name.endswith(uuid) and name in before]
    held = telemetry.process_memory(uuid, os.getpid())
    reserved = torch.cuda.memory_reserved()
    return {
        "by_process_mb": None if held is None else (held - reserved) // MB,
        "by_gpu_mb": (grown[0] - reserved) // MB if grown else None,
        "taken_for_mb": CONTEXT // MB,
    }


def context_is_right(answer: Answer) -> bool | None:
    known = [answer[name] for name in ("by_process_mb", "by_gpu_mb") if answer[name] is not None]
    return known[0] <= answer["taken_for_mb"] if known else None


def _end(pipe: Connection, leads: bool) -> None:
    """One end of what carries the tensors of divided calls between two GPUs."""
    import torch

    from fluidtune.elastic.divided.pair import Pair

    end = Pair("127.0.0.1", None if leads else pipe.recv())
    if leads:
        pipe.send(end.port)
    try:
        end.meet()
        tensor = torch.ones(4, device="cuda")
        (end.send if leads else end.receive)([tensor], lambda: False)
        torch.cuda.synchronize()
        pipe.send(tensor.tolist())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error)[:500]}")


def pair(device: str) -> Answer:
    """NCCL allows one process a GPU: two that have one are not connected."""
    leader, follower = start(_end, True), start(_end, False)
    try:
        follower[0].send(answer_of(*leader))
        return {"ends": [answer_of(*each) for each in (leader, follower)]}
    finally:
        for _, process in (leader, follower):
            process.kill()


def visible(device: str) -> Answer:
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    gpu = Telemetry().sample()[0]
    found: Answer = {"nvml": gpu.uuid}
    for name, value in (("by_uuid", gpu.uuid), ("by_number", str(gpu.index))):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_S)
        found[name] = done.stdout.split() or done.stderr[-200:]
    return found


def visible_is_right(answer: Answer) -> bool:
    seen = [answer["by_uuid"], answer["by_number"]]
    return all(each[0] == "1" and each[1].removeprefix("GPU-") == answer["nvml"].removeprefix("GPU-") for each in seen)


def full(device: str) -> Answer:
    """Libraries that allocate by themselves, on a GPU without memory."""
    import torch

    x = torch.ones(64, 64, device=device)
    hoard, size = [], 1 << 36
    while size >= MB:
        try:
            hoard.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    works: Mapping[str, Callable[[], Any]] = {
        "cublas": lambda: x @ x,
        "cudnn": lambda: torch.conv2d(x[None, None], x[None, None, :3, :3]),
        "cusolver": lambda: torch.linalg.inv(x + torch.eye(64, device=device)),
    }
    found: Answer = {}
    for name, work in works.items():
        try:
            work()
            torch.cuda.synchronize()
            found[name] = "worked"
        except Exception as error:
            free = torch.cuda.mem_get_info()[0]
            known = is_out_of_memory(error, free) and not is_fault(error)
            found[name] = "known" if known else f"{type(error).__name__}: {str(error)[:200]}"
    return found


def loader(device: str) -> Answer:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.ones(1, device=device)
    data = TensorDataset(torch.arange(1024.0))
    batches = DataLoader(data, batch_size=64, num_workers=2, pin_memory=device != "cpu", multiprocessing_context="fork")
    return {"sum": sum(float(x.to(device, non_blocking=True).sum()) for (x,) in batches)}


def clock(device: str) -> Answer:
    import torch

    x = torch.randn(4096, 4096, device=device)
    found = {}
    for _ in range(2):  # the first time cuBLAS starts
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(200):
            x @ x
        found["launched_s"] = time.perf_counter() - began
        torch.cuda.synchronize()
        found["done_s"] = time.perf_counter() - began
    return found


def _client(pipe: Connection, environment: dict[str, str], seconds: float) -> None:
    """A client of MPS that computes."""
    apply(environment)
    import torch

    x = torch.ones(2048, 2048, device="cuda") / 2048
    torch.cuda.synchronize()
    pipe.send("computes")
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            for _ in range(20):
                x = x @ x
            torch.cuda.synchronize()
        pipe.send({"mean_times_2048": float(x.mean()) * 2048})
    except RuntimeError as error:
        pipe.send({"raised": str(error).splitlines()[0], "fault": is_fault(error)})


def mps_killed(device: str) -> Answer:
    with TemporaryDirectory() as directory:
        daemon = Mps(Telemetry().sample()[0].uuid, Path(directory, "mps"))
        if not daemon.acquire():
            return {"had": False, "why": daemon.why}
        environment = daemon.environment()
        stays, goes = (start(_client, environment, 6.0) for _ in range(2))
        found: Answer = {"had": True, "up": [answer_of(*each) for each in (stays, goes)]}
        time.sleep(1)
        assert goes[1].pid is not None
        os.kill(goes[1].pid, signal.SIGKILL)
        found["beside"] = answer_of(*stays)
        after = start(_client, environment, 1.0)
        found["after"] = [answer_of(*after) for _ in range(2)]
        for _, process in (stays, goes, after):
            process.kill()
        daemon.release()
        return found


def mps_is_right(answer: Answer) -> bool | None:
    if not answer["had"]:
        return None
    return all("mean_times_2048" in one for one in (answer["beside"], answer["after"][1]))


def start(work: Callable[..., None], *arguments: Any) -> tuple[Connection, BaseProcess]:
    """Run ``work(pipe, *arguments)`` in a process of its own."""
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def answer_of(pipe: Connection, process: BaseProcess) -> Any:
    """What the process sends next, or why nothing comes."""
    with contextlib.suppress(EOFError):
        return pipe.recv() if pipe.poll(CHILD_S) else f"no answer in {CHILD_S:g} s"
    process.join()
    return f"ended with {process.exitcode}"


def _all_known(answer: Answer) -> bool:
    return all(what in ("worked", "known") for what in answer.values())


PROBES: dict[str, Probe] = {
    "context": Probe(context, "a CUDA context is no larger than 600 MiB", context_is_right),
    "pair": Probe(
        pair,
        "NCCL refuses a leader and a follower on one GPU, and both hear it",
        lambda answer: all("Duplicate GPU" in str(each) for each in answer["ends"]),
        limit=60.0,
    ),
    "visible": Probe(visible, "CUDA_VISIBLE_DEVICES by UUID and by number are NVML's GPU", visible_is_right),
    "full": Probe(full, "a library that finds no memory is known by its error", _all_known),
    "loader": Probe(
        loader, "forked loaders work where CUDA has started", lambda answer: answer["sum"] == 523776.0, cores=True
    ),
    "clock": Probe(
        clock,
        "a clock that does not wait for the GPU measures launches",
        lambda answer: answer["launched_s"] < answer["done_s"] / 2,
    ),
    "mps_killed": Probe(
        mps_killed, "a client of MPS that is killed disturbs no other", mps_is_right, limit=90.0, named=True
    ),
}


def main() -> None:
    """Ask one question. What it prints besides goes to standard error."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("name", choices=PROBES)
    arguments.add_argument("--rehearse", action="store_true", help="on a core")
    options = arguments.parse_args()
    probe = PROBES[options.name]
    if options.rehearse and not probe.cores:
        sys.exit(f"{options.name} can be asked on a GPU only")
    answer: Answer = {}
    right: bool | None = False
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = probe.ask("cpu" if options.rehearse else "cuda:0")
            right = probe.right(answer)
        except Exception as error:
            answer["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    print(json.dumps({"expected": probe.expected, "right": right, "answer": answer}))
    sys.stdout.flush()
    os._exit(0)  # a thread that NCCL or CUDA never lets go would keep the process


if __name__ == "__main__":
    main()

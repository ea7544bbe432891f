"""Questions that one GPU answers and no stand-in: ``python -m benchmarks.gpu.probes NAME`` prints the answer as JSON.

Each is asked by `benchmarks.gpu` in a process of its own with an end, so that one that hangs costs its limit only. What
is expected of an answer stands in `PROBES`. Two questions are asked only by their names, as they may end the user's
other programs on that GPU: ``mps_killed`` kills a client of MPS while that computes; in ``mps_fault`` a kernel of one
fails. ``--rehearse``: on a core, where the question can be asked there.
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
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from fluidtune.cluster.sharing.gpu_probe import failure_of_device
from fluidtune.device_kinds import CUDA_DRIVER, KINDS, cuda_started, loaded_library
from fluidtune.group_facts import GroupFacts
from salus_share.memory import CONTEXT, is_out_of_memory
from salus_share.mps import Mps, apply, is_fault
from salus_share.telemetry import Telemetry

Answer = dict[str, Any]
MB = 1 << 20
_spawn = multiprocessing.get_context("spawn")
#: How long a process that a question starts may take to answer, seconds. To import torch and start CUDA.
CHILD_S = 20.0
PROBE_SECRET = b"benchmarks.gpu" * 3
#: Steps of the divided network, and how far its losses may be from those of one process. Judgement: float16 has eleven
#: bits, and a batch of another size takes other kernels.
DIVIDED_STEPS, LOSS_APART = 30, 0.02


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

    end = Pair("127.0.0.1", None if leads else pipe.recv(), KINDS["gpu"].group)
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


class _Transfer:
    """A transfer through the host's memory; ``into``: the tensor that gets what has come."""

    def __init__(self, work: Any, host: Any, into: Any = None) -> None:
        self._work, self._host, self._into = work, host, into

    def is_completed(self) -> bool:
        self._work.wait()
        if self._into is not None:
            self._into.copy_(self._host)
        return True

    def wait(self) -> None:
        """It has been waited for."""


class _ThroughHost:
    """What stands in for NCCL where leader and follower have one GPU, which NCCL refuses: gloo, on copies."""

    def __init__(self, store: Any, rank: int) -> None:
        import torch.distributed as dist

        self._group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=CHILD_S))

    def send(self, tensors: list[Any], to: int, tag: int) -> _Transfer:
        host = tensors[0].cpu().contiguous()
        return _Transfer(self._group.send([host], to, tag), host)

    def recv(self, tensors: list[Any], source: int, tag: int) -> _Transfer:
        import torch

        host = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
        return _Transfer(self._group.recv([host], source, tag), host, tensors[0])

    def abort(self) -> None:
        """Its threads end with the process."""


def _follow(pipe: Connection, address: Any, device: str) -> None:
    import torch

    from fluidtune.elastic.divided import pair
    from fluidtune.elastic.divided.follower import Follower

    pair.Pair = partial(pair.Pair, group=_ThroughHost)  # type: ignore[assignment, misc]
    follower = Follower("probe", "follower", PROBE_SECRET, device.partition(":")[0])
    follower.attach(address)
    torch.set_num_threads(1)
    pipe.send("attached")
    follower.run()


def _steps(device: str, before: Callable[[], Any], after: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Train a network in channels-last layout under mixed precision: milliseconds of each step, and its losses."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)  # two processes' threads would wait for each other's cores in a rehearsal
    kind, width, batch = device.partition(":")[0], *((64, 128) if device != "cpu" else (4, 8))
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(8):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(kind, enabled=kind == "cuda")
    x = torch.randn(batch, 3, 32, 32).to(device, memory_format=torch.channels_last)
    y = torch.randint(10, (batch,)).to(device)
    took, losses = [], []
    for _ in range(DIVIDED_STEPS):
        before()
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(kind, torch.float16, enabled=kind == "cuda"):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        took.append(1e3 * (time.perf_counter() - began))
        after()
    return took, losses


def divided(device: str) -> Answer:
    from fluidtune.elastic.divided import pair
    from fluidtune.elastic.divided.leader import DataParallelLeader

    pair.Pair = partial(pair.Pair, group=_ThroughHost)  # type: ignore[assignment, misc]
    alone_ms, alone = _steps(device, int, int)
    division = DataParallelLeader("probe", PROBE_SECRET, None, device, pays=False, patient=True)
    follower, counts = start(_follow, division.address, device), []
    try:
        attached = answer_of(*follower)
        found = _steps(device, division.begin_iteration, lambda: counts.append(division.followers.divided))
        facts = division.facts(GroupFacts())
    finally:
        division.close()
        follower[1].join(5)
        follower[1].kill()
    return {
        "follower": attached,
        "divided_calls": sum(counts),
        "ungrowable": facts.ungrowable,
        "loss_apart": max(abs(a - b) for a, b in zip(alone, found[1], strict=True)),
        "alone_ms": round(median(alone_ms), 2),
        "divided_ms": round(median(found[0]), 2),
    }


def lost_context(device: str) -> Answer:
    import torch

    table = torch.ones(10, 4, device=device)
    found: Answer = {"before": failure_of_device()}
    try:
        table[torch.tensor([99], device=device)].sum().item()
    except RuntimeError as error:
        found["raised"] = str(error).splitlines()[0]
    return found | {"after": failure_of_device()}


def ray_parts(device: str) -> Answer:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Worker:
        def sees(self) -> Any:
            import torch

            return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available()

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=8, num_gpus=1)
    actor, found = ray.remote(Worker), {}
    for parts in (4, 6, 7):
        group = placement_group([{"GPU": 1.0}])
        ray.get(group.ready(), timeout=CHILD_S)
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        workers = [
            actor.options(num_cpus=0, num_gpus=1 / parts, scheduling_strategy=where).remote() for _ in range(parts)
        ]
        there, _ = ray.wait([each.sees.remote() for each in workers], num_returns=parts, timeout=2 * CHILD_S)
        found[f"of_{parts}"] = len(there)
        for worker in workers:
            ray.kill(worker)
        remove_placement_group(group)
    # For the record: by Ray's settings it sees all GPUs or none, as under stock Ray Tune.
    found["without_a_gpu"] = ray.get(actor.options(num_cpus=1).remote().sees.remote(), timeout=2 * CHILD_S)
    ray.shutdown()
    return found


def _sum_on(pipe: Connection, device: str) -> None:
    import torch

    try:
        pipe.send(float(torch.ones(4, device=device).sum()))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error)[:300]}")


def forks(device: str) -> Answer:
    """What `fluidtune.cluster.forks` relies on: CUDA is loaded by an import, not started, and works in a fork."""
    import torch

    driver = loaded_library(CUDA_DRIVER)
    found: Answer = {"loaded": driver is not None, "started_by_the_import": cuda_started(driver)}
    for moment in ("child", "child_after_the_start"):
        child = start(_sum_on, device, context=multiprocessing.get_context("fork"))
        found[moment] = answer_of(*child)
        child[1].kill()
        torch.ones(1, device=device)
    return found | {"started_after_the_start": cuda_started(loaded_library(CUDA_DRIVER))}


def forks_are_right(answer: Answer) -> bool:
    return not answer["started_by_the_import"] and answer["child"] == 4.0 and answer["started_after_the_start"]


def starts(device: str) -> Answer:
    """Seconds of what a new process does on a GPU before its second step."""
    began = time.perf_counter()
    import torch

    found: Answer = {}

    def note(what: str) -> None:
        nonlocal began
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        found[what], began = round(time.perf_counter() - began, 2), time.perf_counter()

    note("import_s")
    x = torch.ones(512, 512, device=device)
    note("context_s")
    x @ x
    note("cublas_s")
    kind = device.partition(":")[0]
    network = torch.nn.Conv2d(64, 64, 3, padding=1).to(device, memory_format=torch.channels_last)
    images = torch.randn(128, 64, 32, 32, device=device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    note("optimizer_s")
    for step in ("first_step_s", "second_step_s"):
        with torch.autocast(kind, torch.float16, enabled=kind == "cuda"):
            loss = network(images).square().mean()
        loss.backward()
        optimizer.step()
        note(step)
    return found


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


def _failing_client(pipe: Connection, environment: dict[str, str]) -> None:
    """A client of MPS whose kernel fails."""
    apply(environment)
    import torch

    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    pipe.send("computes")
    try:
        x[torch.tensor([1 << 20], device="cuda")].sum().item()
        pipe.send("nothing failed")
    except RuntimeError as error:
        pipe.send({"raised": str(error).splitlines()[0], "fault": is_fault(error)})


def under_mps(ask: Callable[[str, dict[str, str]], Answer]) -> Callable[[str], Answer]:
    """A question that is asked with the UUID of a GPU that MPS shares, and the environment of its clients."""

    def asked(device: str) -> Answer:
        gpu = Telemetry().sample()[0].uuid
        with TemporaryDirectory() as directory:
            daemon = Mps(gpu, Path(directory, "mps"))
            if not daemon.acquire():
                return {"had": False, "why": daemon.why}
            found = ask(gpu, daemon.environment())
            daemon.release()
            return {"had": True, **found}

    return asked


def if_had(right: Callable[[Answer], bool]) -> Callable[[Answer], bool | None]:
    """Without MPS, whether an answer is right cannot be told."""
    return lambda answer: right(answer) if answer["had"] else None


@under_mps
def mps_memory(gpu: str, environment: dict[str, str]) -> Answer:
    clients = [start(_client, environment, 2.0) for _ in range(2)]
    found: Answer = {"up": [answer_of(*each) for each in clients]}
    held = [Telemetry().process_memory(gpu, process.pid or 0) for _, process in clients]
    found["nvml_mb"] = [None if size is None else size // MB for size in held]
    found["became"] = [answer_of(*each) for each in clients]
    for _, process in clients:
        process.kill()
    return found


@if_had
def mps_memory_is_right(answer: Answer) -> bool:
    return all(answer["nvml_mb"]) and all("mean_times_2048" in one for one in answer["became"])


@under_mps
def mps_fault(gpu: str, environment: dict[str, str]) -> Answer:
    beside, fails = start(_client, environment, 6.0), start(_failing_client, environment)
    found: Answer = {"up": [answer_of(*each) for each in (beside, fails)]}
    found["became"] = [answer_of(*each) for each in (fails, beside)]
    for _, process in (beside, fails):
        process.kill()
    after = start(_client, environment, 1.0)
    found["after"] = [answer_of(*after) for _ in range(2)]
    after[1].kill()
    return found


@if_had
def mps_fault_is_right(answer: Answer) -> bool:
    faults = [isinstance(one, dict) and one.get("fault") is True for one in answer["became"]]
    return all(faults) and "mean_times_2048" in answer["after"][1]


@under_mps
def mps_killed(gpu: str, environment: dict[str, str]) -> Answer:
    stays, goes = (start(_client, environment, 6.0) for _ in range(2))
    found: Answer = {"up": [answer_of(*each) for each in (stays, goes)]}
    time.sleep(1)
    assert goes[1].pid is not None
    os.kill(goes[1].pid, signal.SIGKILL)
    found["beside"] = answer_of(*stays)
    after = start(_client, environment, 1.0)
    found["after"] = [answer_of(*after) for _ in range(2)]
    for _, process in (stays, goes, after):
        process.kill()
    return found


@if_had
def mps_is_right(answer: Answer) -> bool:
    return all("mean_times_2048" in one for one in (answer["beside"], answer["after"][1]))


def start(work: Callable[..., None], *arguments: Any, context: Any = _spawn) -> tuple[Connection, BaseProcess]:
    """Run ``work(pipe, *arguments)`` in a process of its own, which begins as those of ``context`` do."""
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
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
    "context": Probe(context, "a CUDA context is no larger than is assumed", context_is_right),
    "pair": Probe(
        pair,
        "NCCL refuses a leader and a follower on one GPU, and both hear it",
        lambda answer: all("Duplicate GPU" in str(each) for each in answer["ends"]),
        limit=60.0,
    ),
    "forks": Probe(
        forks, "an import loads CUDA without starting it, and a fork then uses the GPU", forks_are_right, limit=60.0
    ),
    "starts": Probe(starts, "seconds of a process' start on a GPU", lambda answer: None, limit=60.0, cores=True),
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
    "divided": Probe(
        divided,
        "calls of a channels-last network under mixed precision are divided, and its losses stay within .02",
        lambda answer: answer["divided_calls"] > 0 and answer["loss_apart"] <= LOSS_APART,
        limit=60.0,
        cores=True,
    ),
    "lost_context": Probe(
        lost_context,
        "after a kernel that failed, CUDA says so when asked, and before it says nothing",
        lambda answer: answer["before"] is None and answer["after"] is not None,
    ),
    "ray_parts": Probe(
        ray_parts,
        "a GPU's 4, 6 and 7 equal parts all have a worker",
        lambda answer: all(answer[f"of_{parts}"] == parts for parts in (4, 6, 7)),
        limit=90.0,
        cores=True,
    ),
    "mps_memory": Probe(mps_memory, "NVML says what each client of MPS holds", mps_memory_is_right, limit=60.0),
    "mps_fault": Probe(
        mps_fault,
        "a kernel that fails under MPS ends the client beside it with a known fault, and a new client computes",
        mps_fault_is_right,
        limit=90.0,
        named=True,
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

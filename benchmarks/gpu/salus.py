"""What Salus does on a real GPU. Two of its parts have run on one, with ``--quick`` (docs/gpu.md).

``python -m benchmarks.gpu.salus --json [--quick] [--only PART] [--rehearse]``. Needs torch with CUDA, pynvml, psutil,
and no Ray. Parts, each in processes of its own:

- `pack`: 8 small models trained, seconds for all of their steps: `fifo` (one after another), `time_slicing` (side by
  side in processes, no gate), `mps` (the same under MPS, left out where MPS is not available), `lanes` (processes with
  a gate each, PACK), `lanes_mps`.
- `mps`: the daemon is started, a client is held to the limit it was given, and the daemon is told to quit.
- `admissions`: random needs in 8 processes by rounds, until 1,000 were admitted or there is no time left; every trial
  allocates what it said, E within iterations. It counts those that ran out of memory, which must be 0.
- `greedy`: three trials as FluidTune's workers treat them (`LaneMember`). One of them allocates until it fails. The
  others must have the losses that they have alone.
- `resident`: 42 models in one process, latency as in benchmarks.inference, and how many were admitted at once.
- `overhead`: the part of an iteration that a trial alone loses to the gate, and to a worker with lanes switched on.

Record with ``--json > docs/results/salus-gpu.json`` and compare `pack`'s sides: the faster of `lanes` and
`lanes_mps` should be the default. ``--rehearse`` goes through all parts but `mps` on a core, with two copies: this
shows that the script runs, and measures nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.inference import figures_of, one_at_a_time, resident
from benchmarks.salus_jobs import device_home, together
from fluidtune.cluster.sharing.lanes import LaneMember, LaneSettings, LaneTicket
from salus_share import LaneTable, Need
from salus_share.gate import Gate
from salus_share.memory import CONTEXT, is_out_of_memory
from salus_share.mps import Mps, apply
from salus_share.seat_table import SeatTable, home
from salus_share.telemetry import DeviceSample, Telemetry

PARTS = ("pack", "mps", "admissions", "greedy", "resident", "overhead")
NEED = Need(256 << 20, 256 << 20)
MB = 1 << 20
#: Issue 22: random admissions of which none may run out of memory. With ``--rehearse`` a few.
ADMISSIONS, REHEARSED = 1000, 10
#: Seconds for them, with ``--quick`` and without. A trial allocates and fills a third of the memory on
#: average, three times, in a fraction of a second.
ADMISSION_S = (40, 100)


@dataclass(frozen=True)
class Plan:
    """Where to run, and how much. ``device``: "cuda:0", or "cpu" in a rehearsal. ``capacity``: bytes for lanes."""

    device: str
    capacity: int
    copies: int
    quick: bool

    def count(self, quick: int, full: int) -> int:
        return quick if self.quick else full


def wait_for(device: str) -> None:
    """Wait until the GPU has done what was queued."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def model_and_step(device: str, seed: int = 1) -> Callable[[], float]:
    """Make a small model on the device. Returns a function that trains it for one step and returns the loss."""
    import torch

    width = 1024
    if device == "cpu":
        torch.set_num_threads(1)
        width = 128
    source = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(128, width, generator=source).to(device)

    def step() -> float:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def train(
    begin: Any, directory: str, name: str, lane: int | None, environment: dict[str, str], steps: int, plan: Plan
) -> None:
    """Train one copy in a process of its own. ``lane`` None: there is no gate."""
    apply(environment)
    gate = None if lane is None else Gate(Path(directory), name, "PACK", lane=lane)
    # What CUDA and its libraries do once is timed for no side.
    step = model_and_step(plan.device)
    step()
    begin()
    for _ in range(steps):
        with nullcontext() if gate is None else gate.iteration():
            step()
            wait_for(plan.device)
    if gate is not None:
        gate.leave()


def pack(plan: Plan, gpu: DeviceSample | None) -> dict[str, Any]:
    """Seconds until all copies have done their steps, by side."""
    sides: dict[str, float] = {}
    steps = plan.count(50, 2000)
    for name in ("fifo", "time_slicing", "mps", "lanes", "lanes_mps"):
        with device_home() as directory:
            where, environment = str(directory), {}
            mps = None
            if name.endswith("mps"):
                mps = None if gpu is None else Mps(gpu.uuid, directory / "mps")
                if mps is None or not mps.acquire():
                    say(f"pack, {name}: left out, MPS cannot be had ({'no GPU' if mps is None else mps.why})")
                    continue
                environment = mps.environment()
            try:
                table, rows = LaneTable(plan.capacity), []
                for copy in (f"copy{i}" for i in range(plan.copies)):
                    lane = table.admit(copy, NEED.persistent, NEED.ephemeral) if name.startswith("lanes") else None
                    rows.append((where, copy, lane, environment, steps, plan))
                batches = [[row] for row in rows] if name == "fifo" else [rows]
                sides[name] = sum(together(train, batch)[0] for batch in batches)
            finally:
                if mps is not None:
                    mps.release()
        say(f"pack, {name}: {sides[name]:.2f} s")
    ratios = {name: seconds / sides["lanes"] for name, seconds in sides.items() if name != "lanes"}
    shown = {name: {"seconds": seconds} for name, seconds in sides.items()}
    return {"sides": shown, "ratios": ratios, "ratio": ratios["fifo"]}


def allocate(begin: Any, environment: dict[str, str], sizes: tuple[int, ...], device: str) -> list[bool]:
    """Which of these allocations (bytes, one at a time) succeed in a process of its own."""
    apply(environment)
    import torch

    begin()
    found = []
    for size in sizes:
        try:
            torch.empty(size, dtype=torch.uint8, device=device)
            wait_for(device)
            found.append(True)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found.append(False)
        torch.cuda.empty_cache()
    return found


def under_mps(plan: Plan, gpu: DeviceSample) -> dict[str, Any]:
    """Whether MPS starts, holds a client to its limit (the context counts), and stops."""
    with device_home() as directory:
        mps = Mps(gpu.uuid, directory / "mps")
        if not mps.acquire():
            return {"had": False, "why": mps.why}
        limited = mps.environment(memory=2048 * MB)
        _, (fits,) = together(allocate, [(limited, (512 * MB, 3072 * MB), plan.device)])
        pipe = mps.pipe
        mps.release()
        ours = pipe is not None and pipe.is_relative_to(directory)
        return {"had": True, "ours": ours, "within": fits[0], "held_to_its_limit": not fits[1]}


def admitted(
    begin: Any, directory: str, worker: int, barrier: Any, count: int, seconds: float, plan: Plan
) -> tuple[int, int]:
    """Run a random trial in each round in which it is admitted, until all workers together had ``count`` of them, or
    ``seconds`` are over. All draw the same needs and lanes.

    Returns how many were admitted here and how many ran out of memory.
    """
    import torch

    on_gpu = plan.device != "cpu"
    if on_gpu:
        torch.empty(1, device=plan.device)
    draw, over = random.Random(1), Path(directory) / "over"
    begin()
    deadline = time.monotonic() + seconds
    done = failed = everywhere = 0
    while everywhere < count:
        if time.monotonic() > deadline:
            over.touch()
        barrier.wait()
        if over.exists():
            break
        table, lanes, needs = LaneTable(plan.capacity), [], []
        for other in range(plan.copies):
            needs.append(Need(draw.randint(1, plan.capacity // 6), draw.randint(1, plan.capacity // 2)))
            lanes.append(table.admit(str(other), needs[-1].persistent, needs[-1].ephemeral))
        everywhere += sum(lane is not None for lane in lanes)
        lane, need = lanes[worker], needs[worker]
        if lane is not None:
            gate = Gate(Path(directory), str(worker), "FAIR", lane=lane)
            done += 1
            try:
                held = torch.empty(int(need.persistent), dtype=torch.uint8, device=plan.device)
                for _ in range(3):
                    with gate.iteration():
                        scratch = torch.empty(int(need.ephemeral), dtype=torch.uint8, device=plan.device)
                        scratch.fill_(1)
                        wait_for(plan.device)
                        del scratch
                        # The lane's next trial is another process: the cache must not stay behind.
                        if on_gpu:
                            torch.cuda.empty_cache()
                del held
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failed += 1
            if on_gpu:
                torch.cuda.empty_cache()
            gate.leave()
        barrier.wait()
    return done, failed


def admissions(plan: Plan) -> dict[str, Any]:
    """How many trials were admitted, and how many of them ran out of memory."""
    if plan.device == "cpu":
        plan = replace(plan, capacity=1 << 30)  # a core fills no more in a reasonable time
    with device_home() as directory:
        count = REHEARSED if plan.device == "cpu" else ADMISSIONS
        barrier = multiprocessing.get_context("spawn").Barrier(plan.copies)
        rows = [(str(directory), each, barrier, count, plan.count(*ADMISSION_S), plan) for each in range(plan.copies)]
        _, counts = together(admitted, rows)
    return {"admitted": sum(c[0] for c in counts), "out_of_memory": sum(c[1] for c in counts)}


def in_a_worker(begin: Any, name: str, seed: int, steps: int, greedy: bool, plan: Plan) -> tuple[list[float], str]:
    """Run a trial as FluidTune's worker does. Returns its losses, and what became of it."""
    kind = "cpu" if plan.device == "cpu" else "gpu"
    member = LaneMember(f"{name}-{seed}", LaneSettings(name, "FAIR", plan.capacity, 1.0), kind)
    # A third of the device each: the first losses of a trial must not wait for those that came before it.
    lack = member.settle(LaneTicket(seed, (0.2, 0.1), 60.0, 0))
    if lack is not None:
        begin()
        return [], lack.reason
    step = model_and_step(plan.device, seed)
    begin()
    losses: list[float] = []
    hoard = []
    try:
        for at in range(steps):
            with member.iteration():
                losses.append(step())
                while greedy and at == steps // 2:
                    hoard.append(_megabytes(64, plan.device))
        return losses, "done"
    except Exception as error:
        lack = member.failed(error)
        if lack is None:
            raise
        return losses, f"failed, and would ask for {sum(lack.need or ()):.2f} of the device"
    finally:
        hoard.clear()
        member.leave()


def _megabytes(count: int, device: str) -> Any:
    import torch

    return torch.ones(count * MB // 4, device=device)


def greedy(plan: Plan) -> dict[str, Any]:
    """Whether two trials beside one that allocates until it fails have the losses that they have alone."""
    name, steps = f"benchmark-{os.getpid()}", plan.count(20, 200)
    try:
        alone = [together(in_a_worker, [(name, seed, steps, False, plan)])[1][0][0] for seed in (1, 2)]
        rows = [(name, seed, steps, seed == 3, plan) for seed in (1, 2, 3)]
        _, found = together(in_a_worker, rows)
    finally:
        shutil.rmtree(home(name), ignore_errors=True)
    beside = [losses for losses, _ in found[:2]]
    # A trial that ended early has fewer losses; the second value says why.
    differences = [abs(a - b) for one, two in zip(alone, beside, strict=True) for a, b in zip(one, two, strict=False)]
    apart = max(differences, default=None)
    return {"losses_as_alone": beside == alone, "largest_difference": apart, "fates": [fate for _, fate in found]}


def overhead(begin: Any, directory: str, count: int, plan: Plan) -> dict[str, float]:
    """The part of its time that a lone trial loses, from iterations with and without a gate by turns."""
    gate = Gate(Path(directory), "alone", "FAIR")
    kind = "cpu" if plan.device == "cpu" else "gpu"
    member = LaneMember("alone", LaneSettings("benchmark", "FAIR", None, 1.0), kind)
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "without": nullcontext,
        "gate": gate.iteration,
        "worker": member.iteration,
    }
    step = model_and_step(plan.device)
    begin()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways.items())
    for turn in range(count):
        for name, way in order if turn % 2 else reversed(order):
            started = time.perf_counter()
            with way():
                step()
                wait_for(plan.device)
            if turn > 5:
                taken[name].append(time.perf_counter() - started)
    without = taken.pop("without")
    # Memory is read in every tenth iteration: the median does not see that, the mean does, and all else that happened.
    medians = {name: median(seconds) / median(without) - 1 for name, seconds in taken.items()}
    return {**medians, "worker_mean": mean(taken["worker"]) / mean(without) - 1}


def counted(begin: Any, directory: str, seconds: float, device: str) -> tuple[list[float], int]:
    """`resident`'s latencies, and how many models had a seat when its requests began."""
    found: list[int] = []

    def count() -> None:
        table = SeatTable(Path(directory))
        with table.lock():
            found.append(len(table.seats()))
        begin()

    return resident(count, directory, seconds, device), found[0]


def latencies(plan: Plan) -> dict[str, Any]:
    """Latencies of 42 resident models under light load, and of each with the device to itself; milliseconds."""
    seconds = float(plan.count(5, 60))
    with device_home() as directory:
        _, ((shared, models),) = together(counted, [(str(directory), seconds, plan.device)])
    alone = together(one_at_a_time, [(seconds, False, plan.device)])[1][0]
    return {"models": models, "requests": len(shared), **figures_of(shared), "alone": figures_of(alone)}


def the_gpu() -> tuple[Plan | None, DeviceSample | None, str | None]:
    """The plan for the first GPU that this process may use, its state, and the driver's version; None without."""
    telemetry = Telemetry()
    gpus = telemetry.sample()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    gpu = next((gpu for gpu in gpus if visible in (str(gpu.index), gpu.uuid)), None)
    if gpu is None:
        return None, None, telemetry.driver
    # The children, clients of MPS among them, find the same GPU by its name.
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu.uuid
    # The contexts of 8 processes and of this one are not for lanes.
    capacity = gpu.memory_total - gpu.memory_used - 9 * CONTEXT
    return Plan("cuda:0", capacity, 8, False), gpu, telemetry.driver


def main() -> None:
    """The command."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--only", choices=PARTS, help="one part")
    arguments.add_argument("--rehearse", action="store_true", help="on a core, quickly: measures nothing")
    options = arguments.parse_args()
    if options.rehearse:
        plan, gpu, driver = Plan("cpu", 4 << 30, 2, True), None, None
    else:
        plan, gpu, driver = the_gpu()
        if plan is None:
            sys.exit("no GPU here; --rehearse goes through the script on a core")
        plan = Plan(plan.device, plan.capacity, plan.copies, options.quick)
    found: dict[str, Any] = {"rehearsal": options.rehearse}
    if gpu is not None:
        found |= {"gpu": gpu.name, "driver": driver, "mig": gpu.mig}
    for part in [options.only] if options.only else PARTS:
        if part == "pack":
            found |= pack(plan, gpu)
            continue
        if part == "mps":
            figures = {"had": False, "why": "no GPU"} if gpu is None else under_mps(plan, gpu)
        elif part == "overhead":
            with device_home() as directory:
                _, (figures,) = together(overhead, [(str(directory), plan.count(50, 1000), plan)])
        else:
            figures = {"admissions": admissions, "greedy": greedy, "resident": latencies}[part](plan)
        found[part] = figures
        say(f"{part}: {figures}")
    finish(result("gpu.salus", "cpu:1" if options.rehearse else "gpu:1", "real", **found), options.json)


if __name__ == "__main__":
    main()

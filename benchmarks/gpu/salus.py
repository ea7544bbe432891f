"""What Salus does on a real GPU. Not run so far: no GPU was at hand when it was written.

``python -m benchmarks.gpu.salus --json [--quick] [--only PART]``. Parts, each in processes of its own:

- `pack`: 8 small models trained side by side, seconds for all of their steps: `fifo`, `time_slicing` (processes, no
  gate), `mps` (the same under MPS, left out where it cannot be had), `lanes` (processes with a gate each, PACK),
  `lanes_mps`, `threads` (one process, a stream and a memory pool per lane).
- `admissions`: 1,000 random needs in 8 processes; every trial allocates what it said, E within iterations. Counts
  those that ran out of memory: it must be none.
- `resident`: 42 models in one process, latency as in benchmarks.inference.
- `overhead`: the part of an iteration that a trial alone loses to the gate.

Record with ``--json > docs/results/salus-gpu.json`` and compare `pack`'s sides: the faster of `lanes`, `lanes_mps`
and `threads` that is safe should be the default (docs/salus.md says why it is processes until then).
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.gate import seat
from benchmarks.inference import figures_of, one_at_a_time, resident
from benchmarks.salus_jobs import device_home, together
from salus_share import Need
from salus_share.board import Board
from salus_share.client import LaneClient
from salus_share.memory import CONTEXT, is_out_of_memory
from salus_share.mps import Mps, apply
from salus_share.telemetry import Telemetry

COPIES = 8
NEED = Need(256 << 20, 256 << 20)


def model_and_step() -> Any:
    """A small model on the GPU. Returns a function that trains it one step."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())])
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(128, 1024, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def train(
    begin: Any, directory: str, name: str, policy: str | None, environment: dict[str, str], steps: int, capacity: int
) -> None:
    """One copy in a process of its own; ``policy`` None: no gate."""
    apply(environment)
    import torch

    client = LaneClient("gpu", name, capacity=capacity, policy=policy or "PACK", directory=Path(directory))
    if policy == "PACK":
        client.admit(NEED)
    torch.cuda.init()
    begin()
    if policy == "FIFO":
        client.admit(NEED)
    step = model_and_step()
    for _ in range(steps):
        if policy is None:
            step()
            torch.cuda.synchronize()
        else:
            with client.iteration():
                step()
                torch.cuda.synchronize()
    client.leave()


def train_threads(begin: Any, directory: str, steps: int, capacity: int) -> None:
    """All copies in this process."""
    from salus_share.streams import InProcessLanes, LaneJob

    lanes = InProcessLanes("cuda:0", "gpu", capacity=capacity, policy="PACK", directory=Path(directory))

    def work(job: LaneJob) -> None:
        step = model_and_step()
        for _ in range(steps):
            with job.iteration():
                step()

    begin()
    for future in [lanes.start(f"copy{index}", work, NEED) for index in range(COPIES)]:
        future.result()


def pack(steps: int, capacity: int, uuid: str) -> dict[str, float]:
    """Seconds by side."""
    sides = {}
    for name in ("fifo", "time_slicing", "mps", "lanes", "lanes_mps", "threads"):
        with device_home() as directory:
            home, environment = str(directory), {}
            mps = Mps(uuid, directory / "mps")
            if name.endswith("mps"):
                if not mps.acquire():
                    say(f"pack, {name}: left out, MPS cannot be had")
                    continue
                environment = mps.environment()
            try:
                if name == "threads":
                    sides[name] = together(train_threads, [(home, steps, capacity)])[0]
                else:
                    policy = {"fifo": "FIFO", "time_slicing": None, "mps": None}.get(name, "PACK")
                    rows = [(home, f"copy{i}", policy, environment, steps, capacity) for i in range(COPIES)]
                    sides[name] = together(train, rows)[0]
            finally:
                mps.release()
        say(f"pack, {name}: {sides[name]:.2f} s")
    return sides


def admitted(begin: Any, directory: str, worker: int, count: int, capacity: int) -> tuple[int, int]:
    """Random trials one after another. Returns how many were admitted and how many ran out of memory."""
    import torch

    torch.cuda.init()
    draw = random.Random(worker)
    begin()
    done = failed = 0
    for index in range(count):
        need = Need(draw.randint(1, capacity // 6), draw.randint(1, capacity // 2))
        with LaneClient(
            "gpu", f"{worker}-{index}", capacity=capacity, policy="FAIR", directory=Path(directory)
        ) as lane:
            lane.admit(need)
            done += 1
            try:
                held = torch.empty(int(need.persistent), dtype=torch.uint8, device="cuda")
                for _ in range(3):
                    with lane.iteration():
                        scratch = torch.empty(int(need.ephemeral), dtype=torch.uint8, device="cuda")
                        scratch.fill_(1)
                        torch.cuda.synchronize()
                        del scratch
                        # The lane's next trial is another process: the cache must not stay behind.
                        torch.cuda.empty_cache()
                del held
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failed += 1
            torch.cuda.empty_cache()
    return done, failed


def overhead(begin: Any, directory: str, count: int) -> float:
    """The part of its time that a lone trial loses, iterations with and without a gate in turn."""
    import torch

    Board.create(Path(directory), 1 << 30, "FAIR")
    gate = seat(Path(directory), "alone", 1)
    step = model_and_step()
    begin()
    taken: dict[bool, list[float]] = {True: [], False: []}
    for index in range(2 * count):
        gated = index % 2 == 0
        started = time.perf_counter()
        if gated:
            with gate.iteration():
                step()
                torch.cuda.synchronize()
        else:
            step()
            torch.cuda.synchronize()
        if index > 20:
            taken[gated].append(time.perf_counter() - started)
    return median(taken[True]) / median(taken[False]) - 1


def main() -> None:
    """The command."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--only", choices=("pack", "admissions", "resident", "overhead"), help="one part")
    options = arguments.parse_args()
    telemetry = Telemetry()
    gpus = telemetry.sample()
    if not gpus:
        sys.exit("no GPU here (NVML finds none); run this where `nvidia-smi` shows one")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    gpu = gpus[0]
    # What 8 processes' contexts take is not for lanes.
    capacity = gpu.memory_total - gpu.memory_used - (COPIES + 1) * CONTEXT
    parts = [options.only] if options.only else ["pack", "admissions", "resident", "overhead"]
    found: dict[str, Any] = {"gpu": gpu.name, "driver": telemetry.driver, "mig": gpu.mig}
    if "pack" in parts:
        sides = pack(50 if options.quick else 2000, capacity, gpu.uuid)
        ratios = {name: seconds / sides["lanes"] for name, seconds in sides.items() if name != "lanes"}
        found["sides"] = {name: {"seconds": seconds} for name, seconds in sides.items()}
        found |= {"ratios": ratios, "ratio": ratios["fifo"]}
    if "admissions" in parts:
        with device_home() as directory:
            each = 10 if options.quick else 125
            _, counts = together(admitted, [(str(directory), i, each, capacity) for i in range(COPIES)])
        found["admissions"] = {"admitted": sum(c[0] for c in counts), "out_of_memory": sum(c[1] for c in counts)}
        say(f"admissions: {found['admissions']}")
    if "resident" in parts:
        seconds = 5.0 if options.quick else 60.0
        with device_home() as directory:
            _, (latencies,) = together(resident, [(str(directory), seconds, "cuda:0")])
        alone = together(one_at_a_time, [(seconds, False, "cuda:0")])[1][0]
        found["resident"] = {**figures_of(latencies), "alone": figures_of(alone)}
        say(f"resident: {found['resident']}")
    if "overhead" in parts:
        with device_home() as directory:
            _, (lost,) = together(overhead, [(str(directory), 100 if options.quick else 2000)])
        found["overhead"] = lost
        say(f"overhead of a lone trial: {lost:.2%}")
    finish(result("gpu.salus", "gpu:1", "real", **found), options.json)


if __name__ == "__main__":
    main()

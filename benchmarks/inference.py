"""42 models, 14 kinds of 3 each, resident on one device: latency under light load (section 2.5.3).

``python -m benchmarks.inference --json [--quick]``. Requests come at random, a few a second for all models together.
Sides, milliseconds from request to answer (mean and 95 %): `resident`, with all 42 models on the device under PACK,
some in lanes of their own and some sharing one; `reload`, where the device holds one model at a time, so that the
parameters of another one must be loaded first. `alone` is each kind with the device to itself. `added` is what
sharing adds to the mean. ``ratio`` is reload's mean over resident's. On a CPU the device is one core, and one process
holds the models, each in a thread with a gate of its own.
"""

from __future__ import annotations

import io
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from statistics import mean, quantiles
from typing import TYPE_CHECKING, Any

from benchmarks.common import finish, parser, result, say
from benchmarks.salus_jobs import all_ready, device_home, pin, together
from salus_share import LaneTable
from salus_share.gate import Gate

if TYPE_CHECKING:
    import torch

#: Section 2.5.3.
KINDS, COPIES = 14, 3
#: Requests per second for all models together, and the memory of the device in bytes. Judgement: light load, and all
#: models fit.
RATE, CAPACITY = 20.0, 4 << 30


def build(kind: int) -> torch.nn.Module:
    """One of 14 kinds: deeper and wider, fully connected or convolutional."""
    import torch
    from torch import nn

    torch.manual_seed(kind)
    size = kind // 2 + 1
    if kind % 2:
        channels = 8 * size
        return nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2)).eval()
    width = 128 * size
    return nn.Sequential(nn.Linear(3 * 32 * 32, width), nn.ReLU(), nn.Linear(width, 10)).eval()


def answer(model: torch.nn.Module, kind: int) -> None:
    """Answer one request."""
    import torch

    with torch.inference_mode():
        x = torch.ones(1, 3, 32, 32, device=next(model.parameters()).device)
        model(x if kind % 2 else x.flatten(1)).sum().item()


def plan(seconds: float, seed: int) -> list[tuple[float, int, int]]:
    """(moment in seconds, kind, copy) of the requests."""
    draw, moment, found = random.Random(seed), 0.0, []
    while moment < seconds:
        moment += draw.expovariate(RATE)
        found.append((moment, draw.randrange(KINDS), draw.randrange(COPIES)))
    return found


def resident(begin: Any, directory: str, seconds: float, device: str = "cpu") -> list[float]:
    """Latencies in seconds with all models on the device."""
    import torch

    pin()
    torch.set_num_threads(1)
    requests: dict[tuple[int, int], Queue[float | None]] = {}
    latencies: list[float] = []
    ready = threading.Semaphore(0)

    def serve(kind: int, gate: Gate, queue: Queue[float | None]) -> None:
        model = build(kind).to(device)
        answer(model, kind)
        ready.release()
        while (asked := queue.get()) is not None:
            with gate.iteration():
                answer(model, kind)
            latencies.append(time.perf_counter() - asked)
        gate.leave()

    table = LaneTable(CAPACITY)
    pool, futures = ThreadPoolExecutor(KINDS * COPIES), []
    for kind in range(KINDS):
        size = 4 * sum(parameter.numel() for parameter in build(kind).parameters())
        for copy in range(COPIES):
            queue, name = Queue[float | None](), f"{kind}-{copy}"
            lane = table.admit(name, size, 8 << 20)
            if lane is not None:  # else there is no room for it, and its requests are not sent
                requests[kind, copy] = queue
                futures.append(pool.submit(serve, kind, Gate(Path(directory), name, "PACK", lane=lane), queue))
    all_ready(ready, futures)
    begin()
    started = time.perf_counter()
    for moment, kind, copy in plan(seconds, 1):
        time.sleep(max(0.0, started + moment - time.perf_counter()))
        if (kind, copy) in requests:
            requests[kind, copy].put(time.perf_counter())
    for queue in requests.values():
        queue.put(None)
    for future in futures:
        future.result()
    return latencies


def one_at_a_time(begin: Any, seconds: float, reload: bool, device: str = "cpu") -> list[float]:
    """Latencies in seconds, one request after another: the model is there (alone), or is loaded for each request."""
    import torch

    pin()
    torch.set_num_threads(1)
    models = {kind: build(kind).to(device) for kind in range(KINDS)}
    saved = {}
    for kind, model in models.items():
        answer(model, kind)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        saved[kind] = file.getvalue()
    begin()
    latencies = []
    for _, kind, _ in plan(seconds, 1):
        asked = time.perf_counter()
        model = models[kind]
        if reload:
            # Its parameters come from host memory. The rest of the model is there already.
            model.load_state_dict(torch.load(io.BytesIO(saved[kind]), weights_only=True))
        answer(model, kind)
        latencies.append(time.perf_counter() - asked)
    return latencies


def figures_of(latencies: list[float]) -> dict[str, float]:
    """Mean and 95 % of latencies, in milliseconds."""
    return {"milliseconds": mean(latencies) * 1e3, "p95": quantiles(latencies, n=20)[-1] * 1e3}


def main() -> None:
    """The command."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    seconds = 3.0 if options.quick else 30.0
    with device_home() as directory:
        _, (latencies,) = together(resident, [(str(directory), seconds)])
    shared = figures_of(latencies)
    say(f"resident: {shared['milliseconds']:.2f} ms over {len(latencies)} requests")
    alone = figures_of(together(one_at_a_time, [(seconds, False)])[1][0])
    reload = figures_of(together(one_at_a_time, [(seconds, True)])[1][0])
    say(f"alone: {alone['milliseconds']:.2f} ms, reload: {reload['milliseconds']:.2f} ms")
    finish(
        result(
            "inference",
            "cpu:1",
            "real",
            models=KINDS * COPIES,
            requests=len(latencies),
            sides={"resident": shared, "reload": reload},
            ratios={"reload": reload["milliseconds"] / shared["milliseconds"]},
            ratio=reload["milliseconds"] / shared["milliseconds"],
            alone=alone,
            added={"milliseconds": shared["milliseconds"] - alone["milliseconds"]},
        ),
        options.json,
    )


if __name__ == "__main__":
    main()

"""What the front of `fluidtune serve` costs a request: a model that takes no time, asked by clients in a closed loop.

``python -m benchmarks.serve_front --json [--quick] [--seconds S]``. Needs ``fluidtune[dev,serve]``. The clients are
processes of their own. ``per_core_s`` has the requests that the front answers for each second of its CPU time, so that
the clients and the model process, which share the machine, do not count. ``rate`` has the requests/s that came with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import finish, free_ports, parser, result, say

#: Seconds of the SLO, and of one run.
SLO_S, SECONDS = 0.5, 5.0
#: Processes of clients, and connections of each. Judgement: a few batches.
PROCESSES, CONNECTIONS = 2, 32


def train(config: dict[str, Any]) -> None:
    """A trial that reports a checkpoint with nothing in it."""
    from ray import tune
    from ray.tune import Checkpoint

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "nothing").touch()
        tune.report({"score": 1.0}, checkpoint=Checkpoint.from_directory(directory))


def load(directory: str, config: dict[str, Any]) -> Callable[[list[float]], list[float]]:
    def same(inputs: list[float]) -> list[float]:
        return inputs

    same.samples = [1, 2.5]  # type: ignore[attr-defined]
    return same


def ask(port: int, seconds: float, answered: Any) -> None:
    """A process of clients: each asks again at once. ``answered``: how many got 200."""
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n1"

    async def one(end: float) -> int:
        got = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
            got += head[9:12] == b"200"
        writer.close()
        return got

    async def run() -> None:
        end = time.monotonic() + seconds
        answered.value = sum(await asyncio.gather(*[one(end) for _ in range(CONNECTIONS)]))

    asyncio.run(run())


def measure(port: int, front: psutil.Process, seconds: float) -> tuple[int, float, float]:
    """Answered requests, the front's seconds of CPU time, and the seconds that it took."""
    context = multiprocessing.get_context("spawn")
    counts = [context.Value("q", 0) for _ in range(PROCESSES)]
    processes = [context.Process(target=ask, args=(port, seconds, each)) for each in counts]
    before, begin = sum(front.cpu_times()[:2]), time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    spent, took = sum(front.cpu_times()[:2]) - before, time.monotonic() - begin
    return sum(each.value for each in counts), spent, took


def run(seconds: float) -> dict[str, Any]:
    """The benchmark's JSON object."""
    import ray
    from ray import tune

    import fluidtune

    with contextlib.ExitStack() as stack:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        storage = stack.enter_context(tempfile.TemporaryDirectory())
        with contextlib.redirect_stdout(sys.stderr):
            tune.Tuner(train, run_config=tune.RunConfig(name="nothing", storage_path=storage, verbose=0)).fit()
        (port,) = free_ports(1)
        given = {"metric": "score", "mode": "max", "port": port}
        served = stack.enter_context(fluidtune.serve(str(Path(storage, "nothing")), load, SLO_S, **given))
        front = psutil.Process(served.status()["pid"])
        measure(port, front, 1.0)
        count, spent, took = measure(port, front, seconds)
    say(f"{count} requests, {spent:.2f} s of the front's CPU time in {took:.2f} s")
    figures = {"rate": round(count / took), "per_core_s": round(count / spent), "seconds": seconds}
    return result("serve_front", "cpu:2", "real", ratio=None, **figures)


def main() -> None:
    """The command."""
    options = parser("What the front of fluidtune serve costs a request.")
    options.add_argument("--seconds", type=float, default=SECONDS, help=f"of one run ({SECONDS:g}; with --quick 1)")
    given = options.parse_args()
    finish(run(1.0 if given.quick else given.seconds), given.json)


if __name__ == "__main__":
    main()

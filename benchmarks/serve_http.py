"""A real model over HTTP under open-loop load: `fluidtune serve` against Ray Serve's own `@serve.batch`.

``python -m benchmarks.serve_http --json [--quick] [--only SIDE ...] [--seconds S] [--seed N]``. Needs
``fluidtune[serve]``. The model is the network of `benchmarks.serve_real`, loaded from the checkpoint of a trial, on one
core. Both sides have Ray Serve's HTTP proxy in front and the same requests; the client is this process.

- ``deferred``, ``eager``: `fluidtune.serve` with these starts. One process has the scheduler, another one the model.
- ``serve_batch``: one replica with the model, whose method is decorated with ``@serve.batch``. It has its best setting
  of size, wait and of the most requests that may wait (more get 503 at once). The setting is searched for each arrivals
  and load with the same requests; ``setting`` says which.

By side, arrivals (``poisson``; ``bursty``: Gamma gaps of shape 0.1) and load: ``goodput`` (requests/s answered within
the SLO, from the moment at which the request was to be sent), ``p99_ms`` (of the answered ones), ``good``, ``late``,
``refused``, ``failed`` (parts of all) and ``lag_ms`` (the 99th percentile of how late the client sent). Load 1 is the
rate at which ``serve_batch`` answers 128 clients that each ask again at once, with its best size. ``ratios`` has by
side the goodput of that side over that of ``serve_batch``, where it is least; ``loadavg`` the machine's load before
and after. Whoever else uses the machine changes the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import finish, free_ports, parser, result, say
from benchmarks.serve_real import LOADS, SHAPES, Load, classify, digits_network, quantile
from symphony_serve.workloads import arrivals

#: Seconds. Judgement: ten times the way through the proxy on a busy machine of two cores.
SLO_S = 0.5
MAX_BATCH = 64
#: The network's channels. Judgement: 12 ms a request. A network of 256 channels answered 257 requests/s on two cores
#: that others used as well; there the proxy and the client are the limit, and not the model.
WIDTH = 640
#: Settings of ``@serve.batch`` that are tried: size, wait in seconds, and how many batches may wait.
SIZES, WAITS, LIMITS = (8, 16, 32), (0.0, 0.05), (1, 2, None)
#: Clients of the closed loop that measures load 1, and for how many seconds each.
CLIENTS, CLOSED_S = 128, 3.0
#: Seconds of one run. Judgement: eight SLOs.
SECONDS = 4.0
SIDES = ("serve_batch", "deferred", "eager")


def train(config: dict[str, Any]) -> None:
    """A trial that reports its network as it is; its weights do not matter for its time."""
    import torch
    from ray import tune
    from ray.tune import Checkpoint

    with tempfile.TemporaryDirectory() as directory:
        torch.save(digits_network(WIDTH).state_dict(), os.path.join(directory, "state.pt"))
        tune.report({"accuracy": 0.1}, checkpoint=Checkpoint.from_directory(directory))


def load(directory: str, config: dict[str, Any]) -> Callable[[list[Any]], list[int]]:
    """The network of the trial."""
    import torch

    network = digits_network(WIDTH)
    network.load_state_dict(torch.load(os.path.join(directory, "state.pt")))

    def answer(images: list[Any]) -> list[int]:
        return classify(network, [torch.tensor(image).reshape(1, 8, 8) for image in images])

    answer.samples = images()  # type: ignore[attr-defined]
    return answer


def images() -> list[Any]:
    """64 inputs, 8 x 8 numbers each."""
    import random

    draw = random.Random(0)
    return [[[round(draw.random(), 4) for _ in range(8)] for _ in range(8)] for _ in range(64)]


@contextlib.contextmanager
def ours(run: str, starts: str, port: int) -> Iterator[None]:
    """`fluidtune.serve`."""
    import fluidtune

    with fluidtune.serve(
        run, load, SLO_S, starts=starts, metric="accuracy", mode="max", max_batch=MAX_BATCH, port=port
    ):
        yield


@contextlib.contextmanager
def batching(run: str, port: int) -> Iterator[Callable[[int, float, int | None], None]]:
    """Ray Serve's own batching; it yields a function that sets size, wait and limit."""
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    from fluidtune.serving.winners import winners

    trial = winners(run, 1, "accuracy", "max")[0]

    class Batching:
        def __init__(self) -> None:
            with trial.checkpoint.as_directory() as directory:
                self._model = load(directory, trial.config)
            self._waiting, self._limit = 0, 1 << 30

        def set(self, size: int, wait: float, limit: int | None) -> None:
            self.answer.set_max_batch_size(size)  # type: ignore[attr-defined]
            self.answer.set_batch_wait_timeout_s(wait)  # type: ignore[attr-defined]
            self._limit = 1 << 30 if limit is None else (1 + limit) * size

        @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=0.0)
        async def answer(self, inputs: list[Any]) -> list[int]:
            return self._model(inputs)

        async def __call__(self, request: Request) -> Response:
            if self._waiting >= self._limit:
                return Response("{}", 503)
            self._waiting += 1
            try:
                return Response(json.dumps(await self.answer(json.loads(await request.body()))))
            finally:
                self._waiting -= 1

    logs = {"log_level": "WARNING", "enable_access_log": False}
    deployment = serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 1}, logging_config=logs)
    serve.start(http_options=serve.HTTPOptions(host="127.0.0.1", port=port), logging_config=logs)
    handle = serve.run(deployment(Batching).bind())
    try:
        yield lambda size, wait, limit: handle.set.remote(size, wait, limit).result()
    finally:
        serve.shutdown()


class Client:
    """Sends requests to the port, and counts."""

    def __init__(self, port: int, expected: Sequence[int]):
        self._url, self._expected = f"http://127.0.0.1:{port}/", expected
        self._bodies = [json.dumps(image).encode() for image in images()]

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
            yield session

    async def _ask(self, session: Any, number: int) -> int:
        """The status. Raises RuntimeError if an answer is not the model's."""
        image = number % len(self._bodies)
        async with session.post(self._url, data=self._bodies[image]) as answer:
            said = await answer.read()
            if answer.status == 200 and json.loads(said) != self._expected[image]:
                raise RuntimeError(f"the answer {said!r} is not that of the model, {self._expected[image]}")
            return int(answer.status)

    def closed(self, seconds: float) -> float:
        """Requests/s that are answered to `CLIENTS` clients, each of which asks again at once."""

        async def run() -> float:
            async with self._session() as session:
                end, done = time.monotonic() + seconds, 0

                async def one(number: int) -> None:
                    nonlocal done
                    while time.monotonic() < end:
                        answered = await self._ask(session, number) == 200
                        done += answered  # (`done += await ...` would lose what others count meanwhile)

                await asyncio.gather(*(one(number) for number in range(CLIENTS)))
                return done / seconds

        return asyncio.run(run())

    def open(self, given: Load) -> dict[str, float | None]:
        """Send the load, wait for all answers, and count."""
        moments = []
        for request in arrivals({"digits": given.rate}, {"digits": SLO_S}, given.seed, given.shape):
            if request.arrival > given.seconds:
                break
            moments.append(request.arrival)
        latencies, statuses, lags = [], [], []

        async def one(session: Any, number: int, due: float) -> None:
            lags.append(max(0.0, time.monotonic() - due))
            status = await self._ask(session, number)
            statuses.append(status)
            if status == 200:
                latencies.append(time.monotonic() - due)

        async def run() -> None:
            async with self._session() as session:
                begin, tasks = time.monotonic() + 0.05, []
                for number, moment in enumerate(moments):
                    await asyncio.sleep(max(0.0, begin + moment - time.monotonic()))
                    tasks.append(asyncio.create_task(one(session, number, begin + moment)))
                await asyncio.gather(*tasks)

        asyncio.run(run())
        good, sent = sum(latency <= SLO_S for latency in latencies), max(1, len(moments))
        refused = statuses.count(503)
        return {
            "goodput": round(good / given.seconds, 1),
            "p99_ms": round(1e3 * quantile(latencies, 0.99), 1) if latencies else None,
            "good": round(good / sent, 4),
            "late": round((len(latencies) - good) / sent, 4),
            "refused": round(refused / sent, 4),
            "failed": round((len(moments) - len(latencies) - refused) / sent, 4),
            "lag_ms": round(1e3 * quantile(lags, 0.99), 1) if lags else None,
        }


def loads(rate: float, seconds: float, seed: int, quick: bool) -> Iterator[tuple[str, str, Load]]:
    """Arrivals, load by name, and the load."""
    for (name, shape), part in product(SHAPES.items(), (1.2,) if quick else LOADS):
        yield name, f"{part:g}", Load(part * rate, shape, seconds, seed)


def side_of_batching(
    run: str, expected: Sequence[int], seconds: float, seed: int, quick: bool
) -> tuple[float, dict[str, Any]]:
    """Load 1 in requests/s, and the figures of ``serve_batch``."""
    settings = list(product(SIZES, WAITS, LIMITS)) if not quick else [(16, 0.0, 1), (32, 0.0, None)]
    found: dict[str, Any] = {}
    (port,) = free_ports(1)
    client = Client(port, expected)
    with batching(run, port) as choose:
        rates = []
        for size in sorted({setting[0] for setting in settings}):
            choose(size, 0.0, None)
            client.closed(0.5)
            rates.append(client.closed(1.0 if quick else CLOSED_S))
            say(f"serve_batch, size {size}: {rates[-1]:.0f} requests/s in the closed loop")
        for name, part, given in loads(max(rates), seconds, seed, quick):
            tried = {}
            for setting in settings:
                choose(*setting)
                tried[setting] = client.open(given._replace(seconds=seconds / 2))
            best = max(tried, key=lambda setting: tried[setting]["goodput"])
            choose(*best)
            figures: dict[str, Any] = client.open(given)
            figures["setting"] = {"size": best[0], "wait_ms": round(1e3 * best[1]), "batches_waiting": best[2]}
            found.setdefault(name, {})[part] = figures
            say(f"serve_batch, {name}, load {part}: {figures}")
    return max(rates), found


def side_of_ours(
    starts: str, rate: float, run: str, expected: Sequence[int], seconds: float, seed: int, quick: bool
) -> dict[str, Any]:
    """The figures of `fluidtune.serve`."""
    found: dict[str, Any] = {}
    (port,) = free_ports(1)
    client = Client(port, expected)
    with ours(run, starts, port):
        client.closed(0.5)
        for name, part, given in loads(rate, seconds, seed, quick):
            figures = found.setdefault(name, {})[part] = client.open(given)
            say(f"{starts}, {name}, load {part}: {figures}")
    return found


def run_all(given: Sequence[str], seconds: float, seed: int, quick: bool) -> dict[str, Any]:
    """The benchmark's JSON object."""
    import ray
    import torch
    from ray import tune

    before = os.getloadavg()[0]
    expected = classify(digits_network(WIDTH), [torch.tensor(image).reshape(1, 8, 8) for image in images()])
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as storage:
            with contextlib.redirect_stdout(sys.stderr):  # Tune prints a table even so.
                tune.Tuner(train, run_config=tune.RunConfig(name="digits", storage_path=storage, verbose=0)).fit()
            run = str(Path(storage) / "digits")
            rate, of_batching = side_of_batching(run, expected, seconds, seed, quick)
            sides = {"serve_batch": of_batching}
            for starts in SIDES[1:]:
                if starts in given:
                    sides[starts] = side_of_ours(starts, rate, run, expected, seconds, seed, quick)
    finally:
        ray.shutdown()
    least = {
        starts: round(
            min(
                side[name][part]["goodput"] / max(1.0, of_batching[name][part]["goodput"])
                for name in side
                for part in side[name]
            ),
            3,
        )
        for starts, side in sides.items()
        if starts != "serve_batch"
    }
    return result(
        "serve_http",
        "cpu:2",
        "real",
        sides=sides,
        ratios=least,
        ratio=min(least.values(), default=None),
        capacity=round(rate, 1),
        slo_ms=1e3 * SLO_S,
        loadavg=[before, os.getloadavg()[0]],
        seed=seed,
    )


def main() -> None:
    """The command."""
    options = parser("A real model over HTTP: fluidtune serve against @serve.batch.")
    options.add_argument("--only", nargs="+", choices=SIDES[1:], help="these sides beside serve_batch (all)")
    options.add_argument("--seconds", type=float, default=SECONDS, help=f"of one run ({SECONDS:g}; with --quick 1)")
    options.add_argument("--seed", type=int, default=1, help="seed of the arrivals (1)")
    given = options.parse_args()
    seconds = 1.0 if given.quick else given.seconds
    finish(run_all(given.only or SIDES, seconds, given.seed, given.quick), given.json)


if __name__ == "__main__":
    main()

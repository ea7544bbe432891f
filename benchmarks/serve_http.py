"""A real model over HTTP under open-loop load: `fluidtune serve` against Ray Serve's own `@serve.batch`.

``python -m benchmarks.serve_http --json [--quick] [--repeats N] [--only SIDE ...] [--seconds S] [--seed N]``. Needs
``fluidtune[dev,serve]``. The model is the network of `benchmarks.serve_real`, loaded from the checkpoint of a trial, on
one core. Both sides have the same requests; the client is a process of its own. It takes about 16 minutes on a quiet
machine of two cores: 6 for the search of settings, and 3 for each repeat.

- ``deferred``, ``eager``: `fluidtune.serve` with these starts. One process has the scheduler, another one the model.
- ``serve_batch``: one replica with the model, whose method is decorated with ``@serve.batch``. It has its best setting
  of size, wait and of the most requests that may wait (more get 503 at once). For each arrivals and load all sizes and
  limits are tried with the same requests for as long as a run takes, without a wait. The best of them is tried with a
  wait as well: a wait can only help where the queue becomes empty. (All sizes, limits and waits would take 5 minutes
  more; no wait was best in 7 of 8 searches.) The two best settings are measured in each repeat, and the one with the
  better median counts; ``setting`` says which.

The sides run in turn, ``--repeats`` times, each time in new processes. By side, arrivals (``poisson``; ``bursty``:
Gamma gaps of shape 0.1) and load there are medians over the repeats: ``goodput`` (requests/s answered within the SLO,
from the moment at which the request was to be sent), ``p99_ms`` (of the answered ones), ``refused_p99_ms`` (of those
that got 503), ``good``, ``late``, ``refused``, ``failed`` (parts of all) and ``lag_ms`` (the 99th percentile of how
late the client sent). ``all`` has the repeats. ``within_slo`` says whether the two 99th percentiles are within the SLO
(null: nothing was answered, or refused); it is printed as held or missed, and nothing depends on it.

Load 1 is the rate at which ``serve_batch`` answers 128 clients that each ask again at once, with its best size.
``ratios`` has by side the goodput of that side over that of ``serve_batch``, where it is least; ``loadavg`` the
machine's load before and after. Whoever else uses the machine changes the figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import finish, free_ports, parser, result, say
from benchmarks.serve_http_client import CLIENTS, Clients, Row, images
from benchmarks.serve_real import LOADS, SHAPES, Load, classify, digits_network

#: Seconds. Judgement: ten times the way through the proxy on a busy machine of two cores.
SLO_S = 0.5
MAX_BATCH = 64
#: The network's channels. Judgement: 12 ms a request. A network of 256 channels answered 257 requests/s on two cores
#: that others used as well; there the proxy and the client are the limit, and not the model.
WIDTH = 640
#: Settings of ``@serve.batch`` that are tried: size, how many batches may wait, and the wait in seconds of the best.
SIZES, LIMITS, WAIT_S = (8, 16, 32), (1, 2, None), 0.05
#: How many of the best settings are measured in each repeat. Judgement: one run says which are good, not which is best.
FINALISTS = 2
#: Seconds of the closed loop that measures load 1, for each size.
CLOSED_S = 3.0
#: Seconds of one run. Judgement: eight SLOs.
SECONDS = 4.0
SIDES = ("serve_batch", "deferred", "eager")


class Setting(NamedTuple):
    """Of ``@serve.batch``: the most requests of a batch, seconds, and how many batches may wait (None: any number)."""

    size: int
    wait: float
    limit: int | None

    def __str__(self) -> str:
        return f"size {self.size}, wait {1e3 * self.wait:.0f} ms, {self.limit} batches waiting"


#: Sets `Setting` at the replica of ``@serve.batch``.
Choose = Callable[[Setting], None]


class Cell(NamedTuple):
    """A row of the result: arrivals, load by name, and what is sent."""

    arrivals: str
    load: str
    sent: Load


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


@contextlib.contextmanager
def ours(run: str, starts: str, port: int) -> Iterator[None]:
    """`fluidtune.serve`."""
    import fluidtune

    with fluidtune.serve(
        run, load, SLO_S, starts=starts, metric="accuracy", mode="max", max_batch=MAX_BATCH, port=port
    ):
        yield


@contextlib.contextmanager
def batching(run: str, port: int) -> Iterator[Choose]:
    """Ray Serve's own batching; it yields a function that chooses the setting."""
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
        yield lambda setting: handle.set.remote(*setting).result()
    finally:
        serve.shutdown()


class Bench:
    """The run that is served, the client, and the rows.

    rate: load 1, requests/s. settings: by arrivals and load, those of ``@serve.batch`` that are measured.
    """

    def __init__(self, run: str, clients: Clients, seconds: float, seed: int, quick: bool):
        self._run, self._clients, self._quick = run, clients, quick
        self._seconds, self._seed = seconds, seed
        self.rate = 0.0
        self.settings: dict[tuple[str, str], list[Setting]] = {}

    def cells(self) -> Iterator[Cell]:
        """The rows."""
        for (name, shape), part in product(SHAPES.items(), (1.2,) if self._quick else LOADS):
            yield Cell(name, f"{part:g}", Load(part * self.rate, shape, self._seconds, self._seed))

    def search(self) -> None:
        """Find load 1, and the best settings of ``@serve.batch`` for each row."""
        (port,) = free_ports(1)
        settings = [Setting(size, 0.0, limit) for size, limit in product(SIZES, LIMITS)]
        if self._quick:
            settings = [Setting(16, 0.0, 1), Setting(32, 0.0, None)]
        with batching(self._run, port) as choose:
            for size in sorted({setting.size for setting in settings}):
                choose(Setting(size, 0.0, None))
                self._clients.closed(port, 0.5)
                rate = self._clients.closed(port, 1.0 if self._quick else CLOSED_S)
                say(f"serve_batch, size {size}: {rate:.0f} requests/s to {CLIENTS} clients in a closed loop")
                self.rate = max(self.rate, rate)
            for cell in self.cells():

                def tried(setting: Setting, sent: Load = cell.sent) -> float:
                    choose(setting)
                    return self._clients.open(port, sent)["goodput"] or 0.0

                self.settings[cell.arrivals, cell.load] = found = best_settings(settings, tried)
                say(f"serve_batch, {cell.arrivals}, load {cell.load}: {'; or '.join(map(str, found))}")

    def measure(self, side: str) -> dict[tuple[str, str, Setting | None], Row]:
        """All rows of one side, in new processes."""
        (port,) = free_ports(1)
        rows: dict[tuple[str, str, Setting | None], Row] = {}
        with contextlib.ExitStack() as stack:
            choose = None
            if side == "serve_batch":
                choose = stack.enter_context(batching(self._run, port))
            else:
                stack.enter_context(ours(self._run, side, port))
            self._clients.closed(port, 0.5)
            for cell in self.cells():
                for setting in [None] if choose is None else self.settings[cell.arrivals, cell.load]:
                    if choose is not None and setting is not None:
                        choose(setting)
                    row = self._clients.open(port, cell.sent)
                    rows[cell.arrivals, cell.load, setting] = row
                    say(f"{side}, {cell.arrivals}, load {cell.load}: {row}")
        return rows


def best_settings(settings: Sequence[Setting], tried: Callable[[Setting], float]) -> list[Setting]:
    """The `FINALISTS` with the highest goodput among these and the best of these with a wait."""
    found = {setting: tried(setting) for setting in settings}
    waiting = max(found, key=found.__getitem__)._replace(wait=WAIT_S)
    found[waiting] = tried(waiting)
    return sorted(found, key=found.__getitem__, reverse=True)[:FINALISTS]


def median_row(rows: Sequence[Row], slo_ms: float) -> dict[str, Any]:
    """The median of each figure over the repeats that have it, all repeats, and what is within the SLO."""
    found: dict[str, Any] = {}
    for key in rows[0]:
        values = [value for row in rows if (value := row[key]) is not None]
        found[key] = statistics.median(values) if values else None
    found["within_slo"] = {
        name: None if found[key] is None else found[key] <= slo_ms
        for name, key in (("answers", "p99_ms"), ("refusals", "refused_p99_ms"))
    }
    return {**found, "all": list(rows)}


def medians(turns: Sequence[Mapping[tuple[str, str, Setting | None], Row]], slo_ms: float) -> dict[str, Any]:
    """One side, by arrivals and load. Where several settings were measured, that with the highest median counts."""
    side: dict[str, Any] = {}
    for name, load, setting in turns[0]:
        row = median_row([turn[name, load, setting] for turn in turns], slo_ms)
        if setting is not None:
            wait = round(1e3 * setting.wait)
            row["setting"] = {"size": setting.size, "wait_ms": wait, "batches_waiting": setting.limit}
        before = side.setdefault(name, {}).get(load)
        if before is None or row["goodput"] > before["goodput"]:
            side[name][load] = row
    return side


def summarise(sides: Mapping[str, Any]) -> dict[str, float]:
    """By side, the least ratio of its goodput to that of ``serve_batch``; says what is within the SLO."""
    words = {None: "none", True: "held", False: "missed"}
    for side, by_arrivals in sides.items():
        for name, by_load in by_arrivals.items():
            for load, row in by_load.items():
                held = ", ".join(f"{what} {words[within]}" for what, within in row["within_slo"].items())
                say(f"{side}, {name}, load {load}: {row['goodput']} requests/s; p99 within the SLO: {held}")
    others = sides["serve_batch"]
    return {
        side: round(
            min(
                rows[name][load]["goodput"] / max(1.0, others[name][load]["goodput"])
                for name in rows
                for load in rows[name]
            ),
            3,
        )
        for side, rows in sides.items()
        if side != "serve_batch"
    }


def run_all(given: Sequence[str], repeats: int, seconds: float, seed: int, quick: bool) -> dict[str, Any]:
    """The benchmark's JSON object."""
    import ray
    import torch
    from ray import tune

    before = os.getloadavg()[0]
    expected = classify(digits_network(WIDTH), [torch.tensor(image).reshape(1, 8, 8) for image in images()])
    turns: dict[str, list[dict[tuple[str, str, Setting | None], Row]]] = {"serve_batch": []}
    turns |= {starts: [] for starts in SIDES[1:] if starts in given}
    with contextlib.ExitStack() as stack:
        clients = stack.enter_context(Clients(expected, SLO_S))
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        storage = stack.enter_context(tempfile.TemporaryDirectory())
        with contextlib.redirect_stdout(sys.stderr):  # Tune prints a table even so.
            tune.Tuner(train, run_config=tune.RunConfig(name="digits", storage_path=storage, verbose=0)).fit()
        bench = Bench(str(Path(storage) / "digits"), clients, seconds, seed, quick)
        bench.search()
        for turn in range(repeats):
            for side, measured in turns.items():
                say(f"[{turn + 1}/{repeats}] {side}")
                measured.append(bench.measure(side))
    sides = {side: medians(measured, 1e3 * SLO_S) for side, measured in turns.items()}
    least = summarise(sides)
    return result(
        "serve_http",
        "cpu:2",
        "real",
        sides=sides,
        ratios=least,
        ratio=min(least.values(), default=None),
        capacity=round(bench.rate, 1),
        slo_ms=1e3 * SLO_S,
        repeats=repeats,
        seconds=seconds,
        loadavg=[before, os.getloadavg()[0]],
        seed=seed,
    )


def main() -> None:
    """The command."""
    options = parser("A real model over HTTP: fluidtune serve against @serve.batch.")
    options.add_argument("--repeats", type=int, help="how often each side runs; medians are compared (3; --quick: 1)")
    options.add_argument("--only", nargs="+", choices=SIDES[1:], help="these sides beside serve_batch (all)")
    options.add_argument("--seconds", type=float, default=SECONDS, help=f"of one run ({SECONDS:g}; with --quick 1)")
    options.add_argument("--seed", type=int, default=1, help="seed of the arrivals (1)")
    given = options.parse_args()
    seconds, repeats = (1.0, given.repeats or 1) if given.quick else (given.seconds, given.repeats or 3)
    finish(run_all(given.only or SIDES, repeats, seconds, given.seed, given.quick), given.json)


if __name__ == "__main__":
    main()

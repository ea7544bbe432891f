"""A real model served by an event loop under open-loop load: deferred and eager starts, and the rule of `serve.batch`.

``python -m benchmarks.serve_real --json [--quick] [--only PART ...] [--seconds S] [--seed N]``. The model is the
network of ``examples/digits_elastic.py`` on one core; the server, its clients and the model are threads of one process.
This is not the comparison with Ray Serve over HTTP.

- ``loads``: by arrivals (``poisson``; ``bursty``: Gamma gaps of shape 0.1) and by load, for each side: ``goodput``
  (requests/s answered within the SLO, from the moment at which the request was to be sent), ``p99_ms`` (of the answered
  ones), ``good``, ``late``, ``refused`` (parts of all), ``lag_ms`` (the 99th percentile of how late they were sent).
  Load 1 is the rate of the batches that have the most requests/s within half of the SLO, as measured at the start.
- ``quantiles``: the same for deferred starts by `seen_times.QUANTILE`.

The side ``serve_batch`` has its best setting of size, wait and limit of the queue, which is searched for each arrivals
and load with the same requests; ``setting`` says which. ``ratios`` has, by side, the goodput of deferred starts
divided by that of the side, where it is least. Whoever else uses the machine changes the figures: ``loadavg`` has the
machine's load before and after.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.common import finish, parser, result, say
from benchmarks.rival_servers import Server
from benchmarks.rival_servers.fifo import Fifo
from benchmarks.rival_servers.serve_batch import ServeBatch
from benchmarks.serve_arrivals import arrivals
from benchmarks.served_by_thread import ServedByThread
from symphony_serve import seen_times
from symphony_serve.batching.window import Window
from symphony_serve.errors import Refused
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.device import LocalDevice
from symphony_serve.shell.measuring import measure_models

#: The network's channels: so wide that one core, and not the clients, limits the requests. Judgement: about 2 ms each.
WIDTH = 256
#: Seconds. Judgement: 50 times a request alone, and far above what threads of a busy machine are late.
SLO_S = 0.2
MAX_BATCH = 64
LOADS = (0.5, 0.8, 1.0, 1.2)
SHAPES = {"poisson": 1.0, "bursty": 0.1}
#: Settings of `ServeBatch` that are tried: size, wait as a part of the SLO, and how many batches may wait.
SIZES, WAITS, LIMITS = (8, 16, 32, 64), (0.0, 0.15, 0.4), (1, None)
QUANTILES = (0.5, 0.75, 0.9, 0.98)
#: Seconds of one run. Judgement: 40 SLOs.
SECONDS = 4.0


class Load(NamedTuple):
    """What is sent: requests/s, the shape of the gaps, for so many seconds, by a seed."""

    rate: float
    shape: float
    seconds: float
    seed: int


class Decided(AsyncServer):
    """An `AsyncServer` for which somebody else decides."""

    def __init__(self, decides: Callable[[Sequence[Model]], Server], *given: Any):
        self._make = decides
        super().__init__(*given)

    def _decides(self, models: Sequence[Model]) -> Server:
        return self._make(models)


def digits_network(width: int = WIDTH) -> nn.Module:
    """The network of the example with so many channels; its weights do not matter for its time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).eval()


def classify(network: nn.Module, images: list[torch.Tensor]) -> list[int]:
    """The digit of each image."""
    with torch.inference_mode():
        return network(torch.stack(images)).argmax(1).tolist()


def send(server: ServedByThread, images: torch.Tensor, expected: list[int], load: Load) -> dict[str, float]:
    """Send the load, wait for all answers, and count. Raises RuntimeError if an answer is not the model's."""
    latencies: list[float] = []
    refused, wrong, lags = [0], [0], []
    lock, sent = threading.Lock(), 0

    def note(due: float, image: int, answer: Any) -> None:
        ended, error = time.monotonic() - due, answer.exception()
        with lock:
            if error is None:
                latencies.append(ended)
                wrong[0] += answer.result() != expected[image]
            elif isinstance(error, Refused):
                refused[0] += 1
            else:
                wrong[0] += 1

    begin = time.monotonic() + 0.05
    for request in arrivals({"digits": load.rate}, {"digits": SLO_S}, load.seed, load.shape):
        if request.arrival > load.seconds:
            break
        due, image = begin + request.arrival, request.id % len(images)
        left = due - time.monotonic()
        if left > 0:
            time.sleep(left)
        lags.append(max(0.0, time.monotonic() - due))
        server.submit("digits", images[image]).add_done_callback(partial(note, due, image))
        sent += 1
    while len(latencies) + refused[0] + wrong[0] < sent:
        time.sleep(0.01)
    if wrong[0]:
        raise RuntimeError(f"{wrong[0]} of {sent} answers are errors, or not those of the model")
    good = sum(latency <= SLO_S for latency in latencies)
    return {
        "goodput": round(good / load.seconds, 1),
        "p99_ms": round(1e3 * quantile(latencies, 0.99), 1) if latencies else None,
        "good": round(good / sent, 4),
        "late": round((len(latencies) - good) / sent, 4),
        "refused": round(refused[0] / sent, 4),
        "lag_ms": round(1e3 * quantile(lags, 0.99), 1),
    }


def quantile(values: list[float], part: float) -> float:
    """The value that the part 1 - ``part`` of the values exceeds."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


class Bench:
    """The model, its inputs and the measured profile."""

    def __init__(self, width: int, most: int) -> None:
        self._most, network = most, digits_network(width)
        self._images = torch.rand(256, 1, 8, 8)
        self._expected = classify(network, list(self._images))
        self._devices = [{"digits": partial(classify, network)}]
        self.model = self._measured(DEFERRED, Window)
        table = self.model.profile.table
        sizes = range(1, max(1, self.model.profile.largest(SLO_S / 2)) + 1)
        self.capacity = max(size / table[size] for size in sizes)

    def _measured(self, policy: Any, gathering: Any) -> Model:
        devices, inputs = [LocalDevice(one) for one in self._devices], {"digits": list(self._images[:64])}
        return asyncio.run(measure_models(devices, inputs, {"digits": SLO_S}, self._most, None, policy, gathering))[0]

    def ours(self, policy: Any, gathering: Any, load: Load) -> dict[str, float]:
        """Our scheduler with this policy; its profile is measured anew, as at each start."""
        with ServedByThread([self._measured(policy, gathering)], self._devices) as server:
            return send(server, self._images, self._expected, load)

    def serve_batch(self, size: int, wait: float, limit: int | None, load: Load) -> dict[str, float]:
        """The rule of `serve.batch`."""
        most = None if limit is None else limit * size

        def decides(models: Sequence[Model]) -> Server:
            return ServeBatch(models, size, wait * SLO_S, most)

        with ServedByThread([self.model], self._devices, kind=partial(Decided, decides)) as server:
            return send(server, self._images, self._expected, load)

    def sides(self, load: Load, quick: bool) -> dict[str, dict[str, Any]]:
        """All sides with the same requests, the best setting of `serve.batch` among them."""
        found: dict[str, dict[str, Any]] = {}
        for name, policy, gathering in (
            ("deferred_window", DEFERRED, Window),
            ("eager_window", EAGER, Window),
            ("eager_fifo", EAGER, Fifo),
        ):
            found[name] = self.ours(policy, gathering, load)
        settings = list(product(SIZES, WAITS, LIMITS)) if not quick else [(16, 0.15, 1), (64, 0.0, 1), (32, 0.0, None)]
        search = load._replace(seconds=load.seconds / 2)
        tried = {setting: self.serve_batch(*setting, search) for setting in settings}
        best = max(tried, key=lambda setting: tried[setting]["goodput"])
        setting = {"size": best[0], "wait_ms": round(1e3 * best[1] * SLO_S), "batches_waiting": best[2]}
        found["serve_batch"] = {**self.serve_batch(*best, load), "setting": setting}
        return found


def loads(bench: Bench, seconds: float, seed: int, quick: bool) -> dict[str, Any]:
    """By arrivals and load, all sides."""
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        for part in (1.2,) if quick else LOADS:
            load = Load(part * bench.capacity, shape, seconds, seed)
            found.setdefault(name, {})[f"{part:g}"] = sides = bench.sides(load, quick)
            say(f"{name}, load {part:g}: " + "; ".join(f"{side} {figures}" for side, figures in sides.items()))
    return found


def quantiles(bench: Bench, seconds: float, seed: int, quick: bool) -> dict[str, Any]:
    """Deferred starts by the quantile of the seen times that is the profile."""
    found: dict[str, Any] = {}
    before = seen_times.QUANTILE
    try:
        for value in QUANTILES:
            seen_times.QUANTILE = value
            for part in (1.2,) if quick else (0.8, 1.2):
                figures = bench.ours(DEFERRED, Window, Load(part * bench.capacity, 1.0, seconds, seed))
                found.setdefault(f"{value:g}", {})[f"{part:g}"] = figures
                say(f"quantile {value:g}, load {part:g}: {figures}")
    finally:
        seen_times.QUANTILE = before
    return found


PARTS: dict[str, Callable[[Bench, float, int, bool], Any]] = {"loads": loads, "quantiles": quantiles}


def run(
    parts: Sequence[str], seconds: float, seed: int, quick: bool, width: int = WIDTH, most: int = MAX_BATCH
) -> dict[str, Any]:
    """The benchmark's JSON object. ``width``: the network's channels. ``most``: the largest batch."""
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    bench = Bench(width, most)
    say(f"{bench.capacity:.0f} requests/s at load 1; {bench.model.delays}")
    figures: dict[str, Any] = {part: PARTS[part](bench, seconds, seed, quick) for part in parts}
    if "loads" in figures:
        rows = [sides for by_load in figures["loads"].values() for sides in by_load.values()]
        figures["ratios"] = {
            side: round(min(row["deferred_window"]["goodput"] / max(row[side]["goodput"], 1.0) for row in rows), 3)
            for side in rows[0]
            if side != "deferred_window"
        }
        figures["ratio"] = min(figures["ratios"].values())
    delays = {"response_ms": 1e3 * bench.model.delays.response, "jitter_ms": 1e3 * bench.model.delays.jitter}
    return result(
        "serve_real",
        "cpu:1",
        "real",
        capacity=round(bench.capacity, 1),
        slo_ms=1e3 * SLO_S,
        profile_ms={size: round(1e3 * bench.model.profile.seconds(size), 2) for size in (1, 8, 64)},
        delays={name: round(value, 2) for name, value in delays.items()},
        loadavg=[before, os.getloadavg()[0]],
        seed=seed,
        **figures,
    )


def main() -> None:
    """The command."""
    options = parser("A real model served by an event loop, against the rule of serve.batch.")
    options.add_argument("--only", nargs="+", choices=PARTS, help="these parts (loads)")
    options.add_argument("--seconds", type=float, default=SECONDS, help=f"of one run ({SECONDS:g}; with --quick 1)")
    options.add_argument("--seed", type=int, default=1, help="seed of the arrivals (1)")
    given = options.parse_args()
    seconds = 1.0 if given.quick else given.seconds
    finish(run(given.only or ["loads"], seconds, given.seed, given.quick), given.json)


if __name__ == "__main__":
    main()

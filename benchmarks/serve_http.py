"""A real model over HTTP under open-loop load: `fluidtune serve` against Ray Serve, LitServe and BentoML.

``python -m benchmarks.serve_http --json [--quick] [--repeats N] [--only SIDE ...] [--channels N] [--seconds S]
[--seed N]``. Needs ``fluidtune[dev,serve]``, and LitServe and BentoML in `serve_http_sides.RIVALS`:
``make rivals-installed``. The model is the network of `benchmarks.serve_real` with N channels, loaded from the
checkpoint of a trial, on one core. All sides have the same requests; the client is a process of its own. It takes
44 minutes on a quiet machine of two cores.

- ``deferred``, ``eager``: `fluidtune.serve` with these starts. One process has the scheduler, another one the model.
- ``serve_batch``: Ray Serve's ``@serve.batch`` with a limit of the requests that wait (more get 503 at once), behind
  its fast ingress (`serve_http_sides.FAST_INGRESS`), as far as this Ray has it.
- ``litserve``: LitServe with batches, and with or without a time-out of the requests that wait.
- ``bentoml``: BentoML's adaptive batching, which refuses what cannot be answered within ``max_latency_ms``.

`serve_http_sides.SETTINGS` has the settings that are tried of each rival: each with the same requests for each arrivals
and load, for `SEARCH_S`. The two best are measured in each repeat, and the one with the better median counts;
``setting`` says which.

The sides run in turn, ``--repeats`` times, each time in new processes. By side, arrivals (``poisson``; ``bursty``:
Gamma gaps of shape 0.1) and load there are medians over the repeats: ``goodput`` (requests/s answered within the SLO,
from the moment at which the request was to be sent), ``p99_ms`` (of the answered ones), ``refused_p99_ms`` (of those
that got 429, 503 or 504), ``good``, ``late``, ``refused``, ``failed`` (parts of all) and ``lag_ms`` (the 99th
percentile of how late the client sent). ``all`` has the repeats. ``within_slo`` says whether the two 99th percentiles
are within the SLO (null: nothing was answered, or refused); it is printed as held or missed, and nothing depends on it.

Load 1 is the highest rate at which a rival answers 128 clients that each ask again at once. ``ratios`` has by side of
ours, rival, arrivals and load the goodput of that side over the rival's; ``least`` the least of each pair of sides.
``loadavg`` is the machine's load before and after. Whoever else uses the machine changes the figures.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import finish, free_ports, parser, result, say
from benchmarks.serve_http_client import CLIENTS, Clients, Row, images
from benchmarks.serve_http_sides import FAST_INGRESS, SETTINGS, SIDES, SLO_S, Setting, train
from benchmarks.serve_real import LOADS, SHAPES, Load, classify, digits_network

#: The network's channels, of 2 to 3 ms a request. With 640, 12 ms, the model is the limit of each side, and not what
#: stands before it.
CHANNELS = 256
#: How many of the best settings are measured in each repeat. Judgement: one run says which are good, not which is best.
FINALISTS = 2
#: Seconds of the closed loop that measures load 1, and of one run that tries a setting. Judgement: four SLOs and more.
CLOSED_S, SEARCH_S = 2.0, 2.0
#: Seconds of one run. Judgement: eight SLOs.
SECONDS = 4.0


class Cell(NamedTuple):
    """A row of the result: arrivals, load by name, and what is sent."""

    arrivals: str
    load: str
    sent: Load


#: By arrivals, load and setting.
Rows = dict[tuple[str, str, Setting | None], Row]


class Bench:
    """The run that is served, the client, and the rows.

    rate: load 1, requests/s. found: by rival, arrivals and load, the settings that are measured.
    """

    def __init__(self, run: str, clients: Clients, seconds: float, seed: int, quick: bool):
        self._run, self._clients, self._quick = run, clients, quick
        self._seconds, self._seed = seconds, seed
        self.rate = 0.0
        self.found: dict[str, dict[tuple[str, str], list[Setting]]] = {}

    def cells(self, seconds: float) -> Iterator[Cell]:
        """The rows."""
        for (name, shape), part in product(SHAPES.items(), (1.2,) if self._quick else LOADS):
            yield Cell(name, f"{part:g}", Load(part * self.rate, shape, seconds, self._seed))

    def capacity(self, rivals: Sequence[str]) -> None:
        """Find load 1."""
        for rival in rivals:
            (port,) = free_ports(1)
            with SIDES[rival](self._run, port) as choose:
                assert choose is not None
                for setting in self._settings(rival):
                    if setting.limit is not None:
                        continue  # Refuses what the clients of a closed loop send.
                    choose(setting)
                    self._clients.closed(port, 0.5, rival)
                    rate = self._clients.closed(port, CLOSED_S, rival)
                    say(f"{rival}, {setting}: {rate:.0f} requests/s to {CLIENTS} clients in a closed loop")
                    self.rate = max(self.rate, rate)

    def search(self, rival: str) -> None:
        """Find the rival's best settings for each row."""
        (port,) = free_ports(1)
        tried: dict[tuple[str, str], dict[Setting, float]] = {}
        with SIDES[rival](self._run, port) as choose:
            assert choose is not None
            for setting in self._settings(rival):
                choose(setting)
                self._clients.closed(port, 0.5, rival)
                for cell in self.cells(min(SEARCH_S, self._seconds)):
                    row = self._clients.open(port, cell.sent, rival)
                    tried.setdefault((cell.arrivals, cell.load), {})[setting] = row["goodput"] or 0.0
        self.found[rival] = {
            cell: sorted(goodputs, key=goodputs.__getitem__, reverse=True)[:FINALISTS]
            for cell, goodputs in tried.items()
        }
        for (name, load), settings in self.found[rival].items():
            say(f"{rival}, {name}, load {load}: {'; or '.join(map(str, settings))}")

    def measure(self, side: str) -> Rows:
        """All rows of one side, in new processes."""
        (port,) = free_ports(1)
        rows: Rows = {}
        found = self.found.get(side)
        with SIDES[side](self._run, port) as choose:
            settings = [None] if found is None else sorted({one for some in found.values() for one in some}, key=str)
            for setting in settings:
                if choose is not None and setting is not None:
                    choose(setting)
                self._clients.closed(port, 0.5, side)
                for cell in self.cells(self._seconds):
                    if found is None or setting in found[cell.arrivals, cell.load]:
                        row = self._clients.open(port, cell.sent, side)
                        rows[cell.arrivals, cell.load, setting] = row
                        say(f"{side}, {cell.arrivals}, load {cell.load}: {row}")
        return rows

    def _settings(self, rival: str) -> list[Setting]:
        return SETTINGS[rival][:: 4 if self._quick else 1]


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


def medians(turns: Sequence[Rows], slo_ms: float) -> dict[str, Any]:
    """One side, by arrivals and load. Where several settings were measured, that with the highest median counts."""
    side: dict[str, Any] = {}
    for name, load, setting in turns[0]:
        row = median_row([turn[name, load, setting] for turn in turns], slo_ms)
        if setting is not None:
            row["setting"] = setting._asdict()
        before = side.setdefault(name, {}).get(load)
        if before is None or row["goodput"] > before["goodput"]:
            side[name][load] = row
    return side


def compared(sides: Mapping[str, Any]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Goodput of ours over a rival's, by our side, rival, arrivals and load; says what is within the SLO."""
    words = {None: "none", True: "held", False: "missed"}
    for side, by_arrivals in sides.items():
        for name, by_load in by_arrivals.items():
            for load, row in by_load.items():
                held = ", ".join(f"{what} {words[within]}" for what, within in row["within_slo"].items())
                say(f"{side}, {name}, load {load}: {row['goodput']} requests/s; p99 within the SLO: {held}")
    return {
        side: {
            rival: {
                name: {
                    load: round(row["goodput"] / max(1.0, sides[rival][name][load]["goodput"]), 3)
                    for load, row in by_load.items()
                }
                for name, by_load in by_arrivals.items()
            }
            for rival in sides
            if rival in SETTINGS
        }
        for side, by_arrivals in sides.items()
        if side not in SETTINGS
    }


def run_all(
    given: Sequence[str], repeats: int, channels: int, seconds: float, seed: int, quick: bool
) -> dict[str, Any]:
    """The benchmark's JSON object."""
    import ray
    import torch
    from ray import tune

    before = os.getloadavg()[0]
    expected = classify(digits_network(channels), [torch.tensor(image).reshape(1, 8, 8) for image in images()])
    rivals = [side for side in SETTINGS if side in given]
    turns: dict[str, list[Rows]] = {side: [] for side in SIDES if side in given}
    with contextlib.ExitStack() as stack:
        clients = stack.enter_context(Clients(expected, SLO_S))
        os.environ.update(FAST_INGRESS)  # Ray's processes have what this one has.
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        storage = stack.enter_context(tempfile.TemporaryDirectory())
        with contextlib.redirect_stdout(sys.stderr):  # Tune prints a table even so.
            config = tune.RunConfig(name="digits", storage_path=storage, verbose=0)
            tune.Tuner(train, param_space={"channels": channels}, run_config=config).fit()
        bench = Bench(str(Path(storage) / "digits"), clients, seconds, seed, quick)
        bench.capacity(rivals)
        for rival in rivals:
            bench.search(rival)
        for turn in range(repeats):
            for side, measured in turns.items():
                say(f"[{turn + 1}/{repeats}] {side}")
                measured.append(bench.measure(side))
    sides = {side: medians(measured, 1e3 * SLO_S) for side, measured in turns.items()}
    ratios = compared(sides)
    least = {
        side: {rival: min(r for by_load in rows.values() for r in by_load.values()) for rival, rows in found.items()}
        for side, found in ratios.items()
    }
    return result(
        "serve_http",
        "cpu:2",
        "real",
        sides=sides,
        ratios=ratios,
        least=least,
        ratio=min((one for found in least.values() for one in found.values()), default=None),
        capacity=round(bench.rate, 1),
        channels=channels,
        slo_ms=1e3 * SLO_S,
        repeats=repeats,
        seconds=seconds,
        fast_ingress=FAST_INGRESS,
        loadavg=[before, os.getloadavg()[0]],
        seed=seed,
    )


def main() -> None:
    """The command."""
    options = parser("A real model over HTTP: fluidtune serve against Ray Serve, LitServe and BentoML.")
    options.add_argument("--repeats", type=int, help="how often each side runs; medians are compared (3; --quick: 1)")
    options.add_argument("--only", nargs="+", choices=SIDES, help="these sides, among them a rival (all)")
    options.add_argument("--channels", type=int, default=CHANNELS, help=f"of the network ({CHANNELS})")
    options.add_argument("--seconds", type=float, default=SECONDS, help=f"of one run ({SECONDS:g}; with --quick 1)")
    options.add_argument("--seed", type=int, default=1, help="seed of the arrivals (1)")
    given = options.parse_args()
    if given.only and not SETTINGS.keys() & set(given.only):
        options.error(f"--only names no rival, whose capacity is load 1: {', '.join(SETTINGS)}")
    seconds, repeats = (1.0, given.repeats or 1) if given.quick else (given.seconds, given.repeats or 3)
    finish(run_all(given.only or list(SIDES), repeats, given.channels, seconds, given.seed, given.quick), given.json)


if __name__ == "__main__":
    main()

"""A model in stages over HTTP under open-loop Poisson load, beside what the simulator of placements says of it.

``python -m benchmarks.stages --json [--quick] [--stages N] [--seconds S] [--seed N]``. Needs ``fluidtune[dev,serve]``.
The model is a row of convolutions on one core a stage, without batches, as the simulator has none. ``loads``: by load,
with load 1 a request for each gap that was measured between two answers: ``real`` and ``simulated``, the parts of the
requests that are answered within the SLO; ``difference`` in points; ``lag_ms``, the 99th percentile of how late the
client sent. Real is what a client got 200 for within the SLO from when it was to be sent. ``cut`` has the milliseconds
of each stage and of a hop that the simulator played. ``points`` is the largest difference. Whoever else uses the
machine changes the figures: ``loadavg`` has its load before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import finish, free_ports, parser, result, say
from benchmarks.serve_front import train
from symphony_serve.placement.arrivals import gamma_arrivals
from symphony_serve.placement.served_models import Cut, Group, ServedModel, Shape
from symphony_serve.placement.simulator import Requests, Simulator

#: Convolutions, their channels, and the sides of what they see. Judgement: 130 ms on a core, 0.6 MB between
#: two. What Ray and the front take for a batch, 12 ms on two cores, is then less than a tenth; the simulator has none.
LAYERS, CHANNELS, SIDE = 16, 256, 24
#: The SLO over the seconds of a request alone. Judgement: a queue of a few requests, as in AlpaServe's table 2.
SLO_SCALE = 3.0
#: Seconds of the SLO of the service that finds out how long a request takes, and of one load.
FIRST_SLO_S, SECONDS = 60.0, 60.0
LOADS = (0.6, 0.9, 1.2)


def load(directory: str, config: dict[str, Any]) -> Any:
    """The model: the sum over each channel of what the last convolution says of numbers."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    widths = [1, *[CHANNELS] * LAYERS]
    rows: list[nn.Module] = []
    for before, after in pairwise(widths):
        rows += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]
    model = nn.Sequential(*rows, nn.Flatten(2), nn.AvgPool1d(SIDE * SIDE), nn.Flatten()).eval()
    model.samples = [np.random.RandomState(0).rand(1, SIDE, SIDE).round(3).tolist()]  # type: ignore[assignment]
    return model


async def _open(url: str, body: bytes, moments: list[float], slo: float) -> dict[str, float]:
    """The part of the requests that were answered in time, and milliseconds that they were sent too late."""
    import aiohttp

    good, lags = 0, []

    async def one(session: Any, due: float) -> None:
        nonlocal good
        lags.append(max(0.0, time.monotonic() - due))
        async with session.post(url, data=body) as answer:
            await answer.read()
            in_time = answer.status == 200 and time.monotonic() - due <= slo
        good += in_time

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begin, tasks = time.monotonic() + 0.1, []
        for moment in moments:
            await asyncio.sleep(max(0.0, begin + moment - time.monotonic()))
            tasks.append(asyncio.create_task(one(session, begin + moment)))
        await asyncio.gather(*tasks)
    return {"real": good / len(moments), "lag_ms": round(1e3 * float(np.quantile(lags, 0.99)), 1)}


def _measured(run: Path, status: dict[str, Any], stages: int) -> tuple[Cut, float]:
    """The stages as the service has measured them, and the seconds of an answer outside of them."""
    kept = json.loads((run / "serving" / "profiles.json").read_text())
    ((seconds,),), ((part,),) = kept["seconds"].values(), kept["parts"].values()
    each = np.array([one["seconds"] for one in status["stages"][0]])
    each *= part * seconds / each.max()  # The largest stage is the gap between two answers,
    each *= min(1.0, seconds / each.sum())  # and all together take no longer than a request alone.
    hop = float(max(0.0, seconds - each.sum())) / (stages - 1)
    return Cut(tuple(each.tolist()), 0.0, hop), status["delays_s"]


def _simulated(cut: Cut, delay: float, slo: float, moments: list[float]) -> float:
    shape = Shape(1, len(cut.seconds))
    requests = Requests(np.array(moments), np.zeros(len(moments), dtype=int))
    simulator = Simulator([ServedModel("m", {shape: cut}, slo, delay=delay)], requests)
    return float(simulator.play(*simulator.lane([Group(shape, (0,))])).attained.mean())


def run(stages: int, seconds: float, seed: int) -> dict[str, Any]:
    """The benchmark's JSON object."""
    import ray
    from ray import tune

    import fluidtune

    before, found = os.getloadavg(), {}
    with contextlib.ExitStack() as stack:
        ray.init(address="local", num_cpus=stages, include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        storage = stack.enter_context(tempfile.TemporaryDirectory())
        with contextlib.redirect_stdout(sys.stderr):
            tune.Tuner(train, run_config=tune.RunConfig(name="nothing", storage_path=storage, verbose=0)).fit()
        where = Path(storage, "nothing")
        given: dict[str, Any] = {"metric": "score", "mode": "max", "stages": stages, "max_batch": 1}
        with fluidtune.serve(str(where), load, FIRST_SLO_S, port=free_ports(1)[0], **given) as served:
            slo = SLO_SCALE * served.status()["trials"][0]["batch_1_s"]
        for part in LOADS:
            with fluidtune.serve(str(where), load, slo, port=free_ports(1)[0], **given) as served:
                cut, delay = _measured(where, served.status(), stages)
                rate = part / max(cut.seconds)
                moments = gamma_arrivals(rate, 1.0, seconds, seed).tolist()
                body = json.dumps(load("", {}).samples[0]).encode()
                row: dict[str, Any] = asyncio.run(_open(served.url, body, moments, slo))
            row["simulated"] = _simulated(cut, delay, slo, moments)
            row["difference"] = round(100 * (row["real"] - row["simulated"]), 2)
            row["cut"] = {"stages_ms": [round(1e3 * one, 2) for one in cut.seconds], "hop_ms": round(1e3 * cut.hop, 2)}
            row["requests"], row["slo_ms"], row["delay_ms"] = len(moments), round(1e3 * slo, 1), round(1e3 * delay, 2)
            say(f"load {part:g}: {row}")
            found[f"{part:g}"] = row
    points = max(abs(row["difference"]) for row in found.values())
    figures = {"loads": found, "points": points, "seconds": seconds, "loadavg": [before, os.getloadavg()]}
    return result("stages", f"cpu:{stages}", "real", ratio=None, **figures)


def main() -> None:
    """The command."""
    options = parser("A model in stages over HTTP, beside what the simulator of placements says of it.")
    options.add_argument("--stages", type=int, choices=(2, 4, 8), default=2, help="of one core each (2)")
    options.add_argument("--seconds", type=float, default=SECONDS, help=f"of one load ({SECONDS:g}; with --quick 3)")
    options.add_argument("--seed", type=int, default=0, help="of the arrivals (0)")
    given = options.parse_args()
    finish(run(given.stages, 3.0 if given.quick else given.seconds, given.seed), given.json)


if __name__ == "__main__":
    main()

"""A search and a served model on one core: what each of them loses.

``python -m benchmarks.serve_beside --json [--quick] [--rounds N]``. Everything is real: a HyperBand search of FluidTune
in a Ray cluster, and a network that answers Poisson requests in another process (`AsyncServer`, without HTTP). All
work on the first core of this machine; the sender of the requests and Ray's own processes use the others.

Each round runs three sides, one after the other:

- ``alone``: the search without a service.
- ``turns``: both, with ``beside`` (docs/serving.md, "Beside trials").
- ``apart``: both, but neither knows of the other; the kernel shares the core.

The load is 30 % of what the network bears alone at best (equations 1 and 2 with the measured profile). By side:

- ``search_s``: from the first start of a trial to the last result. ``iteration_ms``: the median of an iteration, with
  its wait. ``lost``: the part of its time that the search lost, 1 - alone/side.
- ``attained``: the part of the requests that were answered within the SLO while the search ran.
- ``served``: seconds of batches by the seconds of the search. ``wait_median_ms`` and ``wait_p99_ms``: of the batches
  for their turn.

``ok`` says whether `turns` has ``attained`` of at least 0.99 and ``lost`` of at most ``served`` + 0.05.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, finish, kill_tree, parser, result, say

#: Seconds of the SLO. Judgement: it must hold some iterations of a trial, which take about 60 ms here.
SLO_S = 0.4
#: The part of what the network bears. Source: the issue's "Shows".
LOAD = 0.3
#: Most requests of a batch. Judgement: the sender then sends some hundred requests a second, which Python can.
MAX_BATCH = 16
#: Steps of training in an iteration, and its images. Judgement: 60 ms on a core.
STEPS, IMAGES = 40, 64
#: Trials of the search, and most iterations of each; the same with ``--quick``. Judgement: half a minute, and 5 s.
SEARCH, QUICK_SEARCH = (27, 27), (9, 9)
#: Channels of the network. Judgement: a batch of 1 then takes some ms.
CHANNELS = 320
#: Bounds of the issue: part of the requests in time, and what the search may lose beyond what is served.
ATTAINED, POINTS = 0.99, 0.05
SIDES = {"alone": (False, False), "turns": (True, True), "apart": (True, False)}
#: Seconds until a side that does not end is killed. Judgement: ten times what it takes.
PATIENCE_S = 500.0


def on_one_core() -> None:
    """Let this thread, and those that it starts, work on the first core only, and torch with one thread."""
    import torch

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def train(config: dict[str, float]) -> None:
    """A trial: a network learns digits, some steps in each iteration."""
    import torch
    from ray import tune
    from sklearn.datasets import load_digits

    on_one_core()
    found = load_digits()
    images, labels = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=config["lr"])
    while True:
        for _ in range(STEPS):
            chosen = torch.randint(len(images), (IMAGES,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(images[chosen]), labels[chosen]).backward()
            optimizer.step()
        with torch.inference_mode():
            right = (network(images).argmax(1) == labels).float().mean().item()
        tune.report({"accuracy": right})


def search(beside: bool, quick: bool) -> dict[str, float]:
    """Run the search. Returns its seconds and those of a typical iteration."""
    import ray
    from ray import tune
    from ray.tune.schedulers import HyperBandScheduler

    import fluidtune
    from fluidtune.report import read_events

    trials, longest = QUICK_SEARCH if quick else SEARCH
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as storage:
        tuner = fluidtune.Tuner(
            train,
            param_space={"lr": tune.grid_search([0.001 * 1.3**number for number in range(trials)])},
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=HyperBandScheduler(max_t=longest)),
            run_config=tune.RunConfig(name="search", storage_path=storage, verbose=0),
            executor=fluidtune.FluidExecutor(devices="cpu:1", beside=beside),
        )
        tuner.fit()
        events = read_events(Path(storage, "search", "fluid_events.jsonl"))
    ray.shutdown()
    begin = next(event["t"] for event in events if event["event"] == "trial_started")
    results = [event for event in events if event["event"] == "trial_result"]
    iterations = sum(event.get("iterations", 1) for event in results)
    iteration = statistics.median(event["seconds"] for event in results)
    return {"begin": begin, "end": results[-1]["t"], "iterations": iterations, "iteration_ms": 1e3 * iteration}


def service(beside: bool) -> dict[str, Any]:
    """Answer requests until stdin ends. Returns each request's moment and seconds, and each batch's."""
    import torch

    from benchmarks.serve import staggered
    from benchmarks.serve_arrivals import poisson
    from benchmarks.serve_real import classify, digits_network
    from benchmarks.served_by_thread import ServedByThread
    from fluidtune.cluster.sharing.beside import Turn
    from symphony_serve import measure_models
    from symphony_serve.model_side import EAGER
    from symphony_serve.shell.async_server import AsyncServer, BatchSeen
    from symphony_serve.shell.device import LocalDevice, Waited

    network = digits_network(CHANNELS)
    turn = Turn("service", served=True) if beside else None
    pinned = threading.local()
    #: (when, seconds) of the waits of batches for their turn.
    waits: list[tuple[float, float]] = []

    def answer(images: list[torch.Tensor]) -> Any:
        if not hasattr(pinned, "done"):
            on_one_core()
            pinned.done = True
        if turn is None:
            return classify(network, images)
        with turn.taken() as waited:
            waits.append((time.time(), waited))
            return Waited(classify(network, images), waited)

    devices = [{"digits": answer}]
    images = torch.rand(64, 1, 8, 8)
    samples, local = {"digits": list(images)}, [LocalDevice(one) for one in devices]
    models = asyncio.run(measure_models(local, samples, {"digits": SLO_S}, MAX_BATCH, policy=EAGER))
    rate = LOAD * staggered(models[0].profile, SLO_S, 1).rate
    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    #: (when it came, seconds until its answer or None).
    became: list[tuple[float, float | None]] = []
    batches: list[BatchSeen] = []
    offset = time.time() - time.monotonic()

    def note(due: float, told: Any) -> None:
        became.append((due + offset, time.monotonic() - due if told.exception() is None else None))

    print("ready", flush=True)
    with ServedByThread(models, devices, kind=partial(AsyncServer, watch=batches.append)) as server:
        begin = time.monotonic()
        for request in poisson({"digits": rate}, {"digits": SLO_S}, seed=1):
            due = begin + request.arrival
            if ends.wait(max(0.0, due - time.monotonic())):
                break
            server.submit("digits", images[request.id % len(images)]).add_done_callback(partial(note, due))
    if turn is not None:
        turn.leave()
    return {
        "rate": rate,
        "batch_1_ms": 1e3 * models[0].profile.seconds(1),
        "became": became,
        "waits": waits,
        "batches": [(one.sent + offset, one.seconds, one.size) for one in batches],
    }


def run_side(side: str, quick: bool) -> dict[str, float]:
    """One side, in processes of its own."""
    served, beside = SIDES[side]
    words = [sys.executable, "-m", "benchmarks.serve_beside", *(["--beside"] if beside else [])]
    more: dict[str, Any] = {"cwd": ROOT, "env": environment(), "stdout": subprocess.PIPE, "text": True}
    answering = None
    try:
        if served:
            answering = subprocess.Popen([*words, "--part", "service"], stdin=subprocess.PIPE, **more)
            assert answering.stdout is not None and answering.stdout.readline() == "ready\n", "the service has failed"
        quickly = ["--quick"] if quick else []
        done = subprocess.run([*words, "--part", "search", *quickly], check=True, timeout=PATIENCE_S, **more)
        found = json.loads(done.stdout.splitlines()[-1])
        figures = {
            "search_s": found["end"] - found["begin"],
            "iterations": found["iterations"],
            "iteration_ms": found["iteration_ms"],
        }
        if answering is not None:
            told = json.loads(answering.communicate(timeout=PATIENCE_S)[0].splitlines()[-1])
            figures |= counted(told, found["begin"], found["end"])
        return figures
    finally:
        if answering is not None and answering.poll() is None:
            kill_tree(answering)


def counted(told: dict[str, Any], begin: float, end: float) -> dict[str, float]:
    """What became of the requests that came while the search ran."""
    came = [seconds for at, seconds in told["became"] if begin <= at <= end]
    batches = [(seconds, size) for at, seconds, size in told["batches"] if begin <= at <= end]
    waits = sorted(seconds for at, seconds in told["waits"] if begin <= at <= end) or [0.0]
    good = sum(seconds is not None and seconds <= SLO_S for seconds in came)
    return {
        "rate": told["rate"],
        "batch_1_ms": told["batch_1_ms"],
        "attained": good / max(1, len(came)),
        "refused": sum(seconds is None for seconds in came) / max(1, len(came)),
        "served": sum(seconds for seconds, _ in batches) / (end - begin),
        "wait_median_ms": 1e3 * statistics.median(waits),
        "wait_p99_ms": 1e3 * waits[int(0.99 * (len(waits) - 1))],
        "mean_batch": sum(size for _, size in batches) / max(1, len(batches)),
    }


def run(quick: bool, rounds: int) -> dict[str, Any]:
    """The benchmark's JSON object."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES:
            figures = run_side(side, quick)
            if side != "alone":
                figures["lost"] = 1 - runs["alone"][-1]["search_s"] / figures["search_s"]
            runs[side].append(figures)
            say(f"round {number + 1}, {side}: { {name: round(value, 4) for name, value in figures.items()} }")
    sides = {
        side: {name: round(statistics.median(one[name] for one in found), 4) for name in found[0]}
        for side, found in runs.items()
    }
    ours = sides["turns"]
    ok = ours["attained"] >= ATTAINED and ours["lost"] <= ours["served"] + POINTS
    load = os.getloadavg()[0]
    return result("serve_beside", "cpu:1", "real", slo_s=SLO_S, rounds=rounds, load_average=load, sides=sides, ok=ok)


def main() -> None:
    """The command."""
    options = parser("A search and a served model on one core.")
    options.add_argument("--rounds", type=int, default=3, help="how often each side runs; medians are compared (3)")
    options.add_argument("--part", choices=("search", "service"), help="one part of a side, for the benchmark itself")
    options.add_argument("--beside", action="store_true", help="with --part: it takes turns")
    given = options.parse_args()
    if given.part == "search":
        print(json.dumps(search(given.beside, given.quick)))
    elif given.part == "service":
        print(json.dumps(service(given.beside)))
    else:
        finish(run(given.quick, 1 if given.quick else given.rounds), given.json)


if __name__ == "__main__":
    main()

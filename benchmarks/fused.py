"""Trials of one architecture trained as one, one after the other, in threads, and packed as a process each.

``python -m benchmarks.fused --json [--device cuda]``. K trials each run the same loop for some iterations: draw a batch
of 32 of 256 samples, forward, loss, backward, a step of Adam. Sides, in turn ``--repeats`` times, medians compared:

- `fused`: as one, in one process (`fluidtune.elastic.fused`);
- `alone`: one after the other, in one process;
- `threads`: K threads of one process, each with its own loop (on a GPU: and its own stream);
- `packed`: a process each, as FluidTune's workers are; on a GPU under MPS where it can be had.

On cores sides are judged by the processor's time, which tells more than the clock's where other processes compute; on
a GPU by the clock's, after all that was launched is done. Each process has one thread of torch. To start processes, to
import torch and to start CUDA is not in the times. ``best_packing`` compares the most trials as one with the best
number of processes at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common import finish, parser, result, say
from fluidtune.elastic.fused import FusedTrials, current_trial

#: How many trials are trained at once.
COUNTS = (1, 2, 4, 8, 16, 32)
#: Seconds in which a packed process answers. Judgement: many times what the slowest model takes on a busy core.
ANSWER_S = 300.0
INPUTS = torch.randn(256, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 10, (256,), generator=torch.Generator().manual_seed(2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])  # type: ignore[no-any-return]


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.first, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.first(x)).mean(1))  # type: ignore[no-any-return]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(256, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolution": convolution,
    "recurrent": Recurrent,
    "transformer": Attentive,
}


class Work(NamedTuple):
    """What each trial does. ``model``: a name of `MODELS`; ``device``: "cpu" or "cuda"."""

    model: str
    iterations: int
    device: str = "cpu"


class Run(NamedTuple):
    """Seconds of the clock and of the processor, each trial's last loss, and why trials were not fused."""

    clock: float
    computed: float
    losses: list[float]
    reasons: Sequence[str] = ()


def wait_for(device: str) -> None:
    """Wait until the GPU has done what was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def loop(work: Work, number: int) -> float:
    """One trial; returns its last loss."""
    torch.manual_seed(number)
    model = MODELS[work.model]().to(work.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial = current_trial()
    if trial is not None:
        trial.prepare(model, optimizer)
    inputs, labels = INPUTS.to(work.device), LABELS.to(work.device)
    loss = torch.zeros(())
    for _ in range(work.iterations):
        chosen = torch.randint(0, len(inputs), (32,)).to(work.device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
    return loss.item()


@contextlib.contextmanager
def timed(device: str) -> Iterator[list[float]]:
    """Takes the seconds of the clock and of the processor; they are in the list afterwards."""
    wait_for(device)
    clock, computed = time.perf_counter(), time.process_time()
    found: list[float] = []
    yield found
    wait_for(device)
    found += [time.perf_counter() - clock, time.process_time() - computed]


def one_after_the_other(work: Work, count: int) -> Run:
    with timed(work.device) as seconds:
        losses = [loop(work, number) for number in range(count)]
    return Run(*seconds, losses)


def as_one(work: Work, count: int) -> Run:
    with timed(work.device) as seconds:
        trials = FusedTrials()
        for number in range(count):
            trials.start(str(number), loop, work, number)
        trials.join()
    for trial in trials.trials:
        if trial.error is not None:
            raise trial.error
    reasons = sorted({reason for trial in trials.trials for reason in trial.reasons})
    return Run(*seconds, [trial.value for trial in trials.trials], reasons)


def in_threads(work: Work, count: int) -> Run:
    """Their losses are not those of the trials alone: threads draw from common random streams."""
    losses: dict[int, float] = {}

    def one(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if work.device == "cuda" else contextlib.nullcontext():
            losses[number] = loop(work, number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    with timed(work.device) as seconds:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return Run(*seconds, [losses[number] for number in range(count)])  # KeyError: one has raised


class Packed:
    """Processes that train a trial each when `run` asks for it.

    ``environment``: what each has before CUDA starts. They are spawned: neither CUDA nor the threads with which torch
    computes on cores survive a fork.
    """

    def __init__(self, count: int, environment: Mapping[str, str]) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, dict(environment)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, work: Work, count: int) -> Run:
        """
        Raises:
            RuntimeError: a process has ended, or takes too long. What a trial raises.
        """
        pipes = self._pipes[:count]
        try:
            for number, pipe in enumerate(pipes):
                pipe.send((work, number))
            for pipe in pipes:
                _answer(pipe)  # it is ready
            clock = time.perf_counter()
            for pipe in pipes:
                pipe.send(None)
            got = [_answer(pipe) for pipe in pipes]
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise RuntimeError("a packed process has ended") from None
        return Run(time.perf_counter() - clock, sum(computed for computed, _ in got), [loss for _, loss in got])

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_S):
        raise RuntimeError(f"a packed process did not answer within {ANSWER_S:.0f} s")
    answer = pipe.recv()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """One packed process: for each trial it gets ready, waits, and trains, until the other end is closed."""
    os.environ.update(environment)
    while True:
        try:
            work, number = pipe.recv()
        except EOFError:
            return
        try:
            begin_with(work)
            pipe.send("ready")
            pipe.recv()
            with timed(work.device) as seconds:
                loss = loop(work, number)
            pipe.send((seconds[1], loss))
        except Exception as error:
            pipe.send(error)


def begin_with(work: Work) -> None:
    """What is done once, and in no side's time: the settings of a process, and the first kernels of a model."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # the trials' losses are compared in float32
    loop(work._replace(iterations=2), 0)
    wait_for(work.device)


@contextlib.contextmanager
def packed(count: int, device: str) -> Iterator[tuple[Packed, str | None]]:
    """The packed processes, and why they are not under MPS (None: they are)."""
    environment: dict[str, str] = {}
    why: str | None = "on cores"
    mps = None
    with tempfile.TemporaryDirectory(prefix="fused-") as directory:
        if device == "cuda":
            from salus_share.mps import Mps

            uuid = str(torch.cuda.get_device_properties(0).uuid)
            mps = Mps(uuid, Path(directory) / "mps")
            why = None if mps.acquire() else mps.why
            environment = mps.environment()
        processes = Packed(count, environment)
        try:
            yield processes, why
        finally:
            processes.end()
            if mps is not None:
                mps.release()


Side = Callable[[Work, int], Run]


def measure(sides: Mapping[str, Side], work: Work, count: int, repeats: int) -> tuple[dict[str, Any], set[str]]:
    """Iterations a second of all trials on each side, ``_wall`` by the clock; and why trials were not fused."""
    begin_with(work)
    runs = [{name: side(work, count) for name, side in sides.items()} for _ in range(repeats)]
    total = count * work.iterations
    judged = {
        name: [run[name].clock if work.device == "cuda" else run[name].computed for run in runs] for name in sides
    }
    row: dict[str, Any] = {}
    for name in sides:
        row[name] = total / median(judged[name])
        row[f"{name}_wall"] = total / median(run[name].clock for run in runs)
    for name in sides:
        if name != "fused":
            key = "ratio" if name == "alone" else f"{name}_ratio"
            row[key] = median(other / ours for other, ours in zip(judged[name], judged["fused"], strict=True))
    row["worst_difference"] = max(
        abs(ours / loss - 1)
        for run in runs
        for ours, loss in zip(run["fused"].losses, run["alone"].losses, strict=True)
    )
    return row, {reason for run in runs for reason in run["fused"].reasons}


def best_packing(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The most trials as one, beside as many that are packed in the number at a time that is best. By the clock."""
    most = max(map(int, rows))
    at_a_time = max((count for count in map(int, rows) if most % count == 0), key=lambda n: rows[str(n)]["packed_wall"])
    ours, best = rows[str(most)]["fused_wall"], rows[str(at_a_time)]["packed_wall"]
    return {"trials": most, "fused": ours, "packed": best, "at_a_time": at_a_time, "ratio": ours / best}


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    arguments_of = parser(__doc__.splitlines()[0], repeats=True)
    arguments_of.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the models are")
    arguments_of.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS), help="these models only")
    arguments_of.add_argument("--counts", type=int, nargs="+", help="how many trials are trained at once")
    arguments_of.add_argument("--iterations", type=int, help="of each trial")
    options = arguments_of.parse_args(arguments)
    options.counts = options.counts or ((1, 8) if options.quick else COUNTS)
    options.iterations = options.iterations or (10 if options.quick else 100)
    return options


def main() -> None:
    options = options_of()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; without --device cuda this runs on cores")
    by_model: dict[str, dict[str, Any]] = {}
    reasons: dict[str, list[str]] = {}
    with packed(max(options.counts), options.device) as (processes, why):
        sides: dict[str, Side] = {
            "fused": as_one,
            "alone": one_after_the_other,
            "threads": in_threads,
            "packed": processes.run,
        }
        for name in options.model:
            work = Work(name, options.iterations, options.device)
            found = {str(count): measure(sides, work, count, options.repeats) for count in options.counts}
            by_model[name] = {count: row for count, (row, _) in found.items()}
            reasons[name] = sorted({reason for _, said in found.values() for reason in said})
            say(f"{name}: {', '.join(map(in_words, by_model[name].items()))}")
    devices = "gpu:1" if options.device == "cuda" else f"cpu:{os.cpu_count()}"
    figures = result("fused", devices, "real", **summary(by_model), reasons=reasons, not_under_mps=why)
    if options.device == "cuda":
        figures["gpu"] = torch.cuda.get_device_name(0)
    finish(figures, options.json)


def in_words(row: tuple[str, Mapping[str, Any]]) -> str:
    count, found = row
    others = ", ".join(f"{name} {found[f'{name}_ratio']:.2f}x" for name in ("threads", "packed"))
    return f"{count} {found['ratio']:.2f}x ({others})"


def summary(by_model: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The keys of a comparison, over all models and numbers of trials."""
    rows = [row for of_model in by_model.values() for row in of_model.values()]
    keys = {"alone": "ratio", "threads": "threads_ratio", "packed": "packed_ratio"}
    ratios = {name: min(row[key] for row in rows) for name, key in keys.items()}
    return {
        "sides": {name: {"slowest": min(row[name] for row in rows)} for name in ("fused", *keys)},
        "models": by_model,
        "best_packing": {name: best_packing(of_model) for name, of_model in by_model.items()},
        "ratios": ratios,
        "ratio": min(ratios.values()),
    }


if __name__ == "__main__":
    main()

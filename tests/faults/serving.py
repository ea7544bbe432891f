"""Trials are served over HTTP under load while processes are killed.

``python -m tests.faults.serving --rounds 50``. Each round kills one process by SIGKILL, in this order: the driver that
has started the service (each time another service), a model process, the front. After each kill the service must answer
again. Every request must get one response: the right output, or a refusal with its reason; only requests that were on
their way when a front died may also get a closed connection. What the front has counted as answered is what the clients
got, once each. In the end nothing is left.

No response takes longer than the SLO and the restart, except of requests that were on their way when a front
died. The restart is measured: it lasts from the kill until the first answer to a request that was sent after it.
Each line has it in seconds, with the slowest of these responses and the longest time in which nobody was answered.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray

import fluidtune
from tests.conftest import assert_nothing_left
from tests.serving import runs

KINDS = ("driver", "model process", "front")
#: Whose requests on the way are lost with it.
CARRIER = "front"
CLIENTS, FACTOR = 4, 3
#: Seconds of the SLO. Judgement: a busy machine with two cores needs up to one for a request, and a restart some more.
SLO_S = 4.0
#: Seconds until a request without a response counts as lost, or a service that does not answer as dead. Judgement: a
#: front loads torch and the models on a busy machine.
PATIENCE_S = 200.0


class Response(NamedTuple):
    """When a request was sent and its response was there, on `time.monotonic`, and what became of it."""

    sent: float
    came: float
    what: str


class Clients:
    """Threads that ask about one number after the other, each number once. pause_s: between an answer and the next."""

    pause_s = 0.0

    def __init__(self, port: int):
        self._port, self._numbers, self._ends = port, itertools.count(runs.KILLS + 1), threading.Event()
        #: What became of requests: "answered", "refused", "error", and what is a fault of ours.
        self.became: Counter[str] = Counter()
        self.responses: list[Response] = []
        #: Seconds: the longest time between two answers.
        self.gap = 0.0
        self._answered = time.monotonic()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            with self._lock:
                number = next(self._numbers)
            begin = time.monotonic()
            what = self._ask(number)
            with self._lock:
                self.became[what] += 1
                now = time.monotonic()
                self.responses.append(Response(begin, now, what))
                if what == "answered":
                    self.gap, self._answered = max(self.gap, now - self._answered), now
            self._ends.wait(self.pause_s if what == "answered" else 0.02)

    def _ask(self, number: int) -> str:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
            connection.request("POST", "/", json.dumps(number))
            answer = connection.getresponse()
            status, body, version = answer.status, answer.read(), answer.headers.get("Model-Version")
            connection.close()
        except TimeoutError:
            return f"lost: no response for {number}"
        except (OSError, http.client.HTTPException):
            return "error"
        if status == 200:
            right = json.loads(body) == self.factor(version) * number
            return "answered" if right else f"wrong: {body!r} of version {version} for {number}"
        if status == 503 and b"reason" in body:
            return "refused"
        return "error" if status in (500, 503) else f"wrong: status {status}"

    def factor(self, version: str | None) -> float:
        """By what this version multiplies. Is called with each answer, as soon as it is there."""
        return FACTOR

    def end(self) -> Counter[str]:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        return self.became


def driver(address: str, run: str, port: int) -> None:
    """The process that starts the service, and then waits to be killed."""
    ray.init(address=address, log_to_driver=False)
    fluidtune.serve(run, runs.load, SLO_S, devices="cpu:1", starts="eager", port=port)
    print("up", flush=True)
    signal.pause()


def until(reached: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := reached()):
        assert time.monotonic() < end, f"within {PATIENCE_S:.0f} s there was not {what}"
        time.sleep(0.05)
    return found


def status() -> dict[str, Any]:
    from fluidtune.serving.running_services import find

    def asked() -> dict[str, Any] | None:
        try:
            return find().status()
        except fluidtune.FluidTuneError:  # the front is starting anew
            return None

    return until(asked, "a front that answers")


def one_round(kind: str, port: int, process: subprocess.Popen[str]) -> Counter[str]:
    """Kill one process under load, and wait until the service answers again."""
    before = until(lambda: (found := status())["device_pids"] and found["state"] == "serving" and found, "a service")
    counted = before["trials"][0]["requests"]
    clients = Clients(port)
    try:
        until(lambda: clients.became["answered"] > 20, "an answer")
        pids = {"driver": process.pid, "model process": before["device_pids"][0], "front": before["pid"]}
        pid = pids[kind]
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if kind == "driver":
            process.wait()
        elif kind == "front":
            until(lambda: status()["pid"] != pid, "another front")
        else:
            until(lambda: status()["device_pids"] not in ([], [pid]), "another model process")
        # Whoever was on the way at the kill has its response by then.
        some = clients.became["answered"] + CLIENTS + 1
        until(lambda: clients.became["answered"] >= some, "an answer after the kill")
    finally:
        became = clients.end()
    faults = [what for what in became if what not in ("answered", "refused", "error")]
    assert not faults, faults
    if kind != CARRIER:
        assert not became["error"], became
        after = status()["trials"][0]["requests"]
        answered = after.get("answered", 0) - counted.get("answered", 0)
        assert answered == became["answered"], (counted, after, became)
    restart, slowest = times(clients.responses, killed, kind == CARRIER)
    said = f"{kind}: restart {restart:.1f} s, slowest response {slowest:.1f} s, nobody answered for {clients.gap:.1f} s"
    print(said, flush=True)
    assert slowest <= SLO_S + restart, f"{said}: more than the SLO of {SLO_S:g} s and the restart"
    return became


def times(responses: Sequence[Response], killed: float, carries: bool) -> tuple[float, float]:
    """Seconds of the restart, and of the slowest response.

    carries: requests that were on their way at the kill are lost with the process that was killed; they do not count.
    """
    restart = min(one.came for one in responses if one.what == "answered" and one.sent >= killed) - killed
    lost = [one for one in responses if carries and one.sent < killed <= one.came]
    return restart, max(one.came - one.sent for one in responses if one not in lost)


@contextmanager
def cluster_that_ends() -> Iterator[None]:
    """A Ray cluster of two CPUs in this process, all of whose processes must end with it."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        processes = psutil.Process().children(recursive=True)
        ray.shutdown()
        _, left = psutil.wait_procs(processes, timeout=60)
        assert not left, left


@contextmanager
def served(run: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A service that a process of its own has started, in this process' cluster."""
    words = [sys.executable, "-m", "tests.faults.serving", "--driver", ray.get_runtime_context().gcs_address]
    process = subprocess.Popen([*words, str(run), str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and "up" in iter(lambda: process.stdout.readline().strip(), "")
        yield process
    finally:
        process.kill()
        process.wait()


def rounds(count: int, directory: Path, port: int, kinds: Sequence[str] = KINDS) -> Counter[str]:
    """``count`` rounds in a cluster of two CPUs, which kill these kinds in turn. What became of all requests."""
    from fluidtune.serving.running_services import find

    total: Counter[str] = Counter()
    with cluster_that_ends():
        run = runs.run(directory)
        with ExitStack() as drivers:
            process = drivers.enter_context(served(run, port))
            for number in range(count):
                kind = kinds[number % len(kinds)]
                if kind == "driver" and process.poll() is not None:  # It was killed, and nobody has missed it.
                    find().stop()
                    process = drivers.enter_context(served(run, port))
                became = one_round(kind, port, process)
                print(f"round {number}: {kind}: {dict(became)}", flush=True)
                total += became
        find().stop()
        assert_nothing_left()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--driver", nargs=3, metavar=("ADDRESS", "RUN", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.driver:
        driver(args.driver[0], args.driver[1], int(args.driver[2]))
        return
    with tempfile.TemporaryDirectory() as directory:
        print(dict(rounds(args.rounds, Path(directory), args.port, args.only)))


if __name__ == "__main__":
    main()

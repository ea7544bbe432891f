"""What the gate costs an iteration when nobody else wants the lane.

``python -m benchmarks.gate --json [--quick]``. Sides, microseconds for each pass (in and out): `gate`, with another
process of the lane that is idle; `socket`, a question to another process over a local socket and its answer, once on
the way in and once on the way out, which is what a gate in a service would cost. ``ratio`` is socket's over gate's.

`alone` is a trial alone on its device. `worker` is one in a worker of FluidTune with `lanes` switched on, whose
memory is measured and which passes no gate. `lone_loss` is the part of its time that a trial alone loses with
iterations of 10 ms: the cost of a pass over them. `lone_loss_measured` is the same by measurement: iterations run
with and without a gate in pairs, in changing order. It is as exact as the machine is quiet.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.salus_jobs import device_home, spin, together
from fluidtune.cluster.sharing.lanes import LaneMember, LaneSettings
from salus_share.gate import Gate

#: The iteration to which a pass is compared, seconds. A short one.
ITERATION_S = 0.010


def passes(begin: Any, directory: str, count: int, idle: bool) -> float:
    """Seconds for each pass, the median of ten groups. ``idle``: stay in the lane and do nothing."""
    gate = Gate(Path(directory), "idle" if idle else "busy", "FAIR")
    over = Path(directory) / "over"
    begin()
    if idle:
        while not over.exists():
            time.sleep(0.05)
        return 0.0
    groups = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(count // 10):
            with gate.iteration():
                pass
        groups.append((time.perf_counter() - started) / (count // 10))
    over.touch()
    return median(groups)


def answers(begin: Any, address: str, count: int, serves: bool) -> float:
    """Seconds for two questions and their answers. ``serves``: this process is the one that answers."""
    if serves:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            begin()
            link, _ = listener.accept()
            while packet := link.recv(64):
                link.send(packet)
        return 0.0
    begin()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(address)
        started = time.perf_counter()
        for _ in range(2 * count):
            link.send(b"may I?")
            link.recv(64)
        return (time.perf_counter() - started) / count


def lone_loss(count: int) -> float:
    """The part of its time that a trial alone loses, from iterations with and without a gate by turns."""
    with device_home() as directory:
        gate = Gate(directory, "alone", "FAIR")
        taken: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * count):
            # In the order yes, no, no, yes, what happens in every second iteration happens to both.
            gated = turn % 4 in (0, 3)
            started = time.perf_counter()
            with gate.iteration() if gated else contextlib.nullcontext():
                spin(ITERATION_S)
            taken[gated].append(time.perf_counter() - started)
        return median(taken[True]) / median(taken[False]) - 1


def in_worker(begin: Any, count: int) -> float:
    """Seconds per iteration that a worker adds to a trial alone on its device; the median of ten groups."""
    member = LaneMember("alone", LaneSettings("benchmark", "FAIR", 1 << 30, 1.0), "cpu")
    begin()
    groups = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(count // 10):
            member.settle(None)
            with member.iteration():
                pass
        groups.append((time.perf_counter() - started) / (count // 10))
    return median(groups)


def main() -> None:
    """The command."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    count = 2_000 if options.quick else 20_000
    with device_home() as directory:
        _, (alone,) = together(passes, [(str(directory), count, False)])
    say(f"alone: {alone * 1e6:.1f} us a pass")
    _, (worker,) = together(in_worker, [(count,)])
    say(f"alone in a worker with lanes: {worker * 1e6:.1f} us an iteration")
    with device_home() as directory:
        _, (gate, _) = together(passes, [(str(directory), count, False), (str(directory), count, True)])
    say(f"another one there: {gate * 1e6:.1f} us a pass")
    with device_home() as directory:
        address = str(directory / "socket")
        _, (asked, _) = together(answers, [(address, count, False), (address, count, True)])
    say(f"over a socket: {asked * 1e6:.1f} us a pass")
    measured = lone_loss(50 if options.quick else 300)
    say(f"alone with iterations of 10 ms: {measured:.2%} lost")
    figures = result(
        "gate",
        "cpu:1",
        "real",
        sides={"gate": {"microseconds": gate * 1e6}, "socket": {"microseconds": asked * 1e6}},
        ratios={"socket": asked / gate},
        ratio=asked / gate,
        alone={"microseconds": alone * 1e6},
        worker={"microseconds": worker * 1e6},
        lone_loss=alone / ITERATION_S,
        lone_loss_measured=measured,
    )
    finish(figures, options.json)


if __name__ == "__main__":
    main()

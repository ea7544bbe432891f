"""N copies of a small model on one device: one after the other, time-sliced, and packed in lanes.

``python -m benchmarks.pack --json [--quick] [--copies N]``. The device is one core. There are two kinds of training:
`waits`, which waits for its input half of the time, and `full`, which keeps the core busy. Sides, by kind the seconds
until all copies have done their steps: `fifo` (one after the other), `time_slicing` (all at once, no gate), `own_lanes`
(a process and a lane for each), `lanes` (a process for each, and one lane, in which they take turns at iterations).
``ratios``: a side's time over that of `lanes`, for `waits`.

Two copies of `waits` can be twice as fast as one after the other, if one computes while the other waits. Turns at
iterations bring this about by themselves. Time slices, and lanes of their own on one core, do not: both copies wait
and then both compute, 30 ms for two steps instead of 20 (fifo: 40).

`packing` is what is decided for each kind: c by memory and by speed (eq. 3.1 on the measured times of 1 and of N
copies). `full_as_decided` is fifo's time over ours for `full` with that decision. MPS needs a GPU:
benchmarks/gpu/salus.py.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.salus_jobs import device_home, pin, spin, together
from fluidtune.planning import packing_limit
from fluidtune.planning.loads import PACKING_THRESHOLD
from salus_share import Need
from salus_share.gate import Gate

#: The seconds for which a step keeps the core busy. `waits` waits as long again for its input.
STEP_S = 0.010
KINDS = {"waits": STEP_S, "full": 0.0}
#: The need of a copy and the memory of the device, bytes. All copies fit.
NEED, CAPACITY = Need(100 << 20, 100 << 20), 1 << 30


def train(begin: Any, directory: str, name: str, lane: int | None, steps: int, wait: float) -> float:
    """Train one copy. Returns the seconds of its own steps. ``lane`` None: there is no gate."""
    pin()
    gate = None if lane is None else Gate(Path(directory), name, "PACK", lane=lane)
    begin()
    started = time.perf_counter()
    for _ in range(steps):
        time.sleep(wait)
        with nullcontext() if gate is None else gate.iteration():
            spin(STEP_S)
    seconds = time.perf_counter() - started
    if gate is not None:
        gate.leave()
    return seconds


def side(name: str, copies: int, steps: int, wait: float) -> float:
    """Seconds until every copy has done its steps."""
    with device_home() as directory:
        lanes = {"own_lanes": range(copies), "lanes": [0] * copies}.get(name, [None] * copies)
        rows = [(str(directory), f"copy{index}", lane, steps, wait) for index, lane in enumerate(lanes)]
        if name == "fifo":
            return sum(together(train, [row])[0] for row in rows)
        return together(train, rows)[0]


def main() -> None:
    """The command."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--copies", type=int, default=2, help="how many copies of the model (2)")
    options = arguments.parse_args()
    steps = 30 if options.quick else 200
    sides: dict[str, dict[str, float]] = {}
    packing = {}
    for name in ("fifo", "time_slicing", "own_lanes", "lanes"):
        sides[name] = {kind: side(name, options.copies, steps, wait) for kind, wait in KINDS.items()}
        say(f"{name}: " + ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in sides[name].items()))
    memory = CAPACITY // (NEED.persistent + NEED.ephemeral)
    for kind in KINDS:
        times = {1: sides["fifo"][kind] / (options.copies * steps), options.copies: sides["lanes"][kind] / steps}
        packing[kind] = min(memory, packing_limit(times, PACKING_THRESHOLD))
    # Packing switched off is FIFO.
    decided = sides["lanes" if packing["full"] > 1 else "fifo"]["full"]
    ratios = {name: row["waits"] / sides["lanes"]["waits"] for name, row in sides.items() if name != "lanes"}
    figures = result(
        "pack",
        "cpu:1",
        "real",
        copies=options.copies,
        sides=sides,
        ratios=ratios,
        ratio=min(ratios.values()),
        packing=packing,
        full_as_decided=sides["fifo"]["full"] / decided,
    )
    finish(figures, options.json)


if __name__ == "__main__":
    main()

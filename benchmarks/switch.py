"""The time from the end of one trial's iteration to the start of another trial's on the same device.

``python -m benchmarks.switch --json [--quick] [--mb N]``. The sides, in milliseconds (median): `lanes`, two processes
that take turns in a lane, with both models on the device; `checkpoint`, a switch if only one model fits: saving it to a
file and loading the other one. ``ratio`` is that of checkpoint divided by that of lanes. The model has ``--mb``
megabytes of parameters (100). ``p95`` is the 95th percentile of the lanes' switches.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.common import finish, parser, result, say
from benchmarks.salus_jobs import device_home, together
from salus_share.gate import Gate


def turns(begin: Any, directory: str, name: str, count: int) -> list[tuple[float, float]]:
    """(begin, end) of ``count`` iterations of a millisecond, in time.monotonic, which all processes share."""
    gate = Gate(Path(directory), name, "PACK")
    begin()
    found = []
    for _ in range(count):
        with gate.iteration():
            began = time.monotonic()
            time.sleep(0.001)
            found.append((began, time.monotonic()))
    return found


def switches(count: int) -> list[float]:
    """Seconds from the end of an iteration to the start of the next one, if that is another process's."""
    with device_home() as directory:
        _, found = together(turns, [(str(directory), f"job{i}", count) for i in range(2)])
    spans = sorted((began, ended, job) for job, rows in enumerate(found) for began, ended in rows)
    return [later[0] - earlier[1] for earlier, later in pairwise(spans) if earlier[2] != later[2]]


def checkpoint(megabytes: int, count: int) -> list[float]:
    """Seconds to save a model of that size and load another one; ``count`` measurements."""
    import torch

    model = torch.nn.Linear(1024, megabytes * 256)
    taken = []
    with device_home() as directory:
        for _ in range(count):
            started = time.perf_counter()
            torch.save(model.state_dict(), directory / "model")
            model.load_state_dict(torch.load(directory / "model", weights_only=True))
            taken.append(time.perf_counter() - started)
    return taken


def main() -> None:
    """The command."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--mb", type=int, default=100, help="megabytes of parameters of the checkpoint side (100)")
    options = arguments.parse_args()
    lanes = switches(200 if options.quick else 2000)
    say(f"lanes: {len(lanes)} switches, median {median(lanes) * 1e6:.0f} us")
    saved = checkpoint(options.mb, 2 if options.quick else 5)
    say(f"checkpoint: median {median(saved) * 1e3:.0f} ms")
    figures = result(
        "switch",
        "cpu:1",
        "real",
        switches=len(lanes),
        sides={
            "lanes": {"milliseconds": median(lanes) * 1e3, "p95": quantiles(lanes, n=20)[-1] * 1e3},
            "checkpoint": {"milliseconds": median(saved) * 1e3},
        },
        ratios={"checkpoint": median(saved) / median(lanes)},
        ratio=median(saved) / median(lanes),
    )
    finish(figures, options.json)


if __name__ == "__main__":
    main()

"""What a new worker process computes before its first trial's first batch: seconds of the processor's time, by import.

``python -m benchmarks.imports --json [--repeats N]``. Each repeat is a new Python process without Ray's cluster. In
this order it imports ``ray``, FluidTune's ``worker`` with Ray Tune, and the ``script`` of a search on digits with torch
and scikit-learn (small_task.py), and it makes the first ``optimizer``, which imports torch's compiler. ``whole`` is
their sum. Stock Ray Tune computes the same in each of its trial processes, except for FluidTune's modules.
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median

from benchmarks.common import ROOT, environment, finish, parser, result, say

#: Names of parts, and what is done in them.
PARTS = {
    "ray": "import ray",
    "worker": "import fluidtune.cluster.worker",
    "script": "from benchmarks.small_task import perceptron",
    "optimizer": "import torch; torch.optim.SGD(perceptron(32).parameters(), lr=0.1, momentum=0.9)",
}
_PROGRAM = """
import json, sys, time
parts, names, found = json.loads(sys.argv[1]), {}, {}
for name, code in parts.items():
    before = time.process_time()
    exec(code, names)
    found[name] = time.process_time() - before
print(json.dumps(found))
"""


def one_process() -> dict[str, float]:
    """Seconds by part in a new process."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(PARTS)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    options = parser(__doc__.splitlines()[0], repeats=True).parse_args()
    one_process()  # after it the files are in memory
    runs = [one_process() for _ in range(1 if options.quick else 5 * options.repeats)]
    seconds = {name: median(run[name] for run in runs) for name in PARTS}
    seconds["whole"] = sum(seconds.values())
    say(", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    finish(result("imports", "cpu:1", "real", seconds=seconds), options.json)


if __name__ == "__main__":
    main()

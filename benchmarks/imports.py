"""What a new worker process computes before its first trial's first batch: seconds of the processor's time, by import.

``python -m benchmarks.imports --json [--repeats N]``. Each repeat is a new Python process without Ray's cluster. In
this order it imports ``ray``, FluidTune's ``worker`` with Ray Tune, and the ``script`` of a search on digits with torch
and scikit-learn (small_task.py), and it makes the first ``optimizer``, which imports torch's compiler. ``whole`` is
their sum. Stock Ray Tune imports the same in each of its trial processes, except for FluidTune's modules.

``forked`` is what a process that is forked from this one computes, with all of that imported, for a model, its
optimizer and one batch. `benchmarks.forks` measures real forks on Ray (docs/workers.md).
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
    "worker": "import fluidtune.cluster.hosting.worker",
    "script": "from benchmarks.small_task import perceptron",
    "optimizer": "import torch; torch.optim.SGD(perceptron(32).parameters(), lr=0.1, momentum=0.9)",
}
_FIRST_BATCH = """
model = perceptron(32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.nn.functional.cross_entropy(model(torch.zeros(64, 64)), torch.zeros(64, dtype=torch.long)).backward()
optimizer.step()
"""
_PROGRAM = """
import json, os, sys, time
parts, names, found = json.loads(sys.argv[1]), {}, {}
for name, code in parts.items():
    before = time.process_time()
    exec(code, names)
    found[name] = time.process_time() - before
reading, writing = os.pipe()
if os.fork() == 0:
    exec(sys.argv[2], names)
    os.write(writing, str(time.process_time()).encode())
    os._exit(0)
os.close(writing)  # so that a child that fails is seen as one that wrote nothing
found["forked"] = float(os.read(reading, 100))
os.wait()
print(json.dumps(found))
"""


def one_process() -> dict[str, float]:
    """Seconds by part in a new process, and those of its child, ``forked``."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(PARTS), _FIRST_BATCH]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    options = parser(__doc__.splitlines()[0], repeats=True).parse_args()
    one_process()  # after it the files are in memory
    runs = [one_process() for _ in range(1 if options.quick else 5 * options.repeats)]
    seconds = {name: median(run[name] for run in runs) for name in PARTS}
    seconds["whole"] = sum(seconds.values())
    forked = median(run["forked"] for run in runs)
    say(", ".join(f"{name} {value:.2f} s" for name, value in {**seconds, "forked": forked}.items()))
    finish(result("imports", "cpu:1", "real", seconds=seconds, forked=forked), options.json)


if __name__ == "__main__":
    main()

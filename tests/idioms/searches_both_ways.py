"""Run the searches of `tune_searching` and `tune_keeping` under stock Ray Tune and under FluidTune, and compare.

    python -m tests.idioms.searches_both_ways
    python -m tests.idioms.searches_both_ways --only population fail_fast

It prints a line for each search: equal, or what came of it on both sides. Exit status 0: nothing differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray import tune

import fluidtune
from tests.idioms import tune_keeping, tune_searching

#: Ray Tune's two entry points by side.
SIDES = {
    "stock": SimpleNamespace(Tuner=tune.Tuner, run=tune.run),
    "fluid": SimpleNamespace(Tuner=fluidtune.Tuner, run=fluidtune.run),
}


def outcome(search: Any, side: str, folder: Path) -> Any:
    """What came of a search on a side, as JSON has it; an error of the search itself is one, too."""
    folder.mkdir()
    try:
        found = search(SIDES[side], folder)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    return json.loads(json.dumps(found, sort_keys=True, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {each.__name__: each for each in (*tune_searching.SEARCHES, *tune_keeping.SEARCHES)}
    parser.add_argument("--only", nargs="+", choices=names, metavar="SEARCH")
    options = parser.parse_args()
    chosen = options.only or [*names]
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    unlike = 0
    with tempfile.TemporaryDirectory() as place:
        for name in chosen:
            found = {side: outcome(names[name], side, Path(place, f"{name}-{side}")) for side in SIDES}
            equal = found["stock"] == found["fluid"]
            unlike += not equal
            print(f"{name}:", "equal" if equal else json.dumps(found, indent=1, sort_keys=True), flush=True)
    print(f"{len(chosen)} searches, {unlike} unlike")
    ray.shutdown()
    sys.exit(1 if unlike else 0)


if __name__ == "__main__":
    main()

"""`python -m tests.trials.schedules --seeds 10000`: seeded schedules of faults through trials, engine and workers.

Nothing of Ray runs. See `tests.trials.played` for what a schedule is and what is checked. ``--seed N`` shows one.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.trials.played import play


def main() -> None:
    """Play the schedules, and print how many there were and a digest of all that happened in them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules are played (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seed", type=int, help="play this one and print what happens")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        if arguments.seed is not None:
            print("\n".join(play(arguments.seed, Path(directory))))
            return
        digest, failed, began = hashlib.sha256(), 0, time.perf_counter()
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            try:
                lines = "\n".join(play(seed, Path(directory)))
            except Exception as error:
                failed += 1
                print(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
                lines = f"failed {type(error).__name__}"
            digest.update(lines.encode())
    print(f"{arguments.seeds} schedules, {failed} failed, digest {digest.hexdigest()[:16]}")
    print(f"{time.perf_counter() - began:.1f} s", file=sys.stderr)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

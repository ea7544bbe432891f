"""What the scripts here share: the command line, and the JSON line at the end. Only the driver imports it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ray import tune


def arguments(trials: int) -> argparse.Namespace:
    """The options of the command line; ``trials``: how many trials there are without ``--trials``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--reuse", action="store_true", help="set Tune's reuse_actors")
    parser.add_argument("--storage", help="where Tune keeps the results (~/ray_results)")
    return parser.parse_args()


def tune_config(args: argparse.Namespace) -> tune.TuneConfig:
    """Tune's defaults, with ``reuse_actors`` if the command line asks for it."""
    return tune.TuneConfig(reuse_actors=True) if args.reuse else tune.TuneConfig()


def told(result: Any, metrics: Sequence[str]) -> dict[str, Any]:
    """Of one trial: the values of each metric in the order of its reports; its error's last line if it failed."""
    frame = result.metrics_dataframe
    found: dict[str, Any] = {} if frame is None else {name: frame[name].tolist() for name in metrics if name in frame}
    if result.error is not None:
        found["error"] = str(result.error).strip().splitlines()[-1]
    return found


def tell(
    results: Any,
    seconds: float,
    metrics: Sequence[str],
    left: Mapping[str, Any] | None = None,
    process: str = "process",
) -> None:
    """Print the job's outcome as one JSON line.

    ``seconds``: the time of ``fit``. ``left``: what the trials left behind outside Tune, in numbers. ``process``: the
    metric with which each trial reports the id of its process.
    """
    trials = {json.dumps(result.config, sort_keys=True): told(result, metrics) for result in results}
    processes = {int(each) for result in results for each in told(result, [process]).get(process, [])}
    outcome = {
        "fit_seconds": seconds,
        "trials": len(results),
        "errors": results.num_errors,
        "processes": len(processes),
        "results": dict(sorted(trials.items())),
        "left": dict(left or {}),
    }
    print(json.dumps(outcome), flush=True)

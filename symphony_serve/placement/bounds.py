"""What no placement can better: the GPU-seconds that requests take at the least, against those that there are.

A request keeps OP GPUs busy for the seconds of each stage. Who fits all requests into the GPUs' time without a gap, the
cheapest first, attains the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from symphony_serve.placement.served_models import ServedModel
from symphony_serve.placement.simulator import Requests


def gpu_seconds(model: ServedModel) -> float:
    """The least GPU-seconds of one request, of all cuts of the model."""
    return min(shape.op * sum(cut.seconds) for shape, cut in model.cuts.items())


def _needed(models: Sequence[ServedModel], requests: Requests) -> tuple[np.ndarray, np.ndarray, float]:
    """Requests' weight and GPU-seconds by model, the cheapest weight first; and the seconds in which they can run."""
    counts = np.bincount(requests.models, minlength=len(models))
    weights = counts * np.array([one.weight for one in models])
    seconds = counts * np.array([gpu_seconds(one) for one in models])
    order = np.argsort(seconds / np.maximum(weights, 1e-300), kind="stable")
    span = float(requests.times[-1] - requests.times[0]) + max(one.slo for one in models)
    return weights[order], seconds[order], span


def most_attained(models: Sequence[ServedModel], requests: Requests, gpus: int) -> float:
    """The part of the requests' weight that this number of GPUs can attain at most."""
    weights, seconds, span = _needed(models, requests)
    return float(np.interp(gpus * span, _sums(seconds), _sums(weights)) / weights.sum())


def gpus_at_least(models: Sequence[ServedModel], requests: Requests, goal: float) -> float:
    """Fewer GPUs cannot attain ``goal``, a part of the requests' weight."""
    weights, seconds, span = _needed(models, requests)
    return float(np.interp(goal * weights.sum(), _sums(weights), _sums(seconds)) / span)


def _sums(values: np.ndarray) -> np.ndarray:
    """Of the first 0, 1, 2, ... values."""
    return np.concatenate([[0.0], np.cumsum(values)])

"""What GPUs can bear at best, from profiles alone (section 3.4). Times are seconds, rates requests per second."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from symphony_serve.batching.window import target_batch
from symphony_serve.profiles import Profile


class Peak(NamedTuple):
    """The best that some GPUs can do for one model: batches of ``size``, and the ``rate`` of requests in them."""

    size: int
    rate: float


def staggered(profile: Profile, slo: float, gpus: int) -> Peak:
    """GPUs that start one after the other (equations 1 and 2): ``(1 + 1/gpus) * l(b) <= slo``.

    A request waits at most l(b)/gpus for the start of its batch. Size and rate are 0 if no batch is in time.
    """
    size = profile.largest(slo / (1 + 1 / gpus))
    return Peak(size, gpus * size / profile.seconds(size) if size else 0.0)


def gpus_for(loads: Iterable[tuple[Profile, float, float]]) -> float:
    """GPUs that bear the loads (profile, SLO, rate) of some models; with a fraction, because models share GPUs.

    Each model has the batch size that its own rate needs (`target_batch`). On GPUs that several models share, batches
    can be larger, because more GPUs become free one after the other. So this is more than what is needed.
    """
    total = 0.0
    for profile, slo, rate in loads:
        size = target_batch(profile, rate, slo)
        total += rate * profile.seconds(size) / size
    return total

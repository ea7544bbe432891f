"""Follows a search that still runs: deploys its best trial's checkpoint when that is better than what was served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from fluidtune.errors import FluidTuneError
from fluidtune.serving.rollouts import Rollouts
from fluidtune.serving.setting import Following
from fluidtune.serving.winners import Winner, winners
from symphony_serve.errors import ServeError

logger = logging.getLogger(__name__)


def is_better(value: float, known: Iterable[float | None], mode: str) -> bool:
    """Whether a value of the metric is better than each that is known. mode: "min" or "max"."""
    sign = 1 if mode == "max" else -1
    return all(sign * value > sign * one for one in known if one is not None)


async def follow(rollouts: Rollouts, run: str, following: Following) -> None:
    """Look at the run for ever. What was refused or rolled back last is not deployed again until it has got better."""
    while True:
        await asyncio.sleep(following.every)
        try:
            (best,) = await asyncio.to_thread(winners, run, 1, following.metric, following.mode, running=True)
            await deploy_better(rollouts, best, run, following.mode)
        except (FluidTuneError, ServeError) as error:
            logger.warning("The search in %s is not followed now: %s", run, error)


async def deploy_better(rollouts: Rollouts, best: Winner, run: str, mode: str) -> None:
    """Deploy the run's best trial, if it is better. Raises ServeError if that cannot be now."""
    versions = rollouts.versions
    known = [one.what.value for one in versions.known]
    if versions.phase in ("one", "moved") and best.value is not None and is_better(best.value, known, mode):
        await rollouts.deploy(best, run, 1.0)

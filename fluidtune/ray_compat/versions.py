"""The Ray versions that FluidTune is tested on, and what differs for a library that was made for another."""

from __future__ import annotations

import ray
from packaging.version import Version

from fluidtune.errors import FluidTuneError

#: The oldest and the newest Ray that the tests run on: constraints-oldest.txt and constraints.txt pin them, and
#: pyproject.toml claims the same range.
OLDEST_RAY = "2.44"
NEWEST_RAY = "2.60"


def check_ray_version(version: str | None = None) -> None:
    """Check a version of Ray; None: the installed one.

    Raises:
        FluidTuneError: the tests have never run on this version.
    """
    found = Version(version or ray.__version__)
    low, high = Version(OLDEST_RAY), Version(NEWEST_RAY)
    if not (low.release <= found.release[:2] and found.release[:2] <= high.release):
        raise FluidTuneError(
            f"Ray {found} is outside the versions FluidTune is tested on ({OLDEST_RAY} to {NEWEST_RAY}); "
            f'install one of them: pip install "ray[tune]>={OLDEST_RAY},<2.{high.minor + 1}"'
        )


def trials_may_be_controllers() -> bool:
    """Whether a run of Ray Train V2 inside a trial has its controller in the trial's process, and not in an actor."""
    return Version(ray.__version__) < Version("2.50")

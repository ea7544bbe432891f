"""What `fluidtune serve plan` says: how many devices a rate of requests needs, by the twin. It needs no Ray.

The profiles are those that a service has kept, so they hold for devices like those that it ran on. All times are
seconds, all rates requests per second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TypeVar

from fluidtune.errors import FluidTuneError
from fluidtune.report.events import SERVICE_DIRECTORY
from fluidtune.serving.model_tables import LEAST_RATE, MOST
from symphony_serve.autoscale import BAD_RATE, gpus_for
from symphony_serve.delays import Delays
from symphony_serve.errors import ServeError
from symphony_serve.messages import Request
from symphony_serve.model_side import Model, StartPolicy
from symphony_serve.placement.arrivals import drawn
from symphony_serve.profiles import Profile, profiles_from_json
from symphony_serve.scheduler import Scheduler
from symphony_serve.twin import Simulation

K = TypeVar("K", bound=Enum)
#: The file with the profiles, in the service's directory.
PROFILES = "profiles.json"
#: Requests that are simulated for each answer. 1 % of 5,000 are 50, which is exact to a seventh of them; ten answers
#: take some seconds.
REQUESTS = 5000
#: SLOs that pass before what is measured. Queues and the measured rate are then what they stay.
WARM_UP_SLOS = 20
#: No plan is made for more devices. The twin takes minutes for more.
MOST_DEVICES = 4096


def one_of(kind: type[K], name: str, value: str) -> K:
    """The member of an enumeration. name: of the setting. Raises FluidTuneError if there is none of this value."""
    try:
        return kind(value)
    except ValueError:
        raise FluidTuneError(f"{name} is {value!r}, expected {' or '.join(one.value for one in kind)}") from None


def models_of(source: str, slo: float, starts: str) -> list[Model]:
    """The models of a run that was served, or of a file of profiles, with this SLO.

    Raises FluidTuneError if there are none, or if a batch of 1 takes longer than the SLO.
    """
    policy = one_of(StartPolicy, "starts", starts)
    profiles, delays = kept_profiles(source)
    try:
        return [
            Model(name, profile, slo, policy=policy, delays=Delays(response=delays.get(name, 0.0)))
            for name, profile in profiles.items()
        ]
    except ServeError as error:
        raise FluidTuneError(str(error))


def kept_profiles(source: str) -> tuple[dict[str, Profile], dict[str, float]]:
    """The profiles that a run's last service has kept, or those in a file, and seconds of delay, both by trial.

    Raises FluidTuneError if there are none.
    """
    path = Path(source)
    if path.is_dir():
        path = path / PROFILES if (path / PROFILES).is_file() else path / SERVICE_DIRECTORY / PROFILES
    try:
        return profiles_from_json(path.read_text())
    except (OSError, UnicodeDecodeError):
        named = sorted(str(one.parent) for one in Path(source).glob(f"{SERVICE_DIRECTORY}-*/{PROFILES}"))
        remedy = f"give one of {', '.join(named)}" if named else "serve the run once: fluidtune serve start"
        raise FluidTuneError(f"there are no profiles at {str(path)!r}; {remedy}")
    except ServeError as error:
        raise FluidTuneError(str(error))


def devices_for(models: Sequence[Model], rate: float) -> tuple[int, float]:
    """The smallest number of devices that bear ``rate``, shared equally by the models, by the twin.

    And the part of the requests to some model that are then refused or late, at the most.
    """
    if not LEAST_RATE <= rate <= MOST:
        raise FluidTuneError(f"rate is {rate}, expected requests per second above 0 ({LEAST_RATE:g} to {MOST:g})")
    low, high = 0, max(1, round(gpus_for((one.profile, one.budget, rate / len(models)) for one in models)))
    bad = cache(lambda devices: bad_rate(models, devices, rate))
    while high <= MOST_DEVICES and bad(high) > BAD_RATE:
        low, high = high, 2 * high
    if high > MOST_DEVICES:
        said = f"{low} devices do not bear" if low else f"about {high} devices are needed for"
        raise FluidTuneError(f"{said} {rate:g} requests/s; ask about a smaller rate")
    least = low + 1 + bisect_left(range(low + 1, high), True, key=lambda devices: bad(devices) <= BAD_RATE)
    return least, bad(least)


def bad_rate(models: Sequence[Model], devices: int, rate: float) -> float:
    """The part of the requests to some model that are refused or late, at the most; they are Poisson arrivals."""
    warm_up, count = WARM_UP_SLOS * max(one.slo for one in models), len(models)
    given = drawn([rate / count] * count, [1.0] * count, REQUESTS + round(rate * warm_up))
    coming = (
        Request(number, models[one].name, at, at + models[one].slo)
        for number, (at, one) in enumerate(zip(given.times.tolist(), given.models.tolist(), strict=True))
    )
    simulation = Simulation(Scheduler(models), devices, coming, warm_up, REQUESTS / rate)
    simulation.play()
    return simulation.worst_bad_rate

"""What `fluidtune serve plan` says: how many devices a rate of requests needs, by the twin. It needs no Ray.

The profiles are those that a service has kept, so they hold for devices like those that it ran on. All times are
seconds, all rates requests per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fluidtune.errors import FluidTuneError
from fluidtune.report.events import SERVICE_DIRECTORY
from fluidtune.serving.model_tables import LEAST_RATE, MOST
from symphony_serve.autoscale import BAD_RATE, gpus_for
from symphony_serve.delays import Delays
from symphony_serve.errors import ServeError
from symphony_serve.model_side import Model, StartPolicy
from symphony_serve.profiles import Profile, profiles_from_json
from symphony_serve.scheduler import Scheduler
from symphony_serve.twin import Outcome, Simulation, goodput, poisson

if TYPE_CHECKING:
    from rich.console import RenderableType

K = TypeVar("K", bound=Enum)
#: The file with the profiles, in the service's directory.
PROFILES = "profiles.json"
#: Requests that are simulated for each answer, and the precision of a goodput as a part of it. 1 % of 5,000 requests
#: are 50, which is exact to a seventh of them; ten answers take some seconds.
REQUESTS, PRECISION = 5000, 0.02
#: SLOs that pass before what is measured. Queues and the measured rate are then what they stay.
WARM_UP_SLOS = 20
#: No plan is made for more devices. The twin takes minutes for more.
MOST_DEVICES = 4096


@dataclass(frozen=True)
class Forecast:
    """What a number of devices does. goodput: the highest rate of which at most 1 % are refused or late.

    bad_rate: the part of the requests that are, at the rate that was asked about. median_batch, utilisation: at that
    rate.
    """

    devices: int
    goodput: float
    bad_rate: float
    median_batch: int
    utilisation: float


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


def devices_for(models: Sequence[Model], rate: float) -> int:
    """The smallest number of devices of which the twin says that they bear ``rate``, shared equally by the models."""
    if not LEAST_RATE <= rate <= MOST:
        raise FluidTuneError(f"rate is {rate}, expected requests per second above 0 ({LEAST_RATE:g} to {MOST:g})")
    low, high = 0, max(1, round(gpus_for((one.profile, one.budget, rate / len(models)) for one in models)))
    while high <= MOST_DEVICES and simulated(models, high, rate).worst_bad_rate > BAD_RATE:
        low, high = high, 2 * high
    if high > MOST_DEVICES:
        said = f"{low} devices do not bear" if low else f"about {high} devices are needed for"
        raise FluidTuneError(f"{said} {rate:g} requests/s; ask about a smaller rate")
    while high - low > 1:
        middle = (low + high) // 2
        if simulated(models, middle, rate).worst_bad_rate > BAD_RATE:
            low = middle
        else:
            high = middle
    return high


def forecast(models: Sequence[Model], devices: int, rate: float) -> Forecast:
    found = goodput(lambda asked: simulated(models, devices, asked), rate, PRECISION)
    outcome = simulated(models, devices, rate)
    return Forecast(devices, found, outcome.bad_rate, outcome.median_batch(), outcome.utilisation)


def simulated(models: Sequence[Model], devices: int, rate: float) -> Outcome:
    """The models at a total rate of Poisson arrivals that is shared equally."""
    rates = dict.fromkeys((one.name for one in models), rate * (1 / len(models)))
    slos = {one.name: one.slo for one in models}
    requests = poisson(rates, slos, seed=1)
    return Simulation(Scheduler(models), devices, requests, WARM_UP_SLOS * max(slos.values()), REQUESTS / rate).run()


def render(found: Sequence[Forecast], rate: float, slo: float) -> RenderableType:
    """The forecasts as a table for `rich`, one row per number of devices."""
    from rich.table import Table

    title = f"Predicted by the twin: {rate:g} requests/s, Poisson, SLO {1e3 * slo:g} ms"
    table = Table(title=title, title_justify="left")
    for name in ("devices", "requests/s in time", "refused or late", "median batch", "devices busy"):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(
            str(one.devices),
            f"{one.goodput:.4g}",
            f"{one.bad_rate:.1%}",
            str(one.median_batch),
            f"{one.utilisation:.0%}",
        )
    return table

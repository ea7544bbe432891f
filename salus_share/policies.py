"""Which job goes first: one small class for each policy.

A policy says how many lanes a device has, and by a rank (the lowest goes first) whose iteration runs next in a lane. It
cannot break 2.1. It holds no state, so that the twin and every process at a gate ask it and get the same answer.

To add a policy here, derive a class from `Policy` and add it to `POLICIES`. A user's own policy needs no change here:
derive a class from `Policy`, and give its name as "module:Class" where a policy is asked for.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from salus_share.errors import SalusError

#: A rank; ranks are compared as tuples.
Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a policy sees of a job.

    ``arrival``: its position in the order of arrival at the device, from 1. ``service``: the seconds of its iterations,
    counted from the clock of its lane when it came (`Seats.others`). ``last_turn``: the device's turn in which it
    ran last. ``remaining``: the seconds that it has left if it runs alone, None if that is not known. ``rung``: how
    often a tuner has promoted it.
    """

    arrival: int
    service: float = 0.0
    last_turn: int = 0
    remaining: float | None = None
    rung: int = 0

    @property
    def left(self) -> float:
        """Seconds left; infinite if that is not known."""
        return math.inf if self.remaining is None else self.remaining


class Policy:
    """The base class: in a lane, the job that has not run for longest goes first."""

    #: The name by which a user asks for it.
    name = ""
    #: The most jobs that may be on the device, and the most lanes. None: all that fit.
    max_jobs: int | None = None
    max_lanes: int | None = None
    #: Whether a lane is kept for a moment for the job that ran last, if it would be next (`turns.LINGER_S`). If not,
    #: two jobs that both come back at once take turns, whatever their rank.
    lingers = True

    def turn(self, job: Standing) -> Rank:
        """Rank among the jobs of a lane that are ready to run an iteration."""
        return (job.last_turn,)


class Fifo(Policy):
    """One job at a time, in order of arrival: a device without sharing."""

    name = "FIFO"
    max_jobs = 1

    def turn(self, job: Standing) -> Rank:
        return (job.arrival,)


class Pack(Policy):
    """As many lanes as fit, for the makespan (section 2.4.1)."""

    name = "PACK"


class Srtf(Policy):
    """The shortest remaining time first, pre-empting at iteration boundaries (section 2.4.2).

    There is one lane, so that nothing slows the shortest job. A switch within it moves no data.
    """

    name = "SRTF"
    max_lanes = 1

    def turn(self, job: Standing) -> Rank:
        return (job.left, job.arrival)


class Fair(Policy):
    """The jobs of a lane get equal service over time (section 2.4.3)."""

    name = "FAIR"

    def turn(self, job: Standing) -> Rank:
        return (job.service, job.last_turn)


class Hpt(Fair):
    """For tuners: a promoted trial goes before those that were not. Trials of one rung share as under FAIR."""

    name = "HPT"

    def turn(self, job: Standing) -> Rank:
        return (-job.rung, job.service, job.last_turn)


#: The policies that are known by name. FluidTune's ``lanes=`` and the tests read them from here.
POLICIES: Mapping[str, type[Policy]] = {cls.name: cls for cls in (Fifo, Pack, Srtf, Fair, Hpt)}


def policy(name: str) -> Policy:
    """The policy of that name, or the user's own if the name is "module:Class". Raises SalusError if there is none."""
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SalusError(f"policy {name!r} is none of {', '.join(POLICIES)} nor a module:Class ({error})") from error
    if not isinstance(made, Policy):
        raise SalusError(f"policy {name!r} is a {type(made).__name__}, expected a class derived from Policy")
    return made

"""Who goes first: one small class per policy.

A policy answers three questions by giving each job a rank (the lowest goes first): whom to admit next, whose
iteration runs next in a lane, and who may take another's memory. It never breaks 2.1 and holds no state, so that
the scheduler, the twin and every process at the gate can ask it. To write one: derive from `Policy`, and name it
as "module:Class" where a policy is asked for.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from salus_share.errors import SalusError

#: What a rank is made of; compared as tuples.
Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a policy sees of a job.

    ``arrival``: the how manyth it is. ``service``: seconds of iterations it got, counted from where its lane was
    when it came. ``last_turn``: when it ran last, counted in turns of the device. ``remaining``: seconds left alone
    on the device, None if unknown. ``rung``: how often a tuner has promoted it.
    """

    arrival: int
    service: float = 0.0
    last_turn: int = 0
    remaining: float | None = None
    rung: int = 0

    @property
    def left(self) -> float:
        """Seconds left; what is unknown is longer than anything known."""
        return math.inf if self.remaining is None else self.remaining


class Policy:
    """In order of arrival to the device; in a lane, whoever has not run for longest."""

    #: The name that it is asked for by.
    name = ""
    #: How many jobs, and how many lanes, may be on the device; None: as many as fit.
    max_jobs: int | None = None
    max_lanes: int | None = None
    #: How many jobs may go past one that waits because it does not fit yet. Then all behind it wait too.
    patience = 8

    def entry(self, job: Standing) -> Rank:
        """Rank among the jobs that wait for admission."""
        return (job.arrival,)

    def turn(self, job: Standing) -> Rank:
        """Rank among the jobs of a lane that are ready to run an iteration."""
        return (job.last_turn,)

    def evicts(self, newcomer: Standing, resident: Standing) -> bool:
        """Whether ``resident`` must commit and leave the device when ``newcomer`` does not fit beside it."""
        return False


class Fifo(Policy):
    """One job at a time, in order of arrival: a device as it is used today."""

    name = "FIFO"
    max_jobs = 1

    def turn(self, job: Standing) -> Rank:
        return (job.arrival,)


class Pack(Policy):
    """As many lanes as fit, for the makespan (section 2.4.1)."""

    name = "PACK"


class Srtf(Policy):
    """The shortest remaining time first, pre-empting at iteration boundaries (section 2.4.2).

    One lane, so that nothing slows the shortest. Switching moves no data. Only when persistent memory does not fit
    do the longest leave, at a commit: a job that could run alone is admitted whoever is there.
    """

    name = "SRTF"
    max_lanes = 1

    def entry(self, job: Standing) -> Rank:
        return (job.left, job.arrival)

    def turn(self, job: Standing) -> Rank:
        return (job.left, job.arrival)

    def evicts(self, newcomer: Standing, resident: Standing) -> bool:
        return newcomer.left < resident.left


class Fair(Policy):
    """Equal service over time for the jobs of a lane (section 2.4.3)."""

    name = "FAIR"

    def turn(self, job: Standing) -> Rank:
        return (job.service, job.last_turn)


class Hpt(Fair):
    """For a tuner: a promoted trial goes before those it left behind, as under SRTF; a rung of equals is FAIR."""

    name = "HPT"

    def entry(self, job: Standing) -> Rank:
        return (-job.rung, job.arrival)

    def turn(self, job: Standing) -> Rank:
        return (-job.rung, job.service, job.last_turn)

    def evicts(self, newcomer: Standing, resident: Standing) -> bool:
        return newcomer.rung > resident.rung


POLICIES: Mapping[str, type[Policy]] = {cls.name: cls for cls in (Fifo, Pack, Srtf, Fair, Hpt)}


def policy(name: str) -> Policy:
    """The policy of that name, or of "module:Class" for one's own. Raises SalusError if there is none."""
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

"""What an arbiter keeps beside leases: its settings and the apps it knows. Plain data; `arbiter` decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from themis_bridge.errors import ThemisError
from themis_bridge.messages import Report

#: An app's work may turn out larger than it said by this factor before its rho counts for less.
SLACK = 1.05
#: The same of what it said that bad placements cost it: its end comes nearer there by so much more than time passes.
HELD_UP = 1.05
#: The power of what its work is beyond the slack by which rho is divided. (`benchmarks.fairness --trace FILE --sweeps`:
#: at 2, with a slack of 1.1, an app that claims 0.9 or 0.75 of its work gains.)
WORK_POWER = 3
#: Work is the same, within this share of it.
SAME = 0.01
#: Parts of its full speed: an app that says that it is slower is held up by its placement.
FULL = 0.95


@dataclass(frozen=True)
class Settings:
    """What an operator sets; all seconds.

    ``f``: the fairness knob, the worst ``1 - f`` of the apps bid. ``lease_s``: length of a lease (a holder's first:
    half of that more or less). ``notice_s``: how long before its end a lease is auctioned, and its holder told.
    ``answer_s``: how long an answer is waited for. ``patience_s``: an app unheard of for so long is gone. ``pace_s``:
    between rounds while nothing new happens. ``quotas``: most GPUs, ``weights``: factor of rho when the worst are
    chosen; both by app.
    """

    f: float = 0.8
    lease_s: float = 600.0
    notice_s: float = 30.0
    answer_s: float = 2.0
    patience_s: float = 30.0
    pace_s: float = 5.0
    quotas: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.f <= 1:
            raise ThemisError(f"f={self.f!r}: expected a number between 0 (all apps bid) and 1 (only the worst)")
        for name in ("lease_s", "answer_s", "patience_s", "pace_s"):
            # a lease may last for ever
            if not getattr(self, name) > 0 or (name != "lease_s" and math.isinf(getattr(self, name))):
                raise ThemisError(f"{name}={getattr(self, name)!r}: expected seconds > 0")
        if not 0 <= self.notice_s < self.lease_s:
            raise ThemisError(f"notice_s={self.notice_s!r}: expected seconds >= 0, below lease_s={self.lease_s!r}")
        if "" in {*self.quotas, *self.weights}:
            raise ThemisError("a quota or a weight of the app named ''; say whose it is")
        for app, quota in self.quotas.items():
            if isinstance(quota, bool) or not isinstance(quota, int) or quota < 0:
                raise ThemisError(f"the quota of app {app!r} is {quota!r}; expected a whole number of GPUs >= 0")
        for app, weight in self.weights.items():
            if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight > 0):
                raise ThemisError(f"the weight of app {app!r} is {weight!r}; expected a number > 0")

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """These with ``changes``; quotas and weights app by app, None takes one away. Raises ThemisError."""
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                raise ThemisError(f"{name!r} is not a setting of the arbiter; use one of: {', '.join(known)}")
        changes = dict(changes)
        for name in changes.keys() & {"quotas", "weights"}:
            both = {**getattr(self, name), **changes[name]}
            changes[name] = {app: value for app, value in both.items() if value is not None}
        return replace(self, **changes)


@dataclass
class App:
    """One app as the arbiter knows it."""

    session: str
    joined: float
    heard: float
    #: Integral of the number of apps since it joined.
    crowd: float = 0.0
    #: The last rho it reported; None before its first answer.
    rho: float | None = None
    #: Seconds of work done under its leases, and done a second; of both: as if on all GPUs that it could use.
    served: float = 0.0
    speed: float = 0.0
    #: The most GPUs that it could use.
    useful: int = 1
    #: The least that its work, done and left, ever came to, over what it said that this is.
    least: float = math.inf
    #: Its rho is divided by this: above 1, it had more to do than it said, or is less held up than it says.
    doubt: float = 1.0
    #: Of its last report: tokens of the leases that it held, seconds since it joined and until it would end with them,
    #: and what all its work takes.
    tokens: list[int] = field(default_factory=list)
    at: float = 0.0
    ends: float = 0.0
    whole: float = 0.0
    #: Seconds by which its end came nearer, and that passed, on GPUs that it says hold it up, and on others.
    held_up: tuple[float, float] = (0.0, 0.0)
    free: tuple[float, float] = (0.0, 0.0)

    def take(self, report: Report, held: Sequence[int], gpus: int, elapsed: float, contention: float) -> None:
        """Note a report, made ``elapsed`` seconds after it joined, while there were ``gpus`` GPUs.

        Whoever claims less work than it has is always nearly done, and the more is done the more it has been in all.
        What is done is the arbiter's own count; of the report only how far from ideal it goes on comes into it.

        Whoever overstates what a bad placement costs sees its end come nearer by more than the time that passes while
        it has one, and not while it has a good one. (Who overstates its work sees that on both. What trials that stop
        early would have done is no progress and left out: all the app's work is less then.)

        Args:
            held: tokens of its leases, as the arbiter knows them now.
            contention: N_avg of its life.
        """
        self.rho = report.rho
        if not (report.whole and report.useful and gpus):
            return
        ends = report.rho * report.whole * contention - elapsed
        tokens = list(held) if tuple(held) == tuple(report.leases) else []
        if tokens and tokens == self.tokens and abs(report.whole / self.whole - 1) < SAME:
            self._compare(self.ends - ends, elapsed - self.at)
        self.tokens, self.at, self.ends, self.whole = tokens, elapsed, ends, report.whole
        grown = (self.served + report.left) / report.whole
        self.least = min(self.least, grown)
        over = max(1.0, grown / self.least / SLACK) if self.least else 1.0
        self.doubt = over**WORK_POWER * self._overstated() ** 2
        self.useful = min(report.useful, gpus)
        if held and ends > 0:
            self.speed = min(1.0, report.left / ends * self.useful / len(held))

    def _compare(self, came: float, passed: float) -> None:
        """Its end came nearer by ``came`` seconds while ``passed`` went by on the same GPUs."""
        if self.speed < FULL:
            self.held_up = self.held_up[0] + came, self.held_up[1] + passed
        else:
            self.free = self.free[0] + came, self.free[1] + passed

    def _overstated(self) -> float:
        """By what factor it overstates what bad placements cost it; 1 where that may be an error."""
        (came, passed), (usual, there) = self.held_up, self.free
        if not passed:
            return 1.0
        factor = came / passed / max(1.0, usual / there if there else 1.0)
        return factor if factor > HELD_UP else 1.0

"""The arbiter's settings: what an operator may change, with defaults and checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from themis_bridge.errors import ThemisError

#: A lease is offered at least this often before it ends, so that a GPU that nobody wants now may be wanted then.
OFFERS_IN_NOTICE = 4
#: GPUs that an app without a quota may hold: more than any cluster has.
NO_QUOTA = 10**9


@dataclass(frozen=True)
class Settings:
    """The settings. Names that end in ``_s`` are seconds.

    f: the paper's fairness knob. The ``1 - f`` share of the apps with the worst rho bid. f = 0.8 is the paper's choice
        (section 6.4).
    lease_s: length of a lease; 10 minutes is the paper's choice (section 6.4). The first lease of a GPU is up to half
        shorter or longer.
    notice_s: how long before its end a lease is auctioned and its holder told; an iteration that outlasts it is lost.
    answer_s: an app whose report is older has no part in a round.
    patience_s: an app that has sent nothing for this long is gone.
    pace_s: time between rounds while nothing new happens.
    quotas: by user, the most GPUs that his apps may hold together. An app without a user is its own user.
    weights: by user, a factor on the rho of his apps when the worst apps are chosen.
    reserves: by app, the GPUs that no auction takes from it, see `auctioneer.set_aside`.
    half_life_s: if it is above 0, past usage makes the weight of a user smaller, see `arbiter_state.fair_share`. Half
        of it is forgotten after this time.
    most_demand: if it is above 0, an app that comes is refused while the apps that are there could use more than this
        number times the GPUs of the cluster (no app counts for more than all of them). Footnote 2 of the paper: rho <=
        1 for all assumes such an admission.
    """

    f: float = 0.8
    lease_s: float = 600.0
    notice_s: float = 30.0
    answer_s: float = 2.0
    patience_s: float = 30.0
    pace_s: float = 5.0
    quotas: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    reserves: Mapping[str, int] = field(default_factory=dict)
    half_life_s: float = 0.0
    most_demand: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.f <= 1:
            raise ThemisError(f"f={self.f!r}: expected a number between 0 (all apps bid) and 1 (only the worst)")
        for name in ("lease_s", "answer_s", "patience_s", "pace_s"):
            # Only a lease may be infinite: FIFO's never end.
            if not getattr(self, name) > 0 or (name != "lease_s" and math.isinf(getattr(self, name))):
                raise ThemisError(f"{name}={getattr(self, name)!r}: expected seconds > 0")
        if not 0 <= self.notice_s < self.lease_s:
            raise ThemisError(f"notice_s={self.notice_s!r}: expected seconds >= 0, below lease_s={self.lease_s!r}")
        for name, unit in (("half_life_s", "seconds"), ("most_demand", "a number")):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ThemisError(f"{name}={value!r}: expected {unit} > 0, or 0 to do without it")
        if "" in {*self.quotas, *self.weights, *self.reserves}:
            raise ThemisError("a quota, a weight or a reserve is given for the name ''; say whose it is")
        for what, given in (("quota of user", self.quotas), ("reserve of job", self.reserves)):
            for app, count in given.items():
                if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                    raise ThemisError(f"the {what} {app!r} is {count!r}; expected a whole number of devices >= 0")
        for app, weight in self.weights.items():
            if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight > 0):
                raise ThemisError(f"the weight of user {app!r} is {weight!r}; expected a number > 0")

    @property
    def retry_s(self) -> float:
        """Seconds between rounds while nothing changes."""
        return min(self.pace_s, self.notice_s / OFFERS_IN_NOTICE) or self.pace_s

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with ``changes``.

        Quotas, weights and reserves change app by app; None removes an app's entry. Raises ThemisError for an unknown
        name or a value that is not allowed.
        """
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                raise ThemisError(f"{name!r} is not a setting of the arbiter; use one of: {', '.join(known)}")
        changes = dict(changes)
        for name in changes.keys() & {"quotas", "weights", "reserves"}:
            both = {**getattr(self, name), **changes[name]}
            changes[name] = {app: value for app, value in both.items() if value is not None}
        return replace(self, **changes)

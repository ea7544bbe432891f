"""What the arbiter knows: GPUs, apps, leases and its clock; also the books that store it.

Here are questions that several parts of the arbiter ask of that state. What happens to it is decided in `arbiter`
(events), `auctioneer` (rounds) and `lease_manager` (leases).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import asdict
from typing import Any, get_args, get_origin, get_type_hints

from themis_bridge.app_record import AppRecord, crowding
from themis_bridge.bids import Endless, Valuation
from themis_bridge.leases import Lease, LeaseTable
from themis_bridge.locality import Gpu
from themis_bridge.messages import Heartbeat, Report
from themis_bridge.settings import NO_QUOTA, Settings

#: Doubts about this number of users are remembered, the latest ones: whoever joins under ever new names makes a user of
#: each.
MOST_DOUBTS = 1000
#: GPU seconds of usage that are forgotten; any lease is more.
FORGOTTEN = 1.0


class ArbiterState:
    """See the module. Everything but ``gpus`` and ``reports`` is stored in the books.

    One thing: all that the arbiter knows is written to the books at once.
    """

    def __init__(self, settings: Settings | None = None):
        self.settings = settings or Settings()
        #: GPU id -> the GPU, for all that are in the cluster now.
        self.gpus: dict[str, Gpu] = {}
        #: The apps that take part, by name.
        self.apps: dict[str, AppRecord] = {}
        #: App -> its newest report, of those in ``apps`` that have sent one to this arbiter.
        self.reports: dict[str, Report] = {}
        #: Apps that have been silent for so long that they hold nothing, and whose names are kept.
        self.away: dict[str, AppRecord] = {}
        #: User -> (the doubt about him, GPU seconds of honest work that his apps still have to do to end it).
        self.doubts: dict[str, tuple[float, float]] = {}
        #: User -> decayed GPU seconds; empty without a half-life.
        self.usage: dict[str, float] = {}
        self.leases = LeaseTable()
        #: Sessions that have left and signs of life that Ray has removed -> when that was told. What comes in their
        #: names is late.
        self.left: dict[str, float] = {}
        #: Seconds. It starts at 0, never goes back, and goes on from the books when the arbiter restarts.
        self.clock = 0.0
        #: Number of rounds begun so far.
        self.rounds = 0
        #: Seconds that `account` has not seen yet.
        self._unaccounted = 0.0

    # --- the books

    def saved(self) -> dict[str, Any]:
        """The books: all that the next arbiter needs, as plain data."""
        self.account()
        return {
            "settings": asdict(self.settings),
            "apps": {name: asdict(app) for name, app in self.apps.items()},
            "away": {name: asdict(app) for name, app in self.away.items()},
            "doubts": self.doubts,
            "usage": self.usage,
            "leases": self.leases.saved(),
            "left": self.left,
            "rounds": self.rounds,
            "clock": self.clock,
        }

    @classmethod
    def loaded(cls, data: Mapping[str, Any], gpus: Iterable[Gpu], newest: int = 0) -> ArbiterState:
        """The state that ``data`` describes.

        Args:
            data: what `saved` returned; empty if the books are lost.
            gpus: the GPUs in the cluster now.
            newest: the largest token that any reservation ever had; the next one is larger.

        Raises TypeError, KeyError, AttributeError or ThemisError for data that no arbiter of this version has saved.
        """
        state = cls(Settings(**data["settings"]) if "settings" in data else None)
        state.apps = {name: AppRecord(**app) for name, app in data.get("apps", {}).items()}
        state.away = {name: AppRecord(**app) for name, app in data.get("away", {}).items()}
        state.doubts = {user: (float(doubt), float(owed)) for user, (doubt, owed) in data.get("doubts", {}).items()}
        state.usage = {user: float(used) for user, used in data.get("usage", {}).items()}
        state.leases = LeaseTable.loaded(data.get("leases", {}), newest)
        state.left = {name: float(at) for name, at in data.get("left", {}).items()}
        state.rounds = int(data.get("rounds", 0))
        state.clock = float(data.get("clock", 0.0))
        state.gpus = {gpu.id: gpu for gpu in gpus}
        for record in (*state.apps.values(), *state.away.values(), *state.leases):
            for name, hint in get_type_hints(type(record)).items():
                if not _fits(value := getattr(record, name), hint):
                    raise TypeError(f"{name}={value!r} of a {type(record).__name__}: expected {hint}")
        for app in state.apps.values():
            # No app is taken for silent because of the time without an arbiter.
            app.heard = state.clock
        return state

    # --- time

    def elapse(self, seconds: float) -> None:
        """Let time pass. It is accounted to the apps by `account`, which must be called before leases change."""
        self.clock += seconds
        self._unaccounted += seconds

    def account(self) -> None:
        """Account the time that has passed to the apps. It takes time for each app and each lease."""
        seconds, self._unaccounted = self._unaccounted, 0.0
        if not seconds:
            return
        held = Counter(lease.app for lease in self.leases if not lease.waits)
        share = crowding(self.apps)
        for name, app in self.apps.items():
            app.crowd += seconds * share[name]
            app.serve(seconds, held[name])
        self._account_usage(seconds, held)

    def _account_usage(self, seconds: float, held: Mapping[str, int]) -> None:
        """Account what the users had. ``held``: app -> its GPUs."""
        half_life = self.settings.half_life_s
        if not half_life:
            self.usage.clear()
            return
        now: Counter[str] = Counter()
        for name in self.apps:
            now[self.user_of(name)] += held.get(name, 0)
        for user in {*self.usage, *now}:
            used = decayed(self.usage.pop(user, 0.0), now[user], seconds, half_life)
            if used > FORGOTTEN:
                self.usage[user] = used

    # --- apps that come, fall silent and go

    @property
    def name_kept_s(self) -> float:
        """Seconds after its last sign for which an app's name is kept: a lease, or the patience if that is more."""
        lease = self.settings.lease_s
        return max(self.settings.patience_s, lease if math.isfinite(lease) else Settings.lease_s)

    def holder(self, name: str) -> AppRecord | None:
        """The app that has the name, also if it is away."""
        return self.apps.get(name) or self.away.get(name)

    def silent(self, seconds: float) -> list[tuple[str, str, str]]:
        """(app, session, sign of life) of the apps that have been silent for longer than this."""
        known = (*self.apps.items(), *self.away.items())
        return [(name, app.session, app.life) for name, app in known if app.life and self.clock - app.heard > seconds]

    def set_away(self, name: str) -> None:
        """The app has been silent for too long. It does not count any more, and its name is kept."""
        app = self.away[name] = self.apps.pop(name)
        self.reports.pop(name, None)
        app.crowd /= self.clock - app.joined

    def add(self, name: str, user: str) -> AppRecord:
        """The app joins. One that was away is the app that it was; its absence counts as a part of its life."""
        app = self.away.pop(name, None)
        if app is None:
            former, _ = self.doubts.get(user or name, (1.0, 0.0))
            hidden = [each.distrust for other, each in self.away.items() if (each.user or other) == (user or name)]
            app = AppRecord("", self.clock, self.clock, former=max(former, *hidden, 1.0))
        else:
            app.crowd *= self.clock - app.joined
            app.rho = None
        self.apps[name] = app
        return app

    def forget(self, name: str) -> None:
        """The app is gone."""
        self.reports.pop(name, None)
        app = self.apps.pop(name, None) or self.away.pop(name, None)
        if app is not None:
            self._remember_user(name, app)

    def _remember_user(self, name: str, app: AppRecord) -> None:
        """An app leaves: remember the doubt about it as one about its user, so that his next app has it, too.

        The user gets rid of it by honest work: when apps of his without a doubt have done the GPU seconds of those
        with one. Apps that did no work change nothing.
        """
        user, (doubt, work) = app.user or name, app.leave()
        before, owed = self.doubts.pop(user, (1.0, 0.0))
        if doubt > 1.0:
            before, owed = max(before, doubt), owed + work
        else:
            owed -= work
        if owed > 0:
            self.doubts[user] = before, owed
            if len(self.doubts) > MOST_DOUBTS:
                del self.doubts[next(iter(self.doubts))]

    # --- what apps report

    def hear(self, event: Heartbeat) -> bool:
        """Note who an app is and its report, unless a newer one has come. Returns whether it is the newest one."""
        app = self.apps.get(event.app) or self.add(event.app, event.user)
        if app.session == event.session and event.number <= app.number:
            return False
        app.session, app.number, app.heard, app.compared = event.session, event.number, self.clock, False
        app.user, app.life, app.together, app.bundle = event.user, event.life, event.together, dict(event.bundle)
        self.reports[event.app] = event.report
        return True

    def take_report(self, name: str) -> None:
        """Compute an app's rho from its newest report, and compare that with what happened, once.

        It is to be new: an app that has worked since could not say so.
        """
        app = self.apps[name]
        new, app.compared = not app.compared, True
        held = {lease.token: self.gpus[lease.gpu] for lease in self.leases.of(name)}
        app.take_report(self.reports[name], held, len(self.gpus), self.clock - app.joined, self.contention(name), new)

    def worth(self, name: str) -> Valuation | Endless:
        """What GPUs are worth to an app now."""
        app, held = self.apps[name], len(self.leases.of(name))
        return app.worth(self.reports[name], held, len(self.gpus), self.clock - app.joined, self.contention(name))

    # --- questions

    def contention(self, name: str) -> float:
        """N_avg: the app's `crowding`, averaged over its life."""
        self.account()
        app = self.apps[name]
        life = self.clock - app.joined
        return max(1.0, app.crowd / life) if life > 0 else float(crowding(self.apps)[name])

    def quota_left(self, user: str) -> int:
        """How many more GPUs the user's quota allows. It counts all leases of all his apps."""
        quota = self.settings.quotas.get(user)
        return NO_QUOTA if quota is None else quota - len(self.leases_of_user(user))

    def reserve(self, app: str) -> int:
        """The number of GPUs that no auction takes from the app; of an app that ends, no more than it can use.

        An app that never ends keeps its reserve while it is idle as well, because its load may come back at any moment.
        """
        record, reserve = self.apps[app], self.settings.reserves.get(app, 0)
        most = min(reserve, self.settings.quotas.get(self.user_of(app), NO_QUOTA))
        most -= most % record.together
        return most if record.endless else min(most, record.wanted)

    def leases_of_user(self, user: str) -> list[Lease]:
        return [each for each in self.leases if not each.waits and self.user_of(each.app) == user]

    def weights(self) -> Mapping[str, float]:
        """User -> his weight by the settings and, with a half-life, by what he had in the past."""
        weights = self.settings.weights
        if not self.settings.half_life_s:
            return weights
        past = fair_share(self.usage, set(map(self.user_of, self.apps)))
        return {user: factor * weights.get(user, 1.0) for user, factor in past.items()}

    def why_not_admitted(self, app: str) -> str:
        """Why an app that comes is refused, in one line; "" if it is not."""
        most, wanted = self.settings.most_demand, sum(each.wanted for each in self.apps.values())
        if not most or not self.gpus or wanted <= most * len(self.gpus):
            return ""
        return (
            f"app {app!r} is not admitted: the apps that are here could use {wanted} GPUs, which is more than {most:g} "
            f"times the {len(self.gpus)} GPUs of the cluster (the arbiter's setting most_demand); start it later"
        )

    def barred(self, gpu: str) -> frozenset[str]:
        """The apps that must not be granted the GPU now: those that ask for as much as the one that waits there."""
        lease = self.leases.get(gpu)
        if lease is None or not lease.waits:
            return frozenset()
        least = self.apps[lease.app].bundle.items()
        return frozenset(
            name
            for name, each in self.apps.items()
            if all(each.bundle.get(resource, 0.0) >= amount for resource, amount in least)
        )

    def user_of(self, app: str) -> str:
        return self.apps[app].user or app

    def is_kept(self, lease: Lease, offer: Container[str]) -> bool:
        """Whether the holder keeps the GPU whatever comes of a round on ``offer``."""
        return not lease.waits and lease.gpu not in offer and not lease.ending

    def offerable(self, recalled: Container[str] = ()) -> dict[str, Gpu]:
        """GPUs that can be auctioned now: free for at least one app, or under a lease that is on offer or recalled."""
        found = {}
        for name, gpu in self.gpus.items():
            lease = self.leases.get(name)
            if lease is None or lease.waits:
                if not self.apps.keys() <= self.barred(name):
                    found[name] = gpu
            elif name in recalled or lease.on_offer(self.clock, self.settings.notice_s):
                found[name] = gpu
        return found


def decayed(before: float, gpus: int, seconds: float, half_life_s: float) -> float:
    """Usage after a user has held ``gpus`` GPUs for ``seconds``; GPU seconds, of which half fade in a half-life.

    The result does not depend on the steps into which the time is divided.
    """
    left = 0.5 ** (seconds / half_life_s)
    return before * left + gpus * half_life_s / math.log(2) * (1 - left)


def fair_share(usage: Mapping[str, float], users: Collection[str]) -> dict[str, float]:
    """User -> F, by which the rho of his apps is multiplied where apps are compared: 1 without any usage, then less.

    It is Slurm's fair share (multifactor priority plugin, "classic"): F = 2 ** (-usage / share), where a user's usage
    and share are parts of those of all users. So F is 0.5 for a user who had exactly his share.

    ``usage``: user -> decayed usage, also of users who have no app now. ``users``: those who have an app now. Everybody
    in either of them has an equal share.
    """
    total, count = sum(usage.values()), len({*usage, *users})
    return {user: 2.0 ** (-usage.get(user, 0.0) * count / total) if total else 1.0 for user in users}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from the books is of a field's type, so that no tick fails later. A list is also a tuple."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if type(None) in inner:
        return value is None or _fits(value, inner[0])
    parts = list(value.values()) if type(value) is dict else value if type(value) in (list, tuple) else ()
    right = type(value) in {float: (int, float), tuple: (list, tuple)}.get(kind, (kind,))
    return right and (kind is not tuple or len(parts) == len(inner)) and all(_fits(each, inner[-1]) for each in parts)

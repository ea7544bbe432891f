"""What the arbiter knows of one app: its last report, the work that its leases have done, and how far to trust its rho.

An app says itself what it still has to do, so it could lie to be further behind. Two checks need nothing but the app's
reports and the arbiter's clock; where one of them fails, the app's rho is divided by `AppRecord.distrust`. A record is
plain data and is stored in the arbiter's books as JSON: a field's name and meaning are part of that format.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from themis_bridge.bids import Endless, Valuation
from themis_bridge.locality import Gpu, Phase, whole_gangs
from themis_bridge.messages import Report

#: An app's work may turn out larger than it said by this factor before its rho counts for less. Source:
#: `benchmarks.fairness --trace FILE --sweeps`: at 1.1, with WORK_POWER 2, an app that claims 0.9 or 0.75 of its work
#: gains from it.
WORK_SLACK = 1.05
#: rho is divided by this power of the factor beyond WORK_SLACK. Source: as for WORK_SLACK.
WORK_POWER = 3
#: Each check finds an app wrong by at most this factor: its rho then counts for less than that of any other.
MOST_WRONG = 1e3
#: On GPUs that an app says hold it up, its estimated finish may approach by this factor faster than time passes before
#: its rho counts for less. `benchmarks.fairness --sweeps` measures lies.
PLACEMENT_SLACK = 1.05
#: rho is divided by this power of that factor.
PLACEMENT_POWER = 2
#: Two reports are compared only if the work that they claim differs by less than this fraction: new measurements change
#: it by less, trials that stop early by more.
SAME_WORK = 0.01
#: No placement is taken to make an app slower by more than this factor. The largest that is published is 1.66, for
#: VGG16 across racks.
MOST_SLOWDOWN = 2.0
#: No T_id and no T_cluster is taken to be shorter, s: rho stays finite.
LEAST_S = 1e-3
#: Seconds for which a GPU that an app gains counts as idle. Source: a change takes 35 to 50 s (section 6.2.3).
SWITCH_S = 50.0
#: An app whose report implies less than this fraction of full speed says that its placement holds it up. By the paper's
#: guesses a link that costs anything has S >= 1.1, which is a speed of 0.91.
FULL_SPEED = 0.95


@dataclass
class AppRecord:
    """One app as the arbiter knows it. All times are seconds on the arbiter's clock."""

    #: Session of its agent; "" if the record was made from a reservation and the agent has not spoken yet.
    session: str
    #: When it joined.
    joined: float
    #: When its agent's newest message came.
    heard: float
    #: Integral over time, since it joined, of its `crowding`; divided by its age it is N_avg. While it is silent for so
    #: long that it has lost its leases, this is N_avg itself.
    crowd: float = 0.0
    #: Its rho at the last report that was taken; None before that.
    rho: float | None = None
    #: How many GPUs it held then.
    rho_gpus: int = 0
    #: The same if it had all GPUs that it could use from then on.
    best: float = 0.0
    #: GPU seconds of its leases, from now on, that are the change to GPUs that it gained, and no work.
    idle: float = 0.0
    #: Work that its leases have done, as seconds on all GPUs that it could use.
    served: float = 0.0
    #: GPU seconds of its leases since its last report. How much work they did is known when it reports again.
    spent: float = 0.0
    #: How fast ``served`` grows while it holds all GPUs that it could use; 1 if its placement costs it nothing.
    speed: float = 0.0
    #: The most GPUs that it could use by its last report; 0 while none is of use.
    wanted: int = 1
    #: The same by its last report that claimed work, at least 1. ``served`` is in seconds on this number of GPUs.
    useful: int = 1
    #: The smallest value so far of (work done + work left) / (all work claimed).
    least: float = math.inf
    #: Above 1 when the app understated its work or overstated its slowdown.
    doubt: float = 1.0
    #: The doubt about its user when it joined, see `ArbiterState._remember_user`.
    former: float = 1.0
    #: Of the last report: the tokens of its leases; [] if it has gained one since.
    tokens: list[int] = field(default_factory=list)
    #: Of the last report: seconds since it joined.
    at: float = 0.0
    #: Of the last report: seconds from then until it would finish with those leases.
    ends: float = 0.0
    #: Of the last report: T_cluster, seconds that all its work would take on all GPUs that it could use.
    whole: float = 0.0
    #: While its placement held it up by its own word: (seconds by which its finish approached, seconds that passed).
    held_up: tuple[float, float] = (0.0, 0.0)
    #: The same pair while its placement did not hold it up.
    free: tuple[float, float] = (0.0, 0.0)
    #: The user or team that it belongs to, by which shares, quotas and weights go. "": it is the only app of its user,
    #: who has the app's name.
    user: str = ""
    #: It never ends, by its last report.
    endless: bool = False
    #: Whether its newest report was compared with what happened.
    compared: bool = False
    #: All as of `messages.Heartbeat`; the bundle is empty if the record was made from a reservation.
    number: int = 0
    life: str = ""
    together: int = 1
    bundle: dict[str, float] = field(default_factory=dict)

    def take_report(
        self,
        report: Report,
        held: Mapping[int, Gpu],
        gpus: int,
        elapsed: float,
        contention: float,
        new: bool = True,
    ) -> None:
        """Note a report, check it against the earlier ones, and compute the app's rho.

        The report says how many seconds the app still needs with any GPUs; all else is the arbiter's own. If on the
        same GPUs its end has come closer by more seconds than have passed, those seconds are divided by that factor.

        First check: an app that claims less work than it has always seems nearly done. Work done (the arbiter's own
        count) plus work left (the app's word) then grows beyond the work claimed, which is taken from the same report.

        Second check: an app that overstates what a bad placement costs runs faster there than it says, so its end
        approaches faster than time passes. On a good placement it does not; an app that errs about its work shows the
        same ratio on both. Work that vanished because trials stopped early is no progress: pairs of reports between
        which the claimed work changed are not compared.

        An app that never ends claims no work, see `endless_rho`.

        Args:
            held: token -> GPU of the leases that it holds now.
            gpus: GPUs in the cluster, >= 1.
            elapsed: seconds since the app joined.
            contention: N_avg over its life.
            new: whether it is checked; if not, only rho is computed again.
        """
        told = valued(report, 0.0, 1.0, self.together)
        self.rho_gpus = len(held)
        self.endless, self.wanted = report.endless > 0, min(report.endless or told.useful, gpus)
        if self.endless:
            # It may have claimed work before, and do so again.
            self._count_served(self.speed)
            self.useful, self.tokens = self.wanted, []
        elif self.wanted and new:
            whole = max(LEAST_S, (report.done + told.work) / min(gpus, report.peak))
            self._check(told, whole, held, elapsed)
        worth = self.worth(report, len(held), gpus, elapsed, contention)
        self.rho = worth.rho(held.values())
        self.best = min(worth.rho((), {self.wanted: 1} if self.wanted else {}), self.rho)

    def _check(self, told: Valuation, whole: float, held: Mapping[int, Gpu], elapsed: float) -> None:
        """The two checks of `take_report`. ``whole``: T_cluster by the app's word, s."""
        useful = self.wanted
        ends, left = told.finish(held.values()), told.finish((), {useful: 1})
        tokens = sorted(held)
        if tokens and tokens == self.tokens and abs(whole / self.whole - 1) < SAME_WORK:
            self._note_progress(self.ends - ends, elapsed - self.at)
        self.tokens, self.at, self.ends, self.whole = tokens, elapsed, ends, whole
        speed, number = self.speed, whole_gangs(held.values(), self.together)
        if number and ends > 0:
            self.speed = min(1.0, left / ends * useful / number)
        # Its leases may have changed since the last report, so its speed was one of these two; the smaller one counts.
        self._count_served(min(speed or self.speed, self.speed))
        self.useful = useful
        grown = (self.served + left) / whole
        self.least = min(self.least, grown)
        self.doubt = self._work_doubt(grown) * self._placement_overstatement() ** PLACEMENT_POWER

    def worth(self, report: Report, held: int, gpus: int, elapsed: float, contention: float) -> Valuation | Endless:
        """What any GPUs are worth to the app, as far as its report is believed.

        ``held``: how many GPUs it holds. The others: as of `take_report`, which has taken this report.
        """
        if report.endless:
            return Endless(self.wanted, gpus / contention)
        told = valued(report, 0.0, 1.0, self.together)
        left = told.finish((), {self.wanted: 1}) if self.wanted else 0.0
        demand = min(gpus, max(told.demand, self.useful, held))
        fair = max(LEAST_S, (self.served + left) * demand / min(gpus / contention, demand))
        return valued(report, elapsed, fair, self.together, self._haste())

    def _work(self, speed: float) -> float:
        """The work that its leases since its last report have done at this ``speed``."""
        return self.spent / self.useful * speed

    def _count_served(self, speed: float) -> None:
        """Its leases since its last report have worked at this ``speed``."""
        self.served += self._work(speed)
        self.spent = 0.0

    @property
    def distrust(self) -> float:
        """Its rho is divided by this: the doubt about itself or about its user, whichever is larger."""
        return max(self.doubt, self.former)

    def factor(self, name: str, weights: Mapping[str, float]) -> float:
        """Its rho is multiplied by this where apps are compared: the weight of its user, divided by the distrust.

        ``name``: of the app, which is its own user if it has none. ``weights``: as of `Settings`.
        """
        return weights.get(self.user or name, 1.0) / self.distrust

    def leave(self) -> tuple[float, float]:
        """It is gone. Returns the last doubt about it and its work in GPU seconds.

        What its leases have done is now all that it had to do, or less if it was stopped. So a lie about the work shows
        also if the app ended before it reported again. If it has gained GPUs since, their speed is not known.
        """
        done = self.served + (self._work(self.speed) if self.tokens else 0.0)
        if self.whole and self.least < math.inf:
            self.doubt = max(self.doubt, self._work_doubt(done / self.whole))
        return self.doubt, done * self.useful

    def _work_doubt(self, grown: float) -> float:
        """The doubt about an app of which (work done + work left) / (work claimed) is ``grown`` now."""
        # A claim of nearly nothing may be 0 as a float.
        factor = grown / self.least / WORK_SLACK if self.least else math.inf if grown else 1.0
        return min(max(1.0, factor), MOST_WRONG) ** WORK_POWER

    def gain_gpu(self) -> None:
        self.idle += SWITCH_S
        self.tokens = []

    def serve(self, seconds: float, held: int) -> None:
        spent = seconds * min(held, self.useful)
        self.spent += max(0.0, spent - self.idle)
        self.idle = max(0.0, self.idle - spent)

    def _haste(self) -> float:
        """By which factor its end has come closer faster than time has passed, on the same GPUs; 1 if it has not."""
        approached, passed = self.held_up[0] + self.free[0], self.held_up[1] + self.free[1]
        factor = approached / passed if passed else 1.0
        return factor if factor > PLACEMENT_SLACK else 1.0

    def _note_progress(self, approached: float, passed: float) -> None:
        """On the same GPUs its finish approached by ``approached`` seconds while ``passed`` seconds passed."""
        if self.speed < FULL_SPEED:
            self.held_up = self.held_up[0] + approached, self.held_up[1] + passed
        else:
            self.free = self.free[0] + approached, self.free[1] + passed

    def _placement_overstatement(self) -> float:
        """The factor by which it overstates what bad placements cost it; 1 within the tolerance."""
        (approached, passed), (usual, there) = self.held_up, self.free
        if not passed:
            return 1.0
        factor = approached / passed / max(1.0, usual / there if there else 1.0)
        return min(factor, MOST_WRONG) if factor > PLACEMENT_SLACK else 1.0


def valued(report: Report, elapsed: float, fair: float, together: int, haste: float = 1.0) -> Valuation:
    """What GPUs are worth to an app by its report.

    fair: T_id, s. together: as of `messages.Heartbeat`. haste: the work left, by its word, is divided by this factor.
    """
    machines, racks = (min(cost, MOST_SLOWDOWN) for cost in report.across)
    phases = [Phase(kinds) for kinds in report.phases]
    if haste != 1.0:
        phases = [phase.part(1 / haste) for phase in phases]
    return Valuation(phases, elapsed, fair, (machines, max(machines, racks)), report.most, together)


def crowding(apps: Mapping[str, AppRecord]) -> dict[str, int]:
    """App -> N: its share of the cluster is 1 / N.

    Every user who has an app there gets an equal share, and divides it equally among the apps that he has there.
    """
    count = Counter(app.user or name for name, app in apps.items())
    return {name: len(count) * count[app.user or name] for name, app in apps.items()}

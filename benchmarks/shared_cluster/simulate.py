"""Runs a whole workload on the virtual clock under one policy, with the real arbiter and the real agents.

The clock jumps from event to event: an app arrives, a phase ends, a lease is due. Messages take no time here; in
`tests.themis.fault_schedules` they do.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

from benchmarks.shared_cluster.apps import Spec, TwinApp, average_contention, rho
from benchmarks.shared_cluster.baselines import policy
from benchmarks.shared_cluster.liars import TRUTH, Liar, Lie
from benchmarks.shared_cluster.tally import Counted, Tally
from themis_bridge import messages as m
from themis_bridge.agent import Agent, Gained, Lost
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.errors import ThemisError
from themis_bridge.lease_manager import leases_of
from themis_bridge.locality import Gpu
from themis_bridge.settings import Settings

#: `Settings.pace_s` of the simulation, and the most that its notice is. Judgement: longer than SWITCH_S.
PACE_S = 60.0
#: Seconds until an app that was not admitted comes again. Judgement: a lease of the default length.
COME_AGAIN_S = 600.0
#: `Settings.patience_s` of the simulation: every app answers at once, so none is ever silent.
ENDLESS_S = 1e15


@dataclass(frozen=True)
class Setup:
    """How a workload is run.

    policy: "themis", "paper" or a name of `BASELINES`.
    recalls, renews: as of `Themis`; None: as the policy has it.
    f, lease_s, half_life_s, most_demand: as of `Settings`. An app that is not admitted comes again, and has waited
        since it came first.
    error: estimates are wrong by up to this fraction, drawn with ``seed``.
    liar: name of an app that lies; None if none does.
    lie, claim: how that app lies about placements and about its work, see `TwinApp`.
    false: how that app lies in its messages.
    """

    policy: str = "themis"
    recalls: bool | None = None
    renews: bool | None = None
    f: float = Settings.f
    lease_s: float = Settings.lease_s
    half_life_s: float = Settings.half_life_s
    most_demand: float = Settings.most_demand
    error: float = 0.0
    liar: str | None = None
    lie: float = 0.0
    claim: float = 1.0
    false: Lie = TRUTH
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What came of a workload. Times are seconds."""

    #: App -> the finish-time fairness that it got.
    rho: dict[str, float]
    #: App -> the same by Shockwave's measure, see `static_finish_time`.
    static: dict[str, float]
    #: App -> seconds from its arrival to its end.
    jct: dict[str, float]
    #: Seconds from the first arrival to the last end.
    makespan: float
    #: GPU seconds that all apps held.
    gpu_time: float
    #: Placement score: 1 / S, averaged over GPU time.
    placement: float
    #: Number of rounds of the arbiter.
    rounds: int
    #: What became of the GPUs on offer in all rounds.
    tally: Tally

    @property
    def worst(self) -> float:
        """The largest rho."""
        return max(self.rho.values())

    @property
    def jain(self) -> float:
        """Jain's fairness index of rho, (sum x)^2 / (n * sum x^2): 1 if all are equal."""
        values = list(self.rho.values())
        return sum(values) ** 2 / (len(values) * sum(value * value for value in values))

    def figures(self) -> dict[str, float]:
        """The figures that `benchmarks.fairness` prints, described there."""
        ordered = sorted(self.rho.values())
        return {
            "worst_rho": self.worst,
            "static_worst_rho": max(self.static.values()),
            "median_rho": ordered[len(ordered) // 2],
            "above_1_05": sum(value > 1.05 for value in ordered) / len(ordered),
            "jain": self.jain,
            "mean_jct": mean(self.jct.values()),
            "makespan": self.makespan,
            "gpu_time": self.gpu_time,
            "placement_score": self.placement,
            "rounds": self.rounds,
            **asdict(self.tally),
        }


class Simulation:
    """One workload on one cluster. Call ``run`` once."""

    def __init__(self, specs: Sequence[Spec], gpus: Sequence[Gpu], setup: Setup):
        self.gpus, self.setup = gpus, setup
        chosen = policy(setup.policy, setup.f, setup.recalls, setup.renews)
        lease = setup.lease_s if getattr(chosen, "preempts", True) else math.inf
        # Judgement: a quarter of the lease, where that is shorter than the pace.
        notice = min(PACE_S, lease / 4)
        settings = Settings(
            f=setup.f,
            lease_s=lease,
            notice_s=notice,
            pace_s=PACE_S,
            patience_s=ENDLESS_S,
            half_life_s=setup.half_life_s,
            most_demand=setup.most_demand,
        )
        self._policy = Counted(chosen)
        self.arbiter = Arbiter(ArbiterState(settings), lambda f: self._policy)
        rng = random.Random(setup.seed)
        self.apps = {
            spec.name: TwinApp(
                spec,
                1 + rng.uniform(-setup.error, setup.error),
                setup.claim if spec.name == setup.liar else 1.0,
                setup.lie if spec.name == setup.liar else 0.0,
            )
            for spec in specs
        }
        self.agents: dict[str, Agent] = {}
        self.now = 0.0
        self._heap: list[tuple[float, int, str, int]] = []
        self._order = itertools.count()
        #: App -> number of its newest prediction in the heap; older ones are void.
        self._newest = dict.fromkeys(self.apps, 0)
        #: App -> the digest of the leases that it was told.
        self._told: dict[str, str] = {}
        self._changed: set[str] = set()
        #: Apps of which a phase ended while they handled a message: their event is due now.
        self._ended: set[str] = set()
        #: The largest doubt about any app so far.
        self.doubted = 1.0
        #: App -> when it was admitted.
        self.admitted: dict[str, float] = {}
        #: App -> how often it was not admitted before.
        self.refused: Counter[str] = Counter()

    def run(self) -> Result:
        """Run the workload to its end. Raises ThemisError if some app never ends."""
        self.arbiter.handle(m.Gpus(tuple(self.gpus)), self.now)
        for spec in (app.spec for app in self.apps.values()):
            if not spec.follows:
                self._push(spec.arrives, spec.name)
        left = len(self.apps)
        while left:
            at, name, number = math.inf, "", 0
            if self._heap:
                at, _, name, number = self._heap[0]
            tick = self.now + self._until_tick()
            if tick < at:
                self.now = tick
                self._decide()
            elif not math.isfinite(at):
                raise ThemisError(
                    f"{left} apps never end under {self.setup.policy!r}; check that each can use at least 1 GPU"
                )
            else:
                heapq.heappop(self._heap)
                if number != self._newest[name]:
                    continue
                self.now = at
                left -= self._app_event(name)
            self._predict()
        return self._result()

    def _until_tick(self) -> float:
        """Seconds until the next `messages.Tick` that could change anything, if no other event comes first."""
        state, auctioneer = self.arbiter.state, self.arbiter.auctioneer
        times = [auctioneer.due]
        notice = state.settings.notice_s
        for lease in state.leases:
            # The notice begins or, once the GPU is on offer or its next holder is known, the lease ends.
            late = lease.ending or lease.on_offer(state.clock, notice)
            times.append(lease.expires if late else lease.expires - notice)
        return max(0.0, min(times) - state.clock)

    def _push(self, at: float, name: str) -> None:
        heapq.heappush(self._heap, (at, next(self._order), name, self._newest[name]))

    def _app_event(self, name: str) -> bool:
        """The app arrives, or a phase of it ends. Returns whether it is done."""
        app = self.apps[name]
        if name not in self.agents:
            liar = name == self.setup.liar
            own, told = (name, name, app, app.spec.user), app.spec.told
            self.agents[name] = Liar(*own, self.setup.false, told) if liar else Agent(*own, told)
            self._send(self.agents[name].heartbeat())
            if self.agents[name].refused:
                del self.agents[name]
                self.refused[name] += 1
                self._push(self.now + COME_AGAIN_S, name)
            else:
                self.admitted[name] = self.now
            return False
        if name in self._ended:
            self._ended.remove(name)
        else:
            app.advance(self.now)
        self._changed.add(name)
        if app.finished is not None:
            self._send(m.AppLeft(name, name))
            for other in self.apps.values():
                if other.spec.follows == name:
                    other.begin_at(self.now)
                    self._push(self.now, other.spec.name)
            return True
        agent = self.agents[name]
        for gpu in app.surplus():
            app.lose_gpu(gpu)
            agent.vacated(gpu, agent.leases[gpu].token)
        self._send(agent.heartbeat())
        return False

    def _predict(self) -> None:
        for name in sorted(self._changed):
            self._newest[name] += 1
            at = self.now if name in self._ended else self.apps[name].next_change()
            if math.isfinite(at):
                self._push(at, name)
        self._changed.clear()

    def _decide(self) -> None:
        """All apps report, and the arbiter decides; not yet if an app has just ended, which says so first."""
        for name in self.arbiter.state.apps:
            if self._advance(name):
                self.arbiter.handle(self.agents[name].heartbeat(), self.now)
        if not self._ended:
            self._send(m.Tick())

    def _send(self, event: m.Event) -> None:
        """Let the arbiter handle an event and what follows from it, and tell the apps their leases."""
        queue = deque([event])
        while queue:
            event = queue.popleft()
            refused = self.arbiter.handle(event, self.now)
            if refused is not None and isinstance(event, m.AppEvent):
                self.agents[event.app].take(refused)
            if queue:
                continue
            for lease in self.arbiter.state.leases:
                if not lease.group:
                    queue.append(m.Reservation(lease.gpu, lease.token, "group"))
            if not queue:
                for name in list(self.arbiter.state.apps):
                    queue += self._tell(name)

    def _advance(self, name: str) -> bool:
        """Let the app work until now. Returns whether it still does."""
        app = self.apps[name]
        if app.finished is None:
            phase = app.phase
            app.advance(self.now)
            if app.phase != phase:
                self._changed.add(name)
                self._ended.add(name)
        return app.finished is None

    def _tell(self, name: str) -> list[m.Event]:
        """Tell an app its leases if they have changed. Returns what it says if it then gives some of them up."""
        self.doubted = max(self.doubted, self.arbiter.state.apps[name].distrust)
        told, app, agent = leases_of(self.arbiter.state, name), self.apps[name], self.agents[name]
        if self._told.get(name) == told.digest or not self._advance(name):
            return []
        self._told[name] = told.digest
        for notice in agent.take(told):
            if isinstance(notice, Gained):
                app.gain_gpu(notice.gpu)
                self._changed.add(name)
            elif isinstance(notice, Lost):
                app.lose_gpu(notice.gpu.id)
                self._changed.add(name)
        torn = [] if agent.promised else app.torn()
        for gpu in torn:
            # As a job does, after a few seconds.
            app.lose_gpu(gpu)
            self._changed.add(name)
            agent.vacated(gpu, agent.leases[gpu].token)
        return [agent.heartbeat()] if torn else []

    def _result(self) -> Result:
        apps = self.apps.values()
        ends = {app.spec.name: app.finished or math.inf for app in apps}
        specs = [app.spec for app in apps]
        jct = {spec.name: ends[spec.name] - spec.arrives for spec in specs}
        return Result(
            rho=rhos(specs, ends, len(self.gpus)),
            static=static_rhos(specs, ends, len(self.gpus)),
            jct=jct,
            makespan=max(ends.values()) - min(app.spec.arrives for app in apps),
            gpu_time=sum(app.attained for app in apps),
            placement=sum(app.placed for app in apps) / sum(app.attained for app in apps),
            rounds=self.arbiter.state.rounds,
            tally=self._policy.tally,
        )


def rhos(specs: Sequence[Spec], ends: Mapping[str, float], gpus: int) -> dict[str, float]:
    """App -> the finish-time fairness that it got. ``ends``: app -> when it ended."""
    lives = [(spec.arrives, ends[spec.name], spec.user or spec.name) for spec in specs]
    return {
        spec.name: rho(ends[spec.name] - spec.arrives, spec, gpus, average_contention(lives, number))
        for number, spec in enumerate(specs)
    }


def static_finish_time(budget: float, cluster_gpus: float, max_gpus: float, jobs: int) -> float:
    """T_id as Shockwave computes it for a trace: seconds alone on all GPUs that the job can use, times jobs per GPU.

    It is only to compare with what they publish: an app cannot know how many jobs a trace will have. Arguments as of
    `independent_finish_time`; ``jobs``: in the whole trace.
    """
    return budget / min(cluster_gpus, max_gpus) * max(1.0, jobs / cluster_gpus)


def static_rhos(specs: Sequence[Spec], ends: Mapping[str, float], gpus: int) -> dict[str, float]:
    """App -> its completion time divided by `static_finish_time`. ``ends``: app -> when it ended."""
    fair = {spec.name: static_finish_time(spec.budget, gpus, spec.demand, len(specs)) for spec in specs}
    return {spec.name: (ends[spec.name] - spec.arrives) / fair[spec.name] for spec in specs}


def simulate(specs: Sequence[Spec], gpus: Sequence[Gpu], setup: Setup) -> Result:
    """Run the apps ``specs`` on ``gpus``."""
    return Simulation(specs, gpus, setup).run()

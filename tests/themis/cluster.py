"""An arbiter, its agents and GPUs with instant messages, for the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tests.themis.arbiter_invariants import check_arbiter
from themis_bridge import JobInfo
from themis_bridge import messages as m
from themis_bridge.agent import Agent
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.fairness import JobKind, kinds_of
from themis_bridge.lease_manager import leases_of
from themis_bridge.leases import Lease
from themis_bridge.locality import Gpu
from themis_bridge.policy import Policy, Themis
from themis_bridge.settings import Settings

SETTINGS = Settings(lease_s=100, notice_s=10, answer_s=2, patience_s=1e6)
#: State of a lease -> the states that may follow, as docs/arbiter.md has it. It may be over after each of them.
STATES = {"asked": ("waiting", "held", "ending"), "waiting": ("held",), "held": ("ending",), "ending": ()}


def state_of(lease: Lease) -> str:
    """One of `STATES`."""
    return "waiting" if lease.waits else "ending" if lease.ending else "held" if lease.group else "asked"


class Job:
    """The `Work` of an app of jobs of which nothing is done.

    ``seconds``: of each job on one GPU. ``together``: GPUs of each job, which it needs at once. ``width``: the most
    GPUs that it can use.
    """

    def __init__(self, jobs: int = 4, seconds: float = 1000.0, together: int = 1, width: int = 1):
        self.jobs, self.seconds, self.together = jobs, seconds, together
        self.width = max(width, together)

    def report(self):
        return m.Report((kinds_of([JobInfo(1, self.seconds, self.width)] * self.jobs),), peak=self.jobs * self.width)


def claim(left: float, done: float = 0.0, width: int = 2, across: float = 1.0) -> m.Report:
    """What an app of one job says. ``left``, ``done``: GPU seconds. ``width``: GPUs of the job. ``across``: its S."""
    return m.Report(((JobKind(width, 1, left, left),),), done, width, across=(across, across))


class Service:
    """The `Work` of a service whose load wants ``wanted`` GPUs."""

    def __init__(self, wanted: int):
        self.wanted = wanted

    def report(self):
        return m.Report(endless=self.wanted)


class Cluster:
    """An arbiter, agents and GPUs; messages and reservations take no time."""

    def __init__(self, gpus: int = 4, settings: Settings = SETTINGS, policy: Callable[[float], Policy] = Themis):
        self.arbiter = Arbiter(ArbiterState(settings), policy)
        self.agents: dict[str, Agent] = {}
        self.now = 0.0
        self.silent: set[str] = set()
        self.reserved: dict[str, tuple[str, int]] = {}
        #: (GPU, app) that Ray cannot reserve.
        self.impossible: set[tuple[str, str]] = set()
        self.notices: list = []
        self._sessions = itertools.count()
        #: Why messages were refused.
        self.refused: list[str] = []
        self.send(m.Gpus(tuple(Gpu(f"g{i}", f"m{i // 4}") for i in range(gpus))))

    def send(self, *events):
        for event in events:
            if isinstance(event, m.AppLeft):
                self.agents.pop(event.app, None)
            self._handle(event)
        while self._settle():
            pass

    def _handle(self, event):
        before = {lease.token: state_of(lease) for lease in self.arbiter.state.leases}
        refused = self.arbiter.handle(event, self.now)
        check_arbiter(self.arbiter)
        for lease in self.arbiter.state.leases:
            was = before.get(lease.token, "asked")
            assert state_of(lease) in (was, *STATES[was]), f"{lease} was {was}"
        self.refused += [refused.why] if refused else []
        return refused

    def _settle(self):
        """All report, a tick passes, and Ray and the agents do what follows from it. Returns whether anything did."""
        here = {name: agent for name, agent in self.agents.items() if name not in self.silent and not agent.refused}
        known = {}
        for name, agent in here.items():
            heard = agent.heartbeat()
            known[name] = heard.known
            refused = self._handle(heard)
            self.notices += agent.take(refused) if refused else []
        self._handle(m.Tick())
        changed = self._reserve()
        for name, agent in here.items():
            if name in self.arbiter.state.apps:
                told = leases_of(self.arbiter.state, name)
                if self.arbiter.state.apps[name].session == agent.session and told.digest != known[name]:
                    self.notices += agent.take(told)
                    changed = True
        return changed

    def _reserve(self):
        """Let Ray's reservations agree with the leases. Returns whether they did not."""
        leases = list(self.arbiter.state.leases)
        keys = {lease.key for lease in leases}
        self.reserved = {gpu: held for gpu, held in self.reserved.items() if (held[0], gpu, held[1]) in keys}
        changed = False
        for lease in leases:
            if (lease.gpu, lease.app) in self.impossible:
                changed |= not lease.waits
                self._handle(m.Reservation(lease.gpu, lease.token))
            elif not lease.group:
                changed = True
                self.reserved[lease.gpu] = (lease.app, lease.token)
                self._handle(m.Reservation(lease.gpu, lease.token, "group"))
        return changed

    def join(
        self, name: str, job: Job | None = None, session: str = "", user: str = "", memory: float | None = 0
    ) -> Agent:
        job, bundle = job or Job(), {"GPU": 1.0} | ({} if memory is None else {"memory": memory})
        session = session or f"{name}/{next(self._sessions)}"
        agent = self.agents[name] = Agent(name, session, job, user, getattr(job, "together", 1), bundle)
        self.send()
        return agent

    def leave(self, name: str) -> None:
        self.send(m.AppLeft(name, self.agents[name].session))

    def wait(self, seconds: float, step: float = 1.0):
        for _ in range(round(seconds / step)):
            self.now += step
            self.send()

    def holds(self, name: str) -> set[str]:
        return {gpu for gpu, (app, _) in self.reserved.items() if app == name}

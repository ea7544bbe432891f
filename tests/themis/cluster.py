"""An arbiter, its agents and GPUs with instant messages, for the tests of this folder."""

from __future__ import annotations

from tests.themis.arbiter_invariants import check_arbiter
from themis_bridge import JobInfo
from themis_bridge import messages as m
from themis_bridge.agent import Agent
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.bids import Endless, Valuation
from themis_bridge.fairness import independent_finish_time
from themis_bridge.locality import Gpu
from themis_bridge.policy import Policy
from themis_bridge.settings import Settings

SETTINGS = Settings(lease_s=100, notice_s=10, answer_s=2, patience_s=1e6)


class Job:
    """The `Work` of an app of jobs that began at 0 s.

    ``seconds``: of each job on one GPU. ``together``: GPUs of each job, which it needs at once. ``width``: the most
    GPUs that it can use.
    """

    def __init__(self, jobs: int = 4, seconds: float = 1000.0, together: int = 1, width: int = 1):
        self.jobs, self.seconds, self.together, self.now = jobs, seconds, together, 0.0
        self.width = max(width, together)

    def valuation(self, contention, cluster_gpus):
        jobs = [JobInfo(1, self.seconds, self.width)] * self.jobs
        most = max(1, self.jobs * self.width)
        budget = max(self.jobs * self.seconds, 1e-3)
        independent = independent_finish_time(budget, cluster_gpus, most, contention)
        whole = independent_finish_time(budget, cluster_gpus, most, 1.0)
        return Valuation([jobs], self.now, independent, whole=whole, together=self.together)


class Service:
    """The `Work` of a service whose load wants ``wanted`` GPUs."""

    def __init__(self, wanted: int):
        self.wanted = wanted

    def valuation(self, contention, cluster_gpus):
        return Endless(self.wanted, cluster_gpus / contention)


class Cluster:
    """An arbiter, agents and GPUs; messages and reservations take no time."""

    def __init__(self, gpus: int = 4, settings: Settings = SETTINGS, policy: Policy | None = None):
        self.arbiter = Arbiter(ArbiterState(settings), policy)
        self.agents: dict[str, Agent] = {}
        self.now = 0.0
        self.silent: set[str] = set()
        self.reserved: dict[str, tuple[str, int]] = {}
        #: (GPU, app) that Ray cannot reserve.
        self.impossible: set[tuple[str, str]] = set()
        self.notices: list = []
        self.said: list[m.Instruction] = []
        for i in range(gpus):
            self.send(m.GpuJoined(Gpu(f"g{i}", f"m{i // 4}")))

    def send(self, *events):
        queue = list(events)
        while queue:
            out = self.arbiter.handle(queue.pop(0), self.now)
            check_arbiter(self.arbiter)
            for instruction in out:
                self.said.append(instruction)
                if isinstance(instruction, m.Reserve) and (instruction.gpu, instruction.app) in self.impossible:
                    queue.append(m.ReserveFailed(instruction.gpu, instruction.token))
                elif isinstance(instruction, m.Reserve):
                    assert instruction.gpu not in self.reserved
                    self.reserved[instruction.gpu] = (instruction.app, instruction.token)
                    queue.append(m.Reserved(instruction.gpu, instruction.token))
                elif isinstance(instruction, m.Remove):
                    assert self.reserved.pop(instruction.gpu) == (instruction.app, instruction.token)
                    queue.append(m.Removed(instruction.gpu, instruction.token))
                elif instruction.app in self.agents and instruction.app not in self.silent:
                    events, notices = self.agents[instruction.app].handle(instruction)
                    self.notices += notices
                    queue += events

    def join(self, name: str, job: Job | None = None, session: str = "s", user: str = "") -> Agent:
        job = job or Job()
        together = getattr(job, "together", 1)
        agent = self.agents[name] = Agent(name, session, job, user, together)
        self.send(m.AppJoined(name, session, user, together=together))
        return agent

    def wait(self, seconds: float, step: float = 1.0):
        for _ in range(round(seconds / step)):
            self.now += step
            self.send(m.Tick())

    def holds(self, name: str) -> set[str]:
        return {gpu for gpu, (app, _) in self.reserved.items() if app == name}

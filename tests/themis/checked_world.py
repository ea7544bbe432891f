"""A world in which it is checked all the time what holds for the arbiter, its leases and its tenants.

- a GPU is never in two groups, and its tokens only grow;
- an arbiter that dies ends no lease;
- what comes in the name of a session that has left changes nothing;
- no app holds a part of a gang for longer than a lease;
- while the arbiter is alive, a GPU that some app wants is idle for at most one lease; for each driver that dies
  meanwhile, the arbiter's patience with silent apps is added;
- while the arbiter is alive and Ray answers, within `SETTLED_S` each group without a lease is gone, each app knows the
  leases that the arbiter believes it to hold, Ray has the group of each of them, and no trouble is told.

The first three are checked where `fault_schedules` carries out what would violate them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.themis.cluster import Job
from tests.themis.shell_world import World
from themis_bridge import messages as m
from themis_bridge.agent import Gained
from themis_bridge.locality import Gpu, cut_in_gangs, whole_gangs
from themis_bridge.settings import Settings
from themis_bridge.shell.tenant import Tenant

#: Seconds of a lease. Judgement: a schedule has several.
LEASE_S = 30.0
SETTINGS = Settings(lease_s=LEASE_S, notice_s=6.0, answer_s=1.5, patience_s=10.0)
#: Seconds between two turns of a driver, and between two checks.
TURN_S = 0.5
#: The longest that a message, a removal or the making of a group takes, s. Judgement: longer than SETTINGS.answer_s.
LATE_S = 4.0
#: How much longer than a lease a GPU may be idle, s: the end of the lease, the removal and the next grant may each be
#: late.
SLACK_S = 3 * LATE_S
#: Seconds within which Ray, the arbiter and the apps agree again. Judgement: the longest pauses of both, and late
#: answers.
SETTLED_S = 25.0


@dataclass(eq=False)
class Process:
    """The arbiter's, or that of a driver."""

    alive: bool = True


@dataclass(eq=False)
class Driver:
    """One app's driver, dead or alive. It is the `Work` of its agent."""

    name: str
    jobs: int
    width: int
    #: How many GPUs of one machine each of its jobs needs at once, see `messages.Heartbeat`.
    together: int
    #: Whether it leaves a GPU at the end of its lease; otherwise it is killed there.
    polite: bool
    #: What a device of it asks for beside the GPU.
    memory: float
    process: Process = field(default_factory=lambda: Process(False))
    #: None until the arbiter has heard it.
    tenant: Tenant | None = None
    paused_until: float = 0.0
    #: Whether it has nothing more to do.
    done: bool = False
    #: GPU -> the lease under which its executor runs work there.
    running: dict[str, Gained] = field(default_factory=dict)
    #: GPU that is of no use, since its gang is not whole -> since when that is so and no other GPU is promised.
    torn: dict[str, float] = field(default_factory=dict)

    def report(self) -> m.Report:
        return Job(self.jobs, 500.0, self.together, self.width).report()

    def loose(self) -> list[str]:
        """The GPUs that it holds beyond whole gangs."""
        return cut_in_gangs({gpu: lease.gpu.machine for gpu, lease in sorted(self.running.items())}, self.together)[1]


class CheckedWorld(World):
    """See the module. ``cores``: of each machine."""

    def __init__(self, monkeypatch: Any, path: Path, cores: Sequence[int]):
        self.drivers: list[Driver] = []
        self.actor: Any = None
        #: What the arbiter's clock says while it stands still.
        self._stands_at: float | None = None
        #: Until when calls of Ray fail or are slow. Machine -> until when those for its groups block and fail.
        self._bad_until = 0.0
        self._blocked: dict[str, float] = {}
        #: Kind of a state -> what is in it -> for how many seconds.
        self._lasts: dict[str, dict[Hashable, float]] = defaultdict(dict)
        self._checked = 0.0
        super().__init__(monkeypatch, path, cores, asdict(SETTINGS))

    def _violated(self, what: str) -> None:
        """An invariant does not hold."""
        raise AssertionError(what)

    def _forgive(self) -> None:
        """Allow the time until a death is noticed; deaths add up."""
        for gpu, lasts in self._lasts["idle"].items():
            self._lasts["idle"][gpu] = max(0.0, lasts - SETTINGS.patience_s)

    def _check(self) -> None:
        """Check the invariants, see `_violated`."""
        self.settle()
        passed, self._checked = self.now - self._checked, self.now
        # Whether the arbiter can do its work.
        able = self.actor is not None and self.now >= self._bad_until and self.disk is None and self._stands_at is None
        running, blocks = self._running(), any(until > self.now for until in self._blocked.values())
        self._check_idle(passed if able and not blocks else 0.0, running)
        torn = [(driver.name, gpu) for driver in self.drivers if self._awake(driver) for gpu in driver.loose()]
        self._lasting("torn", torn, passed if able else 0.0, LEASE_S + SLACK_S)
        if self.actor is not None:
            self._check_agreement(passed if able else 0.0)
        self.at(TURN_S, self._check)

    def _awake(self, driver: Driver) -> bool:
        return driver.process.alive and driver.tenant is not None and self.now >= driver.paused_until

    def _running(self) -> dict[str, str]:
        """GPU -> the app that can run something there."""
        running: dict[str, str] = {}
        for driver in self.drivers:
            for gpu, lease in driver.running.items():
                entry = self.table[lease.group]
                if entry["state"] == "CREATED":
                    if gpu in running or entry["name"] != f"themis/{driver.name}/{gpu}/{lease.token}":
                        self._violated(f"{gpu} runs work of {driver.name}, in the group {entry['name']}")
                    running[gpu] = driver.name
        return running

    def _check_idle(self, passed: float, running: dict[str, str]) -> None:
        held: dict[str, list[Gpu]] = defaultdict(list)
        for driver in self.drivers:
            held[driver.name] += [each.gpu for gpu, each in driver.running.items() if running.get(gpu) == driver.name]
        wanting = [
            driver
            for driver in self.drivers
            if self._awake(driver) and whole_gangs(held[driver.name], driver.together) < driver.jobs * driver.width
        ]
        idle: list[str] = []
        for address, node in self.nodes.items():
            gpus = [gpu for i in range(self.cores[address]) if (gpu := f"{node}-{i}") not in running]
            exempt = self.outside[address] or self._blocked.get(address, 0.0) > self.now
            if not exempt and any(driver.together <= len(gpus) for driver in wanting):
                idle += gpus
        self._lasting("idle", idle, passed, LEASE_S + SLACK_S)

    def _check_agreement(self, passed: float) -> None:
        state = self.actor._arbiter.state
        leases = {lease.key: lease for lease in state.leases}
        live = {
            (app, gpu, int(token)): entry
            for entry in self.table.values()
            if entry["name"] and entry["state"] != "REMOVED" and self._blocked.get(entry["address"], 0.0) <= self.now
            for _, app, gpu, token in [entry["name"].split("/")]
        }
        self._lasting("a group without a lease", live.keys() - leases.keys(), passed, SETTLED_S)
        held = {key for key, lease in leases.items() if lease.group}
        made = {key for key, entry in live.items() if entry["state"] == "CREATED"}
        blocked = {key for key in held if key not in live}
        self._lasting("a lease without a group", held - made - blocked, passed, SETTLED_S)
        awake = {driver.name: driver.tenant._agent.leases for driver in self.drivers if self._awake(driver)}
        known = {(app, gpu, view.token) for app, views in awake.items() for gpu, view in views.items()}
        held = {key for key in held if key[0] in awake}
        self._lasting("a lease that only one side knows", held ^ known, passed, SETTLED_S)
        trouble = [text for text in (self.actor._books.trouble(), self.actor._groups.trouble) if text]
        blocks = any(until > self.now for until in self._blocked.values())
        self._lasting("trouble", ["trouble"] if trouble and not blocks else [], passed, SETTLED_S)

    def _lasting(self, kind: str, found: Iterable[Hashable], passed: float, most: float) -> None:
        """What is in such a state leaves it in time. ``passed``: seconds since the last look that count."""
        before = self._lasts[kind]
        self._lasts[kind] = {each: before.get(each, -passed) + passed for each in found}
        for each, lasts in self._lasts[kind].items():
            if lasts > most:
                self._violated(f"{each}: {kind} for {lasts:.1f} s")

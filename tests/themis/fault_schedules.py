"""Seeded schedules of crashes, delays, reordered messages and clock jumps, over the real arbiter and the real agents.

``python -m tests.themis.fault_schedules --seeds 10000`` runs that many schedules; ``--seed N`` runs one of them again
and prints what happens. After every event five invariants are checked:

- a GPU has one holder;
- what comes in the name of a session that has left changes nothing;
- tokens only grow;
- an app that needs several GPUs of one machine at once holds no part of such a gang for longer than a lease;
- while the arbiter is alive, a GPU that some app wants is idle for at most one lease; for each driver that dies
  meanwhile, the arbiter's patience with silent apps is added.

A schedule has a cluster, apps, and an arbiter whose books are on a disk that survives its death. Messages take any time
and overtake each other. The arbiter may die between any two steps of its shell: before the books are written, after
that, or between two instructions. Drivers die and come back, pause, and ignore the end of a lease; nodes leave and
return; something outside uses GPUs, so that reservations wait; the arbiter's clock jumps.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import itertools
import logging
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.themis.arbiter_invariants import check_arbiter
from tests.themis.cluster import Job
from themis_bridge import messages as m
from themis_bridge.agent import Agent, Gained, Leave, Notice
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.lease_manager import leases_of
from themis_bridge.locality import Gpu, cut_in_gangs, whole_gangs
from themis_bridge.settings import Settings

#: Seconds of a lease. Judgement: a schedule has several.
LEASE_S = 30.0
SETTINGS = Settings(lease_s=LEASE_S, notice_s=6.0, answer_s=1.5, patience_s=10.0)
#: The longest that a message or a removal takes, s. Judgement: longer than SETTINGS.answer_s.
LATE_S = 4.0
#: Seconds after which a driver gives a call up. Judgement: longer than a call whose both ways are late.
CALL_S = 2 * LATE_S + 1
#: How much longer than a lease a GPU may be idle, s: the end of the lease, the removal and the next grant may each be
#: late.
SLACK_S = 3 * LATE_S
#: Seconds after which an app gives back what it holds of a gang that is not whole. Judgement: as a job does.
TORN_S = 3.0
#: Virtual seconds of a schedule. Judgement: five leases.
LENGTH_S = 150.0
#: Virtual seconds at the end of a schedule without new faults. Judgement: longer than a lease, so that GPUs recover.
QUIET_S = 40.0


class Violation(AssertionError):
    """An invariant does not hold. The message says which one, when, and how to repeat the schedule."""


@dataclass
class Driver:
    """One app's driver process, dead or alive. It is the `Work` of its agent."""

    name: str
    jobs: int
    width: int
    #: How many GPUs of one machine each of its jobs needs at once, see `messages.Heard`.
    together: int
    #: Whether it leaves a GPU at the end of its lease; otherwise it is killed there.
    polite: bool
    world: World
    #: None while the process is dead.
    agent: Agent | None = None
    #: Number of starts so far.
    session: int = 0
    paused_until: float = 0.0
    #: GPU -> the token under which its executor runs work there.
    running: dict[str, int] = field(default_factory=dict)
    #: GPU that is of no use, since its gang is not whole -> since when that is so and no other GPU is promised.
    torn: dict[str, float] = field(default_factory=dict)

    #: Number of the message that waits for an answer, and when it was sent; 0: none does.
    calling: int = 0
    called: float = 0.0
    #: What it sent last.
    last: m.Heard | None = None

    def report(self) -> m.Report:
        return Job(self.jobs, 500.0, self.together, self.width).report()

    def loose(self) -> list[str]:
        """The GPUs that it holds beyond whole gangs."""
        return cut_in_gangs({gpu: self.world.gpus[gpu].machine for gpu in sorted(self.running)}, self.together)[1]


class World:
    """One schedule; all that is random comes from its seed. One thing: every fault touches the same state."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None):
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self._log = log
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        #: The arbiter's clock minus the true time, s.
        self._skew = 0.0
        self.gpus = {
            f"m{machine}g{i}": Gpu(f"m{machine}g{i}", f"m{machine}", f"r{machine % 2}")
            for machine in range(self.rng.randint(1, 3))
            for i in range(self.rng.randint(1, 4))
        }
        #: The GPUs whose node is in the cluster.
        self.there = dict(self.gpus)
        #: GPU -> (app, token) of Ray's reservation.
        self.reserved: dict[str, tuple[str, int]] = {}
        #: The greatest token of which Ray was ever asked for a group.
        self.newest = 0
        #: GPU -> the greatest token ever reserved there.
        self.greatest: dict[str, int] = {}
        #: GPU -> seconds for which it has been idle while some app wanted it and the arbiter was alive.
        self.idle: dict[str, float] = dict.fromkeys(self.gpus, 0.0)
        #: GPUs that something outside Themis uses, and the reservations that wait for them.
        self.outside: set[str] = set()
        self.waiting: dict[str, tuple[str, int]] = {}
        #: The sessions of which this arbiter, or its books, know that they have left.
        self.left: set[str] = set()
        self._checked = 0.0
        self.disk: dict[str, Any] = {}
        #: As of the disk: the reservations that have to be there, and app -> what it is told.
        self.wanted: set[tuple[str, str, int]] = set()
        self.told: dict[tuple[str, str], m.Leases] = {}
        #: The reservations for which Ray was called by this arbiter, to make them or to remove them.
        self._asked: set[tuple[bool, tuple[str, str, int]]] = set()
        self.arbiter: Arbiter | None = Arbiter(ArbiterState(SETTINGS))
        #: Number of the arbiter's life; Ray's messages to an earlier one are lost.
        self._life = 0
        #: (App, GPU) -> seconds for which the app has held this GPU of a gang that is not whole.
        self.torn: dict[tuple[str, str], float] = {}
        self.drivers = [self._driver(f"app{i}") for i in range(self.rng.randint(1, 4))]
        self.rounds = self.crashes = 0

    def _driver(self, name: str) -> Driver:
        together = self.rng.choice([1, 1, 1, 2, 2, 4])
        width = self.rng.choice([1, 1, 2]) if together == 1 else together
        return Driver(name, self.rng.randint(1, 4), width, together, self.rng.random() < 0.7, self)

    # --- time

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    def say(self, text: str) -> None:
        if self._log:
            self._log(f"{self.now:8.3f}  {text}")

    def run(self) -> None:
        """Run the whole schedule. Raises Violation."""
        self._to_arbiter(m.Gpus(tuple(self.there.values())), delay=0.0)
        for driver in self.drivers:
            self.at(self.rng.uniform(0, 20), partial(self._start, driver))
        self.at(1.0, self._tick)
        self.at(self.rng.expovariate(1 / 4), self._fault)
        while self._queue and self._queue[0][0] <= LENGTH_S:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            self.check()

    def _tick(self) -> None:
        self._to_arbiter(m.Tick(), delay=0.0)
        for driver in self.drivers:
            if driver.agent is not None and self.now >= driver.paused_until:
                if not driver.calling or self.now - driver.called > CALL_S:
                    self._call(driver, driver.agent)
                self._leave_torn_gangs(driver)
            # The shell looks again and again whether silent drivers are dead.
            for number in range(1, driver.session + (driver.agent is None)):
                self._to_arbiter(m.AppLeft(driver.name, f"{driver.name}/{number}"))
        self.at(1.0, self._tick)

    # --- messages

    def _delay(self) -> float:
        return self.rng.choice([0.0, 0.01, 0.05, self.rng.uniform(0, 1), self.rng.uniform(0, LATE_S)])

    def _to_arbiter(self, event: m.Event, delay: float | None = None) -> None:
        life = self._life
        self.at(self._delay() if delay is None else delay, lambda: self._deliver_to_arbiter(event, life))

    def _deliver_to_arbiter(self, event: m.Event, life: int) -> m.Refused | None:
        if self.arbiter is None or (life != self._life and not isinstance(event, m.AppEvent)):
            return None
        refused = self.arbiter.handle(event, self.now + self._skew)
        check_arbiter(self.arbiter)
        if isinstance(event, m.AppLeft):
            self.left.add(event.session)
        elif isinstance(event, m.Heard) and event.session in self.left and refused is None:
            self._violated(f"{event.session} has left, and was heard")
        self._shell()
        return refused

    def _shell(self) -> None:
        """Store the books, then call Ray for what they say; the arbiter may die between any two steps."""
        assert self.arbiter is not None
        state = self.arbiter.state
        self.rounds = max(self.rounds, state.rounds)
        wanted = {lease.key for lease in state.leases}
        deadly = self.now < LENGTH_S - QUIET_S and wanted != self.wanted and self.rng.random() < 0.02
        if deadly and self.rng.random() < 0.3:
            self._crash()
            return
        self.disk, self.wanted = copy.deepcopy(state.saved()), wanted
        self.told = {(name, app.session): leases_of(state, name) for name, app in state.apps.items()}
        self._call_ray(deadly)

    def _call_ray(self, deadly: bool = False) -> None:
        """A GPU is reserved when its last reservation is gone."""
        there = {gpu: (app, gpu, token) for gpu, (app, token) in (self.reserved | self.waiting).items()}
        for key in sorted({*there.values(), *self.wanted}):
            stays = key in self.wanted
            if (stays, key) in self._asked or (stays and key[1] in there):
                continue
            if deadly and self.rng.random() < 0.3:
                self._crash()
                return
            self._asked.add((stays, key))
            if stays:
                self._reserve(*key)
            else:
                # Ray goes on with a removal even if the arbiter dies.
                self.at(self._delay(), partial(self._remove, *key))

    def _reserve(self, app: str, gpu: str, token: int) -> None:
        self.newest = max(self.newest, token)
        holder = self.reserved.get(gpu)
        if gpu not in self.there or gpu in self.outside:
            self.waiting[gpu] = (app, token)
            self._to_arbiter(m.Reservation(gpu, token))
            return
        if holder is not None and holder != (app, token):
            self._violated(f"{gpu} is reserved for {app}, token {token}, while {holder} holds it")
        if holder is None and token < self.greatest.get(gpu, 0):
            self._violated(f"{gpu} is reserved under {token}, older than token {self.greatest[gpu]}")
        self.say(f"{gpu} is reserved for {app}, token {token}")
        self.greatest[gpu] = token
        self.reserved[gpu] = (app, token)
        self._to_arbiter(m.Reservation(gpu, token, "group"))

    def _remove(self, app: str, gpu: str, token: int) -> None:
        if self.reserved.get(gpu) == (app, token):
            self.say(f"{gpu} is taken from {app}, token {token}")
            del self.reserved[gpu]
        if self.waiting.get(gpu) == (app, token):
            del self.waiting[gpu]
        if self.arbiter is not None:
            self._call_ray()

    # --- agents

    def _start(self, driver: Driver) -> None:
        driver.session += 1
        driver.agent = Agent(driver.name, f"{driver.name}/{driver.session}", driver, "", driver.together)
        driver.running, driver.torn, driver.calling = {}, {}, 0
        self.say(f"{driver.agent.session} starts")

    def _start_again(self, driver: Driver) -> None:
        if driver.agent is None:
            self._start(driver)

    def _call(self, driver: Driver, agent: Agent) -> None:
        """The driver says how things are with it."""
        heard = driver.last = agent.heartbeat()
        driver.calling, driver.called = heard.number, self.now

        def arrives() -> None:
            if self.arbiter is None:
                return
            answer: m.Leases | m.Refused | None = self._deliver_to_arbiter(heard, self._life)
            told = self.told.get((driver.name, heard.session))
            if answer is None and told is not None and told.digest != heard.known:
                answer = told
            self.at(self._delay(), partial(self._answer, driver, agent, heard.number, answer))

        self.at(self._delay(), arrives)

    def _answer(self, driver: Driver, agent: Agent, number: int, answer: m.Leases | m.Refused | None) -> None:
        """A call returns. ``number``: of the message."""
        if driver.agent is not agent or number != driver.calling:
            return
        if self.now < driver.paused_until:
            self.at(driver.paused_until - self.now, partial(self._answer, driver, agent, number, answer))
            return
        driver.calling = 0
        for notice in agent.take(answer):
            self._executor(driver, notice)
        if agent.refused is not None:
            # The arbiter has not given up its former session yet.
            driver.agent = None
            self.at(5.0, partial(self._start_again, driver))

    def _executor(self, driver: Driver, notice: Notice) -> None:
        if isinstance(notice, Gained):
            driver.running[notice.gpu.id] = notice.token
        elif isinstance(notice, Leave):
            if driver.polite:
                self.at(self.rng.uniform(0, 8), lambda: self._vacate(driver, notice.gpu.id, notice.token))
        else:
            driver.running.pop(notice.gpu.id, None)

    def _leave_torn_gangs(self, driver: Driver) -> None:
        """As a job does: what is of no use, and will be of none, is given back after a few seconds."""
        assert driver.agent is not None
        loose = [] if driver.agent.promised else driver.loose()
        driver.torn = {gpu: driver.torn.get(gpu, self.now) for gpu in loose}
        for gpu, since in driver.torn.items():
            if self.now - since >= TORN_S:
                self._vacate(driver, gpu, driver.running[gpu])

    def _vacate(self, driver: Driver, gpu: str, token: int) -> None:
        if driver.agent is not None and driver.running.get(gpu) == token:
            del driver.running[gpu]
            driver.agent.vacated(gpu)

    # --- faults

    def _fault(self) -> None:
        if self.now > LENGTH_S - QUIET_S:
            return
        faults = [self._crash, self._kill, self._pause, self._node, self._jump, self._early, self._echo, self._outside]
        self.rng.choice(faults)()
        self.at(self.rng.expovariate(1 / 6), self._fault)

    def _crash(self) -> None:
        if self.arbiter is None:
            return
        self.say("the arbiter dies")
        self.crashes += 1
        self.arbiter = None
        self._asked.clear()
        self.left.clear()
        self._life += 1
        self.at(self.rng.uniform(0, 8), self._restart)

    def _restart(self) -> None:
        if self.arbiter is not None:
            return
        self.say("the arbiter starts again")
        data = {} if self.rng.random() < 0.1 else copy.deepcopy(self.disk)
        if data == {} and self.disk:
            self.say("and has lost its books")
            self._forgive()  # With them it has lost how long each app has been silent.
        known = {(app, gpu, token): "" for gpu, (app, token) in self.waiting.items()}
        known |= {(app, gpu, token): "group" for gpu, (app, token) in self.reserved.items()}
        self._asked = {(True, key) for key in known}
        self.arbiter = Arbiter.restored(data, known, self.there.values(), self.newest)
        for gpu, (_, token) in self.waiting.items():
            self._to_arbiter(m.Reservation(gpu, token))
        if data == {}:
            self.arbiter.state.settings = SETTINGS
        check_arbiter(self.arbiter)
        self._shell()

    def _forgive(self) -> None:
        """Allow the time until a death is noticed; deaths add up."""
        for gpu in self.idle:
            self.idle[gpu] = max(0.0, self.idle[gpu] - SETTINGS.patience_s)

    def _kill(self) -> None:
        driver = self.rng.choice(self.drivers)
        if driver.agent is not None:
            self.say(f"{driver.agent.session} dies")
            driver.agent, driver.running = None, {}
            self._forgive()
            if self.rng.random() < 0.7:
                self.at(self.rng.uniform(0, 30), partial(self._start_again, driver))

    def _pause(self) -> None:
        self.rng.choice(self.drivers).paused_until = self.now + self.rng.uniform(0, 40)

    def _node(self) -> None:
        machine = self.rng.choice(sorted({gpu.machine for gpu in self.gpus.values()}))
        gpus = [gpu for gpu in self.gpus.values() if gpu.machine == machine and gpu.id in self.there]
        if not gpus:
            return
        self.say(f"node {machine} dies")
        for gpu in gpus:
            del self.there[gpu.id]
            self.reserved.pop(gpu.id, None)
            self.waiting.pop(gpu.id, None)
        self._to_arbiter(m.Gpus(tuple(self.there.values())), delay=0.0)
        self.at(self.rng.uniform(0, 30), lambda: self._node_back(gpus))

    def _node_back(self, gpus: list[Gpu]) -> None:
        self.say(f"node {gpus[0].machine} is back")
        for gpu in gpus:
            self.there[gpu.id] = gpu
        self._to_arbiter(m.Gpus(tuple(self.there.values())), delay=0.0)

    def _outside(self) -> None:
        free = sorted(self.there.keys() - self.reserved.keys() - self.outside)
        if free:
            gpu = self.rng.choice(free)
            self.say(f"something outside uses {gpu}")
            self.outside.add(gpu)
            self.at(self.rng.uniform(0, 40), lambda: self._given_back(gpu))

    def _given_back(self, gpu: str) -> None:
        self.outside.remove(gpu)
        if gpu in self.waiting and gpu in self.there:
            app, token = self.waiting.pop(gpu)
            self._reserve(app, gpu, token)

    def _jump(self) -> None:
        by = self.rng.choice([-3600.0, -10.0, 10.0, 3600.0])
        self.say(f"the arbiter's clock jumps by {by}")
        self._skew += by

    def _early(self) -> None:
        """An executor leaves a GPU before its lease ends."""
        driver = self.rng.choice(self.drivers)
        if driver.running:
            gpu = self.rng.choice(sorted(driver.running))
            self._vacate(driver, gpu, driver.running[gpu])

    def _echo(self) -> None:
        """A message arrives for a second time, late."""
        driver = self.rng.choice(self.drivers)
        if driver.last is not None:
            self._to_arbiter(driver.last, delay=self.rng.uniform(0, 30))

    # --- invariants

    def check(self) -> None:
        """Check the invariants. Raises Violation."""
        passed, self._checked = self.now - self._checked, self.now
        executing: dict[str, str] = {}
        for driver in self.drivers:
            if driver.agent is None:
                continue
            for gpu, token in driver.running.items():
                if self.reserved.get(gpu) == (driver.name, token):
                    if gpu in executing:
                        self._violated(f"{gpu} runs work of {executing[gpu]} and {driver.name}")
                    executing[gpu] = driver.name
        held: dict[str, list[Gpu]] = defaultdict(list)
        for gpu, name in executing.items():
            held[name].append(self.gpus[gpu])
        wanting = [
            driver
            for driver in self.drivers
            if driver.agent is not None
            and self.now >= driver.paused_until
            and whole_gangs(held[driver.name], driver.together) < driver.jobs * driver.width
        ]
        idle = Counter(gpu.machine for gpu in self.there.values() if gpu.id not in executing)
        for gpu, place in self.gpus.items():
            apps = [driver.name for driver in wanting if driver.together <= idle[place.machine]]
            if gpu in executing or gpu not in self.there or gpu in self.outside or not apps:
                self.idle[gpu] = 0.0
            elif self.arbiter is not None:
                self.idle[gpu] += passed
                if self.idle[gpu] > LEASE_S + SLACK_S:
                    self._violated(f"{gpu} was idle for {self.idle[gpu]:.1f} s while {apps[0]} wanted it")
        self._check_gangs(passed)

    def _check_gangs(self, passed: float) -> None:
        torn: dict[tuple[str, str], float] = {}
        for driver in self.drivers:
            if driver.agent is None or driver.together == 1:
                continue
            waits = self.arbiter is None or self.now < driver.paused_until
            for gpu in driver.loose():
                key = (driver.name, gpu)
                torn[key] = 0.0 if waits else self.torn.get(key, 0.0) + passed
                if torn[key] > LEASE_S + SLACK_S:
                    self._violated(f"{driver.name} has held {gpu} for {torn[key]:.1f} s, and no whole gang there")
        self.torn = torn

    def _violated(self, what: str) -> None:
        raise Violation(
            f"seed {self.seed}, {self.now:.3f} s: {what}; repeat it with "
            f"python -m tests.themis.fault_schedules --seed {self.seed}"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Seeded faults over the arbiter and its agents.")
    parser.add_argument("--seed", type=int, help="run only this schedule, and print what happens")
    parser.add_argument("--seeds", type=int, default=10_000, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.seed is not None:
        World(options.seed, print).run()
        return
    failed = rounds = crashes = 0
    for seed in range(options.first, options.first + options.seeds):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            failed += 1
            print(error if isinstance(error, Violation) else f"seed {seed}: {error!r}", flush=True)
        rounds += world.rounds
        crashes += world.crashes
        if (seed + 1) % 1000 == 0:
            print(f"{seed + 1} schedules", file=sys.stderr, flush=True)
    print(f"{options.seeds} schedules, {rounds} rounds, {crashes} deaths of the arbiter, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Seeded schedules of faults over the arbiter's process and its tenants, on a stand-in of Ray.

``python -m tests.themis.fault_schedules --seeds 10000`` runs that many schedules; ``--seed N`` runs one of them again
and prints what happens. What is checked all the time is said in `checked_world`.

A schedule has machines, apps, and an arbiter whose books survive its death. Messages and calls take any time. Processes
may die in the middle of a call. Drivers die and come back, pause, and ignore the end of a lease; nodes die and return
under other names; something outside uses cores, so that reservations wait; calls fail, before or after they have had
their effect, or have it later; the disk is full; the arbiter's clock stands still, and jumps.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.themis.arbiter_invariants import check_arbiter
from tests.themis.checked_world import LATE_S, LEASE_S, SETTINGS, TURN_S, CheckedWorld, Driver, Process
from tests.themis.shell_world import Handle
from themis_bridge import messages as m
from themis_bridge.agent import Gained, Leave, Notice
from themis_bridge.errors import ThemisError
from themis_bridge.shell import actor
from themis_bridge.shell.tenant import Tenant

#: Seconds between two ticks of the arbiter.
TICK_S = 0.2
#: Seconds that a call takes where it blocks. Judgement: longer than the pauses of `Groups`.
BLOCKED_S = 6.0
#: Seconds after which an app gives back what it holds of a gang that is not whole. Judgement: as a job does.
TORN_S = 3.0
#: Virtual seconds of a schedule. Judgement: five leases.
LENGTH_S = 150.0
#: Virtual seconds at the end of a schedule without new faults. Judgement: longer than a lease, so that GPUs recover.
QUIET_S = 40.0


class Violation(AssertionError):
    """An invariant does not hold. The message says which one, when, and how to repeat the schedule."""


class Killed(BaseException):
    """The process that has made a call is dead; no handler of the process catches it."""


class Schedule(CheckedWorld):
    """One schedule; all that is random comes from its seed. One thing: every fault touches the same state."""

    def __init__(self, monkeypatch: Any, path: Path, seed: int, log: Callable[[str], None] | None = None):
        self.seed, self._log = seed, log
        self.rng = random.Random(seed)
        #: Whose code runs now; and the arbiter's process.
        self.who = self.arbiter = Process(False)
        #: By how much the arbiter's clock is ahead.
        self._ahead = 0.0
        #: The share of the calls of Ray that fail or are slow, while some do.
        self._bad = 0.0
        #: GPU -> the greatest token of which Ray was ever asked for a group, and the app that had it.
        self.greatest: dict[str, tuple[int, str]] = {}
        #: The sessions of which this arbiter, or its books, know that they have left.
        self.left: set[str] = set()
        #: App -> what it sent last.
        self._last: dict[str, m.Heartbeat] = {}
        #: Whether a message is on its way.
        self._travels = False
        #: What was violated first.
        self._broken: Exception | None = None
        self.crashes = self.rounds = 0
        cores = [self.rng.randint(1, 4) for _ in range(self.rng.randint(1, 3))]
        monkeypatch.setattr(actor, "TICK_S", TICK_S)
        super().__init__(monkeypatch, path, cores)
        self.drivers = [self._driver(f"app{i}") for i in range(self.rng.randint(1, 4))]

    def _driver(self, name: str) -> Driver:
        together = self.rng.choice([1, 1, 1, 2, 2, 4])
        width = self.rng.choice([1, 1, 2]) if together == 1 else together
        polite, memory = self.rng.random() < 0.7, self.rng.choice([0.0, 0.0, 1.0])
        return Driver(name, self.rng.randint(1, 4), width, together, polite, memory)

    def play(self) -> None:
        """Run the whole schedule. Raises Violation."""
        for driver in self.drivers:
            self.at(self.rng.uniform(0, 20), partial(self._start_driver, driver))
        self.at(self.rng.expovariate(1 / 4), self._fault)
        self.at(TURN_S, self._check)
        self.run(LENGTH_S)
        if self._broken is not None:
            raise self._broken

    def at(self, delay: float, action: Callable[[], object]) -> None:
        if self._broken is None:
            super().at(delay, partial(self._do, action))

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Nothing happens any more, because an invariant does not hold. The code of a process may catch exceptions."""
        self._broken = self._broken or error
        self._queue.clear()

    def say(self, text: str) -> None:
        if self._log:
            self._log(f"{self.now:8.3f}  {text}")

    def clock(self) -> float:
        return self.now + self._ahead if self._stands_at is None else self._stands_at

    @property
    def quiet(self) -> bool:
        """Whether no new fault may come."""
        return self.now > LENGTH_S - QUIET_S

    # --- processes

    def _as(self, process: Process, action: Callable[[], object]) -> None:
        """The process does that; it may die meanwhile."""
        before, self.who = self.who, process
        try:
            action()
        except Killed:
            pass
        finally:
            self.who = before

    def _wait(self, seconds: float) -> None:
        """The process waits. Raises Killed."""
        me = self.who
        self.run(seconds)
        self.who = me
        if not me.alive:
            raise Killed

    def start(self) -> None:
        """Start the arbiter. Its constructor may fail, and be killed."""
        process = self.arbiter = Process()
        held = set(self.there())
        if self.books.exists():
            books = json.loads(self.books.read_text())["leases"]["leases"]
            held &= {(each["app"], each["gpu"], each["token"]) for each in books if each["group"]}

        def construct() -> None:
            made = None
            while made is None:
                try:
                    made = actor.ArbiterActor(self._settings, "CPU", "head")
                except Exception:
                    self._wait(1.0)
            self.actor = made
            # Jobs keep what they hold.
            lost = held - {lease.key for lease in made._arbiter.state.leases}
            if lost := {key for key in lost & set(self.there()) if key[1].split("-")[0] in self.nodes.values()}:
                self._violated(f"the leases {lost} have ended with the arbiter's death")
            self.at(TICK_S, partial(self._ticks, process))

        self._as(process, construct)

    def _tick(self) -> None:
        """Each arbiter has its own ticks."""

    def _ticks(self, process: Process) -> None:
        if process.alive:
            self._as(process, self.actor._tick)
        if process.alive:
            check_arbiter(self.actor._arbiter)
            self.rounds = max(self.rounds, self.actor._arbiter.state.rounds)
            self.at(TICK_S, partial(self._ticks, process))

    # --- calls and messages

    def call(self, name: str, real: Callable[[], Any], args: Sequence[Any]) -> Any:
        me = self.who
        if not me.alive:
            raise Killed
        if me is self.arbiter and not self.quiet and self.rng.random() < 0.002:
            if self.rng.random() < 0.5:
                real()
            self._crash()
            raise Killed
        blocked = self._blocked.get(self._address(name, args), 0.0) > self.now
        bad = self.now < self._bad_until
        fails = blocked or (bad and self.rng.random() < self._bad)
        result, effect = None, self.rng.choice(["none", "now", "late"]) if fails else "now"
        if effect == "now":
            result = real()
        elif effect == "late" and name.endswith("placement_group"):
            self.at(self.rng.uniform(0, LATE_S), partial(self._late, real, me))
        if name != "write_books" and (blocked or (bad and self.rng.random() < 0.1)):
            # The books are written under the lock that messages wait for.
            self._wait(BLOCKED_S if blocked else self.rng.uniform(0, LATE_S))
        if fails:
            self.say(f"a call fails: {name} {args[:1] and self._address(name, args)}")
            anything = (RuntimeError, TypeError)[self.calls.total() % 2]("injected")
            raise OSError(errno.EIO, "injected") if name == "write_books" else anything
        return result

    def _address(self, name: str, args: Sequence[Any]) -> str:
        """The machine of the group that a call is about; "" if it is about none."""
        if name == "placement_group":
            return next((each[5:] for each in args[0][0] if each[5:] in self.cores), "")
        handle = args[0] if args else None
        return str(self.table.get(handle.id.hex(), {}).get("address", "")) if isinstance(handle, Handle) else ""

    def _late(self, real: Callable[[], Any], by: Process | None = None) -> None:
        """``by``: the process whose call it is. Ray carries out those of a dead arbiter before the next one asks."""
        with contextlib.suppress(Exception):
            if by is None or by.alive or by is self.arbiter:
                real()

    def _travel(self) -> None:
        """A message takes any time; of several that take long at once, all would take as long as all together."""
        if not self._travels:
            self._travels = True
            try:
                self._wait(self._delay())
            finally:
                self._travels = False

    def _delay(self) -> float:
        longest = self.rng.choice([0.0] * 10 + [0.05, 1.0, LATE_S])
        return self.rng.uniform(0, longest)

    def get(self, call: Callable[[], Any], timeout: float) -> Any:
        """Both ways take any time, and the answer may be lost."""
        self._travel()
        if not self.quiet and self.rng.random() < 0.01:
            if self.rng.random() < 0.5:
                self.at(self.rng.uniform(0, 2 * LATE_S), partial(self._late, call))
            raise self.rng.choice([ray.exceptions.GetTimeoutError, ray.exceptions.RaySystemError("injected")])
        if self.actor is None:
            raise ray.exceptions.RayActorError
        answer = call()
        self._travel()
        return answer

    def ask(self, method: str, *args: Any) -> Any:
        before, self.who = self.who, self.arbiter
        over = self.left.copy()
        try:
            answer = super().ask(method, *args)
        except Killed:
            raise ray.exceptions.RayActorError from None
        finally:
            self.who = before
        if method == "leave":
            self.left.add(args[1])
            # The arbiter forgets it after a lease, by its own clock.
            self.at(LEASE_S - SETTINGS.patience_s, partial(self.left.discard, args[1]))
            return None
        (heard,) = args
        if heard.session in over and not isinstance(answer, m.Refused):
            self._violated(f"{heard.session} has left, and was heard")
        self._last[heard.app] = heard
        return answer

    def _placement_group(self, bundles: Any, strategy: str = "PACK", name: str = "", lifetime: Any = None) -> Handle:
        made = super()._placement_group(bundles, strategy, name, lifetime)
        entry = self.table[made.id.hex()]
        entry["from"] = self.now + self._delay()
        entry["owner"] = self.who
        if name:
            _, app, gpu, token = name.split("/")
            self.say(f"Ray is asked for {name}")
            live = [
                each["name"]
                for each in self.table.values()
                if each["state"] != "REMOVED" and f"/{gpu}/" in each["name"]
            ]
            if len(live) > 1:
                self._violated(f"{gpu} is in two groups: {live}")
            before = self.greatest.get(gpu, (0, ""))
            if int(token) <= before[0] and (int(token), app) != before:
                self._violated(f"{name} is asked for after token {before[0]} of {before[1]}")
            self.greatest[gpu] = int(token), app
        return made

    def _remove_placement_group(self, group: Handle) -> None:
        entry = self.table.get(group.id.hex())
        if entry is not None:
            entry["until"] = min(entry["until"], self.now + self._delay())
            self.say(f"Ray is to remove {entry['name']}")

    # --- drivers

    def _start_driver(self, driver: Driver) -> None:
        if not driver.process.alive:
            process = driver.process = Process()
            driver.tenant, driver.running, driver.torn, driver.done = None, {}, {}, False
            self._as(process, partial(self._join, driver))

    def _join(self, driver: Driver) -> None:
        process, bundle = driver.process, {"CPU": 1.0, "memory": driver.memory}
        try:
            driver.tenant = Tenant(driver.name, driver, bundle, "CPU", "", driver.together)
        except ThemisError as error:
            # The arbiter has not given up its former session yet.
            self.say(f"{driver.name} does not join: {error}")
            self._end(driver)
            return
        self.say(f"{driver.tenant._agent.session} joins")
        self.at(TURN_S, partial(self._turns, driver, process))

    def _turns(self, driver: Driver, process: Process) -> None:
        if self._awake(driver):
            self._as(process, partial(self._driver_turn, driver, driver.tenant))
        if process.alive:
            self.at(max(TURN_S, driver.paused_until - self.now), partial(self._turns, driver, process))

    def _driver_turn(self, driver: Driver, tenant: Tenant) -> None:
        if driver.done:
            self.say(f"{driver.name} is done")
            driver.tenant = None
            tenant.close()
            self._end(driver, self.rng.uniform(0, 30))
            return
        tenant._loop()
        try:
            notices = tenant.poll()
        except ThemisError as error:
            self._violated(f"{driver.name} is refused: {error}")
            return
        for notice in notices:
            self._executor(driver, notice)
        # As a job does: what is of no use, and will be of none, is given back after a few seconds.
        loose = [] if tenant.expects else driver.loose()
        driver.torn = {gpu: driver.torn.get(gpu, self.now) for gpu in loose}
        for gpu, since in driver.torn.items():
            if self.now - since >= TORN_S:
                self._vacate(driver, driver.process, driver.running[gpu])

    def _executor(self, driver: Driver, notice: Notice) -> None:
        if isinstance(notice, Gained):
            driver.running[notice.gpu.id] = notice
        elif isinstance(notice, Leave):
            if driver.polite:
                self.at(self.rng.uniform(0, 8), partial(self._vacate, driver, driver.process, notice))
        elif driver.running.get(notice.gpu.id, notice).token == notice.token:
            driver.running.pop(notice.gpu.id, None)

    def _vacate(self, driver: Driver, process: Process, lease: Notice) -> None:
        running = driver.running.get(lease.gpu.id)
        if process.alive and driver.tenant is not None and running is not None and running.token == lease.token:
            del driver.running[lease.gpu.id]
            driver.tenant.vacated(lease.gpu.id, lease.token)

    def _end(self, driver: Driver, back: float = 5.0) -> None:
        """The process ends; Ray removes its sign of life."""
        driver.process.alive, driver.running = False, {}
        self._forgive()
        for entry in self.table.values():
            if entry.get("owner") is driver.process:
                entry["until"] = self.now + self._delay()
        self.at(back, partial(self._start_driver, driver))

    # --- faults

    def _fault(self) -> None:
        if not self.quiet:
            faults = [self._crash, self._kill, self._done, self._pause, self._sign_is_lost, self._node, self._echo]
            faults += [self._outside, self._calls_fail, self._calls_block, self._disk_is_full, self._clock_stands]
            fault = self.rng.choice(faults)
            self.say(fault.__name__.replace("_", " "))
            fault()
            self.at(self.rng.expovariate(1 / 6), self._fault)

    def _length(self, most: float) -> float:
        """How long a fault lasts: it ends before the quiet."""
        return min(self.rng.uniform(0, most), max(0.0, LENGTH_S - QUIET_S - self.now))

    def _crash(self) -> None:
        if self.arbiter.alive:
            self.crashes += 1
            self.arbiter.alive, self.actor = False, None
            self.left.clear()
            self.at(self.rng.uniform(0, 8), self._restart)

    def _restart(self) -> None:
        if not self.arbiter.alive:
            self.say("the arbiter starts again")
            if self.rng.random() < 0.1:
                self.say("and has lost its books")
                self.books.unlink(missing_ok=True)
                self._forgive()  # With them it has lost how long each app has been silent.
            self.start()

    def _kill(self) -> None:
        driver = self.rng.choice(self.drivers)
        if driver.process.alive:
            self._end(driver, self.rng.choice([self.rng.uniform(0, 30), LENGTH_S]))

    def _done(self) -> None:
        """A job ends, and says so."""
        self.rng.choice(self.drivers).done = True

    def _pause(self) -> None:
        driver = self.rng.choice(self.drivers)
        driver.paused_until = self.now + self._length(40)

    def _sign_is_lost(self) -> None:
        """Ray removes that of a driver that lives."""
        driver = self.rng.choice(self.drivers)
        for entry in self.table.values():
            if entry.get("owner") is driver.process and driver.process.alive and not entry["name"]:
                entry["state"] = "REMOVED"
                self._forgive()

    def _node(self) -> None:
        address = self.rng.choice(sorted(self.cores))
        node = self.nodes.pop(address, None)
        if node is not None:
            for entry in self.table.values():
                if entry["address"] == address and entry["state"] == "CREATED":
                    entry["state"] = "RESCHEDULING"
            self.at(self._length(30), partial(self._node_back, address, node))

    def _node_back(self, address: str, before: str) -> None:
        self.nodes[address] = f"{before[0]}{int(before[1:] or 0) + 1}"

    def _outside(self) -> None:
        address = self.rng.choice(sorted(self.cores))
        self.settle()
        used = sum(each["address"] == address and each["state"] == "CREATED" for each in self.table.values())
        if used + self.outside[address] < self.cores[address]:
            self.outside[address] += 1
            self.at(self._length(40), lambda: self.outside.subtract([address]))

    def _calls_fail(self) -> None:
        self._bad_until, self._bad = self.now + self._length(15), self.rng.choice([0.1, 0.5, 1.0])

    def _calls_block(self) -> None:
        """Each call for a group of one machine blocks, and fails."""
        address = self.rng.choice(sorted(self.cores))
        self._blocked[address] = self.now + self._length(40)

    def _disk_is_full(self) -> None:
        self.disk = OSError(errno.ENOSPC, "No space left on device")
        self.at(self._length(15), lambda: setattr(self, "disk", None))

    def _clock_stands(self) -> None:
        """The arbiter's clock stands still, and may jump ahead when it goes again."""
        if self._stands_at is None:
            self._stands_at = self.clock()
            self.at(self._length(20), self._clock_goes)

    def _clock_goes(self) -> None:
        assert self._stands_at is not None
        self._ahead = self._stands_at - self.now + self.rng.choice([0.0, 10.0, 3600.0])
        self._stands_at = None

    def _echo(self) -> None:
        """A message arrives for a second time, late."""
        if self._last:
            heard = self._last[self.rng.choice(sorted(self._last))]
            self.at(self.rng.uniform(0, 30), partial(self._late, partial(self.ask, "hear", heard)))

    def _violated(self, what: str) -> None:
        again = f"repeat it with python -m tests.themis.fault_schedules --seed {self.seed}"
        self._stop(Violation(f"seed {self.seed}, {self.now:.3f} s: {what}; {again}"))


def play(seed: int, log: Callable[[str], None] | None = None) -> Schedule:
    """Play one schedule. Raises Violation."""
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as directory:
        schedule = Schedule(monkeypatch, Path(directory), seed, log)
        schedule.play()
        return schedule


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Seeded faults over the arbiter and its tenants.")
    parser.add_argument("--seed", type=int, help="run only this schedule, and print what happens")
    parser.add_argument("--seeds", type=int, default=10_000, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        play(options.seed, print)
        return
    failed = rounds = crashes = 0
    for seed in range(options.first, options.first + options.seeds):
        try:
            schedule = play(seed)
            rounds, crashes = rounds + schedule.rounds, crashes + schedule.crashes
        except AssertionError as error:
            failed += 1
            print(error if isinstance(error, Violation) else f"seed {seed}: {error!r}", flush=True)
    print(f"{options.seeds} schedules, {rounds} rounds, {crashes} deaths of the arbiter, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

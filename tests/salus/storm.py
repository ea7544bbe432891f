"""A storm of random events over one device: every promise is checked after each. `test_policies` runs it.

python -m tests.salus.storm --events 100000 --seed 1      all policies, that many events each
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

from benchmarks.shared_device import messages as m
from benchmarks.shared_device.admission import PATIENCE
from benchmarks.shared_device.twin import Device
from salus_share import Need, policy
from salus_share.policies import POLICIES
from salus_share.turns import INSIDE

CAPACITY = 1000
#: An iteration takes from this to ten times this, seconds.
SHORTEST = 0.1
#: Seconds from one event to the next: no lane is kept for longer.
STEP_S = 1.0
#: Under FAIR a job waits until each other has caught up with its last iteration and its credit, and one turn more.
FAIR_TURNS = int((10 * SHORTEST + 1.0) / SHORTEST) + 2


class Storm:
    """Plays the service and the trials: it answers instructions in random order and makes up what jobs do."""

    def __init__(self, name: str, source: random.Random) -> None:
        self.random = source
        self.name = name
        self.device = Device(CAPACITY, policy(name))
        self.admission = self.device.admission
        self.now = 0.0
        self.counted: Counter[str] = Counter()
        self.tokens: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.ready: set[str] = set()
        self.must_leave: set[str] = set()
        #: How many jobs that came later were admitted before it.
        self.waiting: dict[str, int] = {}
        #: By ready job: the turns that its lane has given to each other job since.
        self.turns: dict[str, Counter[str]] = {}
        self.added = 0

    def tell(self, event: m.Event) -> None:
        self.counted[type(event).__name__] += 1
        self.now += STEP_S
        instructions, woken = self.device.handle(event, self.now)
        # A lane that a job leaves is given away at once. Admission may then tell the job that got it to leave.
        self._wake(*woken)
        for told in instructions:
            self.counted[type(told).__name__] += 1
            match told:
                case m.Admit(job, _, token):
                    assert token > self.tokens.get(job, 0)
                    self.tokens[job] = token
                    del self.waiting[job]
                    self._passed(job)
                case m.Pause(job):
                    self.must_leave.add(job)
                    self.ready.discard(job)
                    self.turns.pop(job, None)
                case m.Refuse(job, _):
                    self._drop(job)
                case m.Move(job, _):
                    assert job not in self.running
                    if job in self.turns:
                        self.turns[job].clear()
        self.check()

    def arrive(self, job: str) -> None:
        self.counted["arrive"] += 1
        self.now += STEP_S
        self._arrive(job)
        self.check()

    def _arrive(self, job: str) -> None:
        self.ready.add(job)
        self.turns[job] = Counter()
        self._wake(self.device.arrive(job, self.tokens[job], self.now))

    def end_iteration(self, job: str, seconds: float, again: bool) -> None:
        """``again``: it is back at the gate in the same moment. Else the lane is kept for it in vain."""
        self.counted["end_iteration"] += 1
        lane = self.running.pop(job)
        self.now += STEP_S
        woken = self.device.end_iteration(job, seconds, self.now)
        if again:
            self._arrive(job)
        self._wake(woken)
        self.now += STEP_S
        self._wake(self.device.turns.grant(lane, self.now))
        self.check()

    def _wake(self, *jobs: str | None) -> None:
        for job in jobs:
            seat = None if job is None else self.device.seats.by_job.get(job)
            if job is None or seat is None or seat.state != INSIDE or job in self.running:
                continue
            self.counted["Run"] += 1
            assert job in self.ready and job not in self.must_leave
            assert seat.lane not in self.running.values(), "two iterations in one lane"
            self.ready.remove(job)
            self.running[job] = seat.lane
            self._turn(job, seat.lane)

    def _passed(self, job: str) -> None:
        for other in self.waiting:
            if int(other[1:]) < int(job[1:]):
                self.waiting[other] += 1
                bound = PATIENCE if self.name in ("FIFO", "FAIR", "PACK") else None
                assert bound is None or self.waiting[other] <= bound, f"{other} is never let in"

    def _turn(self, job: str, lane: int) -> None:
        self.turns.pop(job, None)
        for other, counted in self.turns.items():
            if self.admission.table.places[other].lane == lane:
                counted[job] += 1
                most = {"FAIR": FAIR_TURNS, "PACK": 1}.get(self.name)
                assert most is None or counted[job] <= most, f"{other} starves: {counted}"

    def _drop(self, job: str) -> None:
        for books in (self.tokens, self.running, self.waiting, self.turns):
            books.pop(job, None)
        self.ready.discard(job)
        self.must_leave.discard(job)

    def check(self) -> None:
        places = self.admission.table.places
        lanes: dict[int, list] = {}
        for place in places.values():
            lanes.setdefault(place.lane, []).append(place.ephemeral)
        reserved = sum(place.persistent for place in places.values()) + sum(max(sizes) for sizes in lanes.values())
        assert reserved == self.admission.table.reserved <= CAPACITY, "2.1 is broken"
        assert set(places) == set(self.admission.jobs) - set(self.waiting)
        # Nobody waits for a turn at a lane that is free.
        free = set(lanes) - set(self.running.values())
        assert not any(places[job].lane in free for job in self.ready)
        if not places:
            assert not self.waiting, "the device is empty and somebody waits"

    def need(self) -> Need:
        size = self.random.choice((200, 500, 1000))
        persistent = self.random.randint(0, size // 2)
        return Need(persistent, self.random.randint(0, size - persistent))

    def step(self) -> None:
        idle = sorted(set(self.admission.table.places) - set(self.running) - self.ready)
        may = ["add"] * (2 if len(self.admission.jobs) < 25 else 0)
        may += ["end"] * 6 * bool(self.running) + ["ready"] * 6 * bool(set(idle) - self.must_leave)
        may += ["leave"] * bool(self.admission.jobs) + ["come again"] * 4 * bool(self.must_leave & set(idle))
        may += ["need", "progress"] * bool(idle)
        what = self.random.choice(may)
        draw = self.random.choice
        if what == "add":
            need = self.need() if self.random.random() < 0.9 else None
            self.add(need, draw((None, self.random.uniform(0, 100))), self.random.randint(0, 3))
        elif what == "end":
            job = draw(sorted(self.running))
            again = self.random.random() < 0.7 and job not in self.must_leave
            self.end_iteration(job, self.random.uniform(SHORTEST, 10 * SHORTEST), again)
        elif what == "ready":
            self.arrive(draw(sorted(set(idle) - self.must_leave)))
        elif what == "leave":
            job = draw(sorted(self.admission.jobs))
            self._drop(job)
            self.tell(m.JobLeft(job))
        elif what == "come again":
            self.come_again(draw(sorted(self.must_leave & set(idle))))
        elif what == "need":
            self.tell(m.NeedFound(draw(idle), self.need()))
        else:
            self.tell(m.Progress(draw(idle), self.random.uniform(0, 100), self.random.randint(0, 3)))

    def add(self, need: Need | None, remaining: float | None, rung: int) -> None:
        self.added += 1
        job = f"j{self.added}"
        self.waiting[job] = 0
        self.tell(m.JobAdded(job, need, remaining, rung))

    def come_again(self, job: str) -> None:
        """A job that was told to leave does so, and waits as a new one."""
        was = self.admission.jobs[job]
        self._drop(job)
        self.tell(m.JobLeft(job))
        self.add(was.need, was.standing.remaining, was.standing.rung)

    def drain(self) -> None:
        """No more come, and every job leaves after one iteration: so every one of them must get it."""
        for _ in range(100 * (len(self.admission.jobs) + 1)):
            places = self.admission.table.places
            if self.running:
                job = min(self.running)
                self.end_iteration(job, SHORTEST, again=False)
                if job not in self.must_leave:
                    self._drop(job)
                    self.tell(m.JobLeft(job))
            elif self.must_leave:
                self.come_again(min(self.must_leave))
            elif places:
                self.arrive(min(set(places) - self.ready))
            else:
                break
        assert not self.admission.jobs, f"never admitted: {self.admission.waiting}"


def run(name: str, events: int, source: random.Random) -> Counter[str]:
    """One storm of ``events`` events, then everything drains. Returns how many of each kind there were."""
    storm = Storm(name, source)
    for _ in range(events):
        storm.step()
    storm.drain()
    return storm.counted


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in POLICIES:
        print(name, dict(run(name, options.events, random.Random(options.seed))))


if __name__ == "__main__":
    main()

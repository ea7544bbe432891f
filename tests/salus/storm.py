"""A storm of random events over one scheduler, every promise looked at after each; `test_scheduler` runs it.

python -m tests.salus.storm --events 100000 --seed 1      all policies, that many events each
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

from salus_share import Need, Scheduler, policy
from salus_share.messages import (
    Admit,
    Event,
    IterationEnded,
    JobAdded,
    JobLeft,
    Move,
    NeedFound,
    Pause,
    Paused,
    Progress,
    Ready,
    Refuse,
    Run,
)
from salus_share.policies import POLICIES

CAPACITY = 1000
#: An iteration takes from this to ten times this, seconds.
SHORTEST = 0.1
#: Under FAIR a job waits until each other caught up with its last iteration and its credit, and one turn more.
FAIR_TURNS = int((10 * SHORTEST + 1.0) / SHORTEST) + 2


class Storm:
    """Plays the shell: answers instructions in random order and makes up what jobs do."""

    def __init__(self, name: str, source: random.Random) -> None:
        self.random = source
        self.name = name
        self.scheduler = Scheduler(CAPACITY, policy(name))
        self.counted: Counter[str] = Counter()
        self.tokens: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.ready: set[str] = set()
        self.must_leave: set[str] = set()
        #: How many who came later were admitted before it.
        self.waiting: dict[str, int] = {}
        #: By ready job: turns that its lane gave to each other since.
        self.turns: dict[str, Counter[str]] = {}
        self.added = 0

    def tell(self, event: Event) -> None:
        self.counted[type(event).__name__] += 1
        for told in self.scheduler.handle(event):
            self.counted[type(told).__name__] += 1
            match told:
                case Admit(job, _, token):
                    assert token > self.tokens.get(job, 0)
                    self.tokens[job] = token
                    del self.waiting[job]
                    self._passed(job)
                case Run(job, lane):
                    assert job in self.ready and job not in self.must_leave
                    assert lane not in self.running.values(), "two iterations in one lane"
                    self.ready.remove(job)
                    self.running[job] = lane
                    self._turn(job, lane)
                case Pause(job):
                    self.must_leave.add(job)
                    self.ready.discard(job)
                    self.turns.pop(job, None)
                case Refuse(job, _):
                    self._drop(job)
                case Move(job, _):
                    assert job not in self.running
                    if job in self.turns:
                        self.turns[job].clear()
        self.check()

    def _passed(self, job: str) -> None:
        for other in self.waiting:
            if int(other[1:]) < int(job[1:]):
                self.waiting[other] += 1
                bound = self.scheduler.policy.patience if self.name in ("FIFO", "FAIR", "PACK") else None
                assert bound is None or self.waiting[other] <= bound, f"{other} is never let in"

    def _turn(self, job: str, lane: int) -> None:
        self.turns.pop(job, None)
        for other, counted in self.turns.items():
            if self.scheduler.table.places[other].lane == lane:
                counted[job] += 1
                most = {"FAIR": FAIR_TURNS, "PACK": 1}.get(self.name)
                assert most is None or counted[job] <= most, f"{other} starves: {counted}"

    def _drop(self, job: str) -> None:
        for books in (self.tokens, self.running, self.waiting, self.turns):
            books.pop(job, None)
        self.ready.discard(job)
        self.must_leave.discard(job)

    def check(self) -> None:
        places = self.scheduler.table.places
        lanes: dict[int, list] = {}
        for place in places.values():
            lanes.setdefault(place.lane, []).append(place.ephemeral)
        reserved = sum(place.persistent for place in places.values()) + sum(max(sizes) for sizes in lanes.values())
        assert reserved == self.scheduler.table.reserved <= CAPACITY, "2.1 is broken"
        assert set(places) == set(self.scheduler.jobs) - set(self.waiting)
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
        idle = sorted(set(self.scheduler.table.places) - set(self.running) - self.ready)
        may = ["add"] * (2 if len(self.scheduler.jobs) < 25 else 0)
        may += ["end"] * 6 * bool(self.running) + ["ready"] * 6 * bool(set(idle) - self.must_leave)
        may += ["leave"] * bool(self.scheduler.jobs) + ["paused"] * 4 * bool(self.must_leave & set(idle))
        may += ["need", "progress"] * bool(idle)
        what = self.random.choice(may)
        draw = self.random.choice
        if what == "add":
            self.added += 1
            job = f"j{self.added}"
            self.waiting[job] = 0
            need = self.need() if self.random.random() < 0.9 else None
            self.tell(JobAdded(job, need, draw((None, self.random.uniform(0, 100))), self.random.randint(0, 3)))
        elif what == "end":
            job = draw(sorted(self.running))
            del self.running[job]
            again = self.random.random() < 0.7
            if again and job not in self.must_leave:
                self.ready.add(job)
                self.turns[job] = Counter()
            self.tell(IterationEnded(job, self.random.uniform(SHORTEST, 10 * SHORTEST), again))
        elif what == "ready":
            job = draw(sorted(set(idle) - self.must_leave))
            self.ready.add(job)
            self.turns[job] = Counter()
            self.tell(Ready(job, self.tokens[job]))
        elif what == "leave":
            job = draw(sorted(self.scheduler.jobs))
            self._drop(job)
            self.tell(JobLeft(job))
        elif what == "paused":
            job = draw(sorted(self.must_leave & set(idle)))
            self.must_leave.remove(job)
            self.waiting[job] = 0
            self.tell(Paused(job))
        elif what == "need":
            self.tell(NeedFound(draw(idle), self.need()))
        else:
            self.tell(Progress(draw(idle), self.random.uniform(0, 100), self.random.randint(0, 3)))

    def drain(self) -> None:
        """No more come, and every job leaves after one iteration: so every one of them must get it."""
        for _ in range(100 * (len(self.scheduler.jobs) + 1)):
            places = self.scheduler.table.places
            if self.running:
                job = min(self.running)
                del self.running[job]
                self.tell(IterationEnded(job, SHORTEST))
                if job not in self.must_leave:
                    self._drop(job)
                    self.tell(JobLeft(job))
            elif self.must_leave:
                job = min(self.must_leave)
                self.must_leave.remove(job)
                self.waiting[job] = 0
                self.tell(Paused(job))
            elif places:
                job = min(set(places) - self.ready)
                self.ready.add(job)
                self.tell(Ready(job, self.tokens[job]))
            else:
                break
        assert not self.scheduler.jobs, f"never admitted: {self.scheduler.waiting}"


def run(name: str, events: int, source: random.Random) -> Counter[str]:
    """One storm of so many events, then everything drains. Returns how many of each there were."""
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

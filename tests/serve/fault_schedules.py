"""Seeded schedules of faults over the real scheduler, with frontends and backends on a virtual clock.

``python -m tests.serve.fault_schedules --seeds 10000`` runs that many schedules; ``--seed N`` runs one of them again
and prints what happens; ``--json`` prints the sums as one JSON object. In a schedule, GPUs join, leave, die, fall
silent, take longer than was predicted, and have other models than before. Models come and go, their times vary for a
while, and messages take any time.

Checked:

- every request is answered or refused in the end, and its client is told once;
- the scheduler refuses no request that it does not hold, and its books are right after every event;
- batches are sent under the newest token of their GPU, and a backend gets each plan of a token once and in order;
- no batch is sent to a GPU that was said to be taken away, or that does not hold the batch's model;
- a model that was removed is gone when its last request is answered or refused, and that is said once;
- where no time is wrong (no GPU is slow or silent), every answer is in time;
- every refusal comes by the request's deadline. It may come later only by the time that the loss of a GPU is not
  noticed, and where times are wrong, by the patience with a GPU that overruns.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from benchmarks.orloj_profiles import BatchMap, VaryingProfile, point
from benchmarks.rival_servers.fifo import Fifo
from benchmarks.serve_arrivals import arrivals
from symphony_serve.batching import BatchFormer
from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.window import Window
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.gpu_table import PATIENCE
from symphony_serve.messages import (
    SAME_MOMENT_S,
    BatchDone,
    BatchTook,
    Cancelled,
    Dispatch,
    Event,
    GpuHolds,
    GpuJoined,
    GpuLeaving,
    GpuLost,
    Instruction,
    ModelAdded,
    ModelGone,
    ModelRemoved,
    Refuse,
    Request,
    RequestArrived,
    Suspect,
    WakeAt,
)
from symphony_serve.model_side import DEFERRED, EAGER, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.seen_times import RECENT
from tests.serve.driving import Driver
from tests.serve.invariants import unanswered

#: Virtual seconds in which requests come and faults happen. Judgement: some hundred batches.
LENGTH_S = 150.0
#: The SLO of the models, s; a batch of b takes b + 5 s (the model of figure 4).
SLO_S = 14.0
MAX_BATCH = 8
#: The longest that a message takes, s, in a schedule with delays; it is also what the scheduler allows for.
LATE_S = 0.3
#: How long a dead GPU needs to come back, and until the scheduler is told, s at most.
RESTART_S, DETECTION_S = 4.0, 3.0


def orloj(profile: Profile, slo: float, delays: Delays) -> BatchFormer:
    """The former for times that vary, here with requests that all take one second alone and so do not vary."""
    by_size = {size: (profile.seconds(size) - 1.0, 1.0) for size in range(1, profile.max_batch + 1)}
    return Orloj([VaryingProfile(BatchMap(by_size), {"": point(1.0)})], delays)


class Violation(AssertionError):
    """An invariant does not hold. The message says which one, when, and how to repeat the schedule."""


@dataclass
class Backend:
    """One GPU's process. token: its newest. plan: the last one that it got under this token.

    running: whether a batch runs. waiting: batches behind it. leaves: whether the GPU is taken away. life: grows when
    the process dies. models: those that it holds; None: all.
    """

    gpu: int
    alive: bool = False
    token: int = 0
    plan: int = -1
    running: bool = False
    silent_until: float = 0.0
    waiting: list[Dispatch] = field(default_factory=list)
    leaves: bool = False
    life: int = 0
    models: frozenset[str] | None = None


class World(Driver):
    """One schedule. log: is told each event in words."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None):
        self.seed = seed
        self._rng = rng = random.Random(seed)
        self._log = log
        self._delays = rng.choice([NO_DELAYS, Delays(LATE_S)])
        policy = rng.choice([DEFERRED, EAGER])
        profile = Profile.linear(1.0, 5.0, MAX_BATCH)
        self._models = {
            name: Model(name, profile, SLO_S, rng.choice([Fifo, Window, orloj, Batching.AUTO]), policy, self._delays)
            for name in "abc"[: rng.randint(1, 3)]
        }
        #: By name, of the models that were removed, whether that they are gone was said.
        self._removed: dict[str, bool] = {}
        #: Whether GPUs fall silent, or take longer than was predicted.
        self._wrong_times = rng.random() < 0.6
        super().__init__(Scheduler(self._models.values()))
        #: Requests that the scheduler held before the event, and the one that it brings.
        self._held = set[int]()
        #: Seconds by which a refusal may come after the deadline because a GPU overruns: its batch was to end in time.
        self._patience = 0.0
        #: (begin, end) of the times in which the scheduler did not know that a GPU was lost.
        self._outages: list[tuple[float, float]] = []
        self._backends = [Backend(gpu) for gpu in range(rng.randint(1, 5))]
        #: By id: requests whose client was not told, and those that were told what.
        self._asked: dict[int, Request] = {}
        self._told: dict[int, str] = {}
        #: How many requests came beside those that come at the load's rate.
        self._extra = 0

    def play(self) -> dict[int, str]:
        """Run the schedule. Returns the outcome of each request; raises Violation if an invariant does not hold."""
        names = list(self._models)
        rate = self._rng.choice([0.1, 0.3, 0.6]) * len(self._backends) / len(names)
        shape = self._rng.choice([1.0, 0.2])
        for request in arrivals(dict.fromkeys(names, rate), dict.fromkeys(names, SLO_S), self.seed, shape):
            if request.arrival > LENGTH_S:
                break
            asked = replace(request, source=self._rng.choice(["", "x", "y"]))
            self.at(request.arrival, lambda asked=asked: self._ask(asked))  # type: ignore[misc]
        for backend in self._backends:
            self.at(0.0, lambda backend=backend: self._join(backend))  # type: ignore[misc]
        for _ in range(self._rng.randint(0, 12)):
            self.at(self._rng.uniform(0.0, LENGTH_S), self._rng.choice(self._faults()))
        self.run()
        self._require(not self._asked, f"requests {sorted(self._asked)[:5]} are neither answered nor refused")
        self._require(all(self._removed.values()), f"of {self._removed} some are not gone")
        return self._told

    def _faults(self) -> list[Callable[[], None]]:
        wrong = [self._fall_silent, self._vary] if self._wrong_times else []
        return [self._lose_gpu, self._leave, self._cancel, self._hold, self._add_or_remove, *wrong]

    def _travel(self) -> float:
        return self._rng.uniform(0.0, LATE_S) if self._delays.response else 0.0

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            raise Violation(f"{text} at {self.now:.3f} s; python -m tests.serve.fault_schedules --seed {self.seed}")

    # The frontends.

    def _ask(self, request: Request) -> None:
        self._asked[request.id] = request
        self.tell(RequestArrived(request))

    def _outcome(self, request: Request, what: str) -> None:
        if self._asked.pop(request.id, None) is not None:
            self._told[request.id] = what
            if what == "answered" and not self._wrong_times:
                self._require(
                    self.now <= request.deadline + SAME_MOMENT_S, f"request {request.id} is answered too late"
                )
            if what != "answered":
                latest = self._latest_refusal(request)
                self._require(
                    self.now <= latest + SAME_MOMENT_S,
                    f"request {request.id} is refused too late, after {latest:.3f} s,",
                )

    def _latest_refusal(self, request: Request) -> float:
        """The moment by which the request is to be refused, if it is not answered."""
        latest = request.deadline + self._patience
        for begin, end in sorted(self._outages):
            if begin <= latest:
                latest = max(latest, end)
        return latest

    # The scheduler.

    def tell(self, event: Event) -> None:
        if self._log:
            self._log(f"{self.now:8.3f}  {event}")
        self._held = {*unanswered(self.scheduler), *([event.request.id] if isinstance(event, RequestArrived) else ())}
        try:
            super().tell(event)
        except AssertionError as error:
            raise Violation(f"{error} at {self.now:.3f} s, seed {self.seed}") from error

    def _carry_out(self, instruction: Instruction) -> None:
        if self._log:
            self._log(f"{'':10}-> {instruction}")
        if isinstance(instruction, WakeAt):
            super()._carry_out(instruction)
        elif isinstance(instruction, Refuse):
            self._require(instruction.request.id in self._held, f"request {instruction.request.id} is refused twice")
            self._held.remove(instruction.request.id)
            self._outcome(instruction.request, instruction.reason.name)
        elif isinstance(instruction, Dispatch):
            backend = self._backends[instruction.gpu]
            newest = instruction.token == backend.token
            self._require(newest, f"GPU {backend.gpu} is sent token {instruction.token}, not {backend.token}")
            self._require(not backend.leaves, f"GPU {backend.gpu} leaves")
            has = backend.models is None or instruction.model in backend.models
            self._require(has, f"GPU {backend.gpu} does not hold {instruction.model}")
            if self._wrong_times:
                suspect = PATIENCE * max(instruction.seconds, instruction.longest)
                self._patience = max(self._patience, suspect - instruction.seconds)
            travel, life = self._travel(), backend.life
            self.at(self.now + travel, lambda: self._deliver(backend, instruction, life))
        elif isinstance(instruction, ModelGone):
            self._require(self._removed.get(instruction.model) is False, f"model {instruction.model} is gone")
            self._removed[instruction.model] = True
        elif isinstance(instruction, Suspect):
            backend = self._backends[instruction.gpu]
            self.at(self.now, lambda: self.tell(GpuLost(instruction.gpu)))
            self.at(self.now + 1.0, lambda: self._restart(backend))

    # The backends.

    def _join(self, backend: Backend) -> None:
        """A backend that was dead tells the scheduler that it can be used, under a new token."""
        if backend.alive:
            return
        backend.alive = True
        backend.token += 1
        backend.plan = -1
        backend.waiting.clear()
        self.tell(GpuLost(backend.gpu))  # If that was not said yet.
        self.tell(GpuJoined(backend.gpu, backend.token, backend.models))
        if backend.leaves:
            self.tell(GpuLeaving(backend.gpu))

    def _deliver(self, backend: Backend, batch: Dispatch, life: int) -> None:
        if not backend.alive or backend.life != life or batch.token < backend.token:
            return  # Nobody is there, or the token is an older one.
        self._require(batch.plan == backend.plan + 1, f"GPU {backend.gpu} gets plan {batch.plan} after {backend.plan}")
        backend.plan = batch.plan
        backend.waiting.append(batch)
        self._work(backend)

    def _work(self, backend: Backend) -> None:
        """Run the next batch of those that wait."""
        if backend.running or not backend.waiting or not backend.alive:
            return
        batch, life = backend.waiting.pop(0), backend.life
        stretch = self._rng.choice([1.0, 1.0, 0.5, 1.3, 5.0]) if self._wrong_times else 1.0
        begin = max(self.now, batch.start) if self._delays.response else self.now
        backend.running = True
        seconds = stretch * batch.seconds
        self.at(begin + seconds, lambda: self._finish(backend, batch, seconds, life))

    def _finish(self, backend: Backend, batch: Dispatch, seconds: float, life: int) -> None:
        if backend.life != life:
            return
        if backend.silent_until > self.now:
            if backend.silent_until < math.inf:
                self.at(backend.silent_until, lambda: self._finish(backend, batch, seconds, life))
            return
        backend.running = False
        for request in batch.requests:
            self._outcome(request, "answered")
        self.at(self.now + self._travel(), lambda: self.tell(BatchDone(batch.gpu, batch.token, batch.plan)))
        if self._models[batch.model].batching is Batching.AUTO:
            self.tell(BatchTook(batch.model, batch.requests, seconds))
        self._work(backend)

    def _restart(self, backend: Backend) -> None:
        """Kill the process, if there is one, and start another."""
        self._kill(backend)
        self.at(self.now + self._rng.uniform(0.0, RESTART_S), lambda: self._join(backend))

    def _kill(self, backend: Backend) -> None:
        backend.alive = backend.running = False
        backend.silent_until = 0.0
        backend.leaves = False
        backend.waiting.clear()
        backend.life += 1

    # The faults.

    def _lose_gpu(self) -> None:
        backend = self._rng.choice(self._backends)
        self._kill(backend)
        token = backend.token
        detected = self.now + self._rng.uniform(0.0, DETECTION_S)
        self._outages.append((self.now, detected))
        self.at(detected, lambda: self.tell(GpuLost(backend.gpu)) if backend.token == token else None)
        self.at(detected + self._rng.uniform(0.0, RESTART_S), lambda: self._join(backend))

    def _leave(self) -> None:
        backend = self._rng.choice(self._backends)
        at, token = self.now + self._rng.uniform(0.0, 20.0), backend.token
        self.tell(GpuLeaving(backend.gpu))
        backend.leaves = True

        def gone() -> None:
            if backend.token == token and backend.alive:
                self._kill(backend)
                self.tell(GpuLost(backend.gpu))
                self.at(self.now + RESTART_S, lambda: self._join(backend))

        self.at(at + SAME_MOMENT_S, gone)

    def _cancel(self) -> None:
        if self._asked:
            request = self._rng.choice(sorted(self._asked.values(), key=lambda one: one.id))
            self.tell(Cancelled(request.model, request.id))

    def _hold(self) -> None:
        """A GPU has other models from now on."""
        backend = self._rng.choice(self._backends)
        some = self._rng.sample(list(self._models), self._rng.randint(0, len(self._models)))
        backend.models = self._rng.choice([None, frozenset(some)])
        self.tell(GpuHolds(backend.gpu, backend.models))

    def _add_or_remove(self) -> None:
        """A model takes no request any more, or one that is gone comes again."""
        name = self._rng.choice(list(self._models))
        if name not in self._removed:
            self._removed[name] = False
            self.tell(ModelRemoved(name))
        elif self._removed[name]:
            del self._removed[name]
            self.tell(ModelAdded(self._models[name]))

    def _vary(self) -> None:
        """Many batches have varied, or not, so that the former of a model may be another one: with all that waits."""
        name, varies = self._rng.choice(list(self._models)), self._rng.random() < 0.5
        model = self._models[name]
        if model.batching is not Batching.AUTO or name in self._removed:
            return
        for _ in range(self._rng.randint(0, 12)):
            self._extra += 1
            self._ask(Request(-10 * self._extra, name, self.now, self.now + SLO_S, self._rng.choice(["", "x", "y"])))
        for number in range(3 * RECENT):
            some = tuple(Request(-1 - place, name, 0.0, 1.0) for place in range(1 + number % 2))
            self.tell(BatchTook(name, some, model.profile.seconds(len(some)) * (1 + number % 7 if varies else 1)))
        self._require(not varies or self.scheduler.batching(name) is Batching.ORLOJ, f"{name} has not changed over")

    def _fall_silent(self) -> None:
        silence = self._rng.choice([self._rng.uniform(1.0, 60.0), math.inf])
        self._rng.choice(self._backends).silent_until = self.now + silence


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Seeded faults over the scheduler of serving.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules (1000)")
    parser.add_argument("--seed", type=int, help="run this one only, and print what happens")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a line of text")
    given = parser.parse_args()
    if given.seed is not None:
        World(given.seed, print).play()
        return
    became: Counter[str] = Counter()
    for seed in range(given.seeds):
        became.update(World(seed).play().values())
    total = sum(became.values())
    if given.json:
        sums = {"schedules": given.seeds, "requests": total, "became": dict(sorted(became.items())), "violations": 0}
        print(json.dumps({"benchmark": "serve_faults", "kind": "twin", **sums}))
    else:
        said = f"{given.seeds} schedules, {total} requests, {became['answered']} answered, the others refused"
        print(f"{said}; nothing violated")


if __name__ == "__main__":
    main()

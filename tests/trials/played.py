"""Plays a job without Ray: Tune, devices and workers are stand-ins; the manager, the trial machines and the engine are
real.

A `Play` draws from its seed what happens next: a worker answers, Tune asks, a process dies, a device goes. Every worker
keeps what a real one would know, so that each answer is one that a real worker could give. The play checks that Tune
hears every iteration of a trial once and in order, that no process hosts two trials, and that all trials end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from ray.exceptions import RayActorError
from ray.tune.trainable import FunctionTrainable

import fluidtune.tune
from benchmarks.stand_in_tune import standing_alone
from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.cluster.hosting.messages import Footprint, IterationReply, WorkerInfo
from fluidtune.cluster.new_processes import PooledWorker, Use
from fluidtune.cluster.sharing.lanes import Eviction
from fluidtune.group_facts import GroupFacts
from fluidtune.ray_compat.controller import TrackedActor
from fluidtune.ray_compat.trainable import RESULT_DUPLICATE, TRAINING_ITERATION, TRIAL_INFO
from fluidtune.report import EventLog
from fluidtune.tune import result_logs
from fluidtune.tune.device_setup import DeviceSetup
from tests.engine.invariants import check_engine
from tests.trials.life_invariants import check_life
from tests.tune.trainables import Stepper
from tests.tune.tried_manager import Devices, Pool, tunes_trial

#: The kinds of trials, by what their code does; `Play` draws one for each job or one for each trial.
KINDS = ("plain", "saving", "class", "elastic", "elastic")
#: What may go wrong, or change from outside, as often as it stands here.
FAULTS = ("kill", "kill", "member", "member", "member", "lose", "leave", "gain", "late", "tune", "budget") + (
    "follower",
) * 3
#: A schedule ends with an error if it takes more steps than this.
MOST_STEPS = 20_000


class PlayFailed(AssertionError):
    """The driver has lost something, done something twice, or stands still. The message has the play's last lines."""


@dataclass(eq=False)
class Future:
    """A call of a worker's method that is not answered."""

    worker: PlayedWorker
    method: str
    args: tuple[Any, ...]


@dataclass(eq=False)
class PlayedWorker:
    """A process: what it hosts, and with whom it is in a group."""

    play: Play
    name: str
    device: int
    alive: bool = True
    #: The trial that it hosts, and as what.
    trial: PlayedTrial | None = None
    role: str = ""
    #: Iterations that it counts as reported.
    reported: int = 0
    #: Of a leader: those that are attached to it, what has changed of them in this iteration, and why growth is over.
    group: list[PlayedWorker] = field(default_factory=list)
    changed: bool = False
    ungrowable: str | None = None
    #: It is reached from its own node only, and it may have followers.
    one_node: bool = False
    may_grow: bool = False
    #: How many devices its trial had when it was loaded.
    devices: int = 1
    #: Of a follower: how its part ended; "" while it goes on.
    over: str = ""
    #: Its leader, once it is attached.
    leads: PlayedWorker | None = None

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *args: self.play.called(self, method, args))


@dataclass(eq=False)
class PlayedTrial:
    """Tune's trial, and what Tune does with it."""

    name: str
    kind: str
    share: float
    budget: int
    #: Its ``training_iteration`` is this many times its count.
    factor: int
    #: The name of its trainable: trials of one name are taken to be of one kind.
    named: str = ""
    #: It calls modules with parameters.
    grows: bool = False
    #: How many devices it needs with the workers of Ray Train that it starts; 0: it starts none.
    gang: int = 0
    #: Tune's object of it.
    tune: Any = None
    tracked: Any = None
    #: Tune waits for: "" nothing, "start", "train", "save", "restore", "stop".
    waits: str = ""
    #: Iterations that Tune has heard of since the trial's beginning or its last failure.
    heard: int = 0
    failures: int = 0
    #: It was asked for a checkpoint in order to pause.
    pausing: bool = False
    over: bool = False

    @property
    def true_kind(self) -> str:
        return {"class": "checkpointing", "saving": "checkpointing", "plain": "plain"}.get(self.kind, "elastic")


class PlayedDevices(Devices):
    """Devices that come and go."""

    urgent = True  # type: ignore[assignment]

    def __init__(self, nodes: dict[int, str]) -> None:
        super().__init__(dict(nodes))
        self.leave: list[int] = []
        self.next = len(nodes)

    def leaving(self) -> list[int]:
        leave, self.leave = self.leave, []
        return [device for device in leave if device in self.nodes]

    def gain(self) -> None:
        device, self.next = self.next, self.next + 1
        self._nodes[device] = self.came[device] = f"node{device % 2}"

    def give_up(self, device: int, why: str) -> bool:
        if len(self.nodes) < 2 or device not in self.nodes:
            return False
        self.lose(device)
        return True


class PlayedPool(Pool):
    """The pool: at most ``most`` processes of a device, each of which serves again."""

    def __init__(self, play: Play) -> None:
        super().__init__()
        self._play = play
        self.idle: dict[int, list[PooledWorker]] = {}
        self.made = 0
        self.forks = True

    def stop_forking(self, why: str) -> None:
        self.forks = False

    def can_serve(self, device: int, others: tuple[int, ...]) -> bool:
        there = [each for each in self.workers.values() if each.device == device and each.use is not Use.WAITING]
        return bool(self.idle.get(device)) or len(there) < self._play.most_workers

    def take_idle_worker(self, device: int, others: tuple[int, ...]) -> PooledWorker | None:
        if not self.idle.get(device):
            return None
        worker = self.idle[device].pop()
        worker.take()
        return worker

    def start_worker(self, device: int, others: tuple[int, ...]) -> PooledWorker:
        self.made += 1
        name = f"w{self.made}"
        worker = self.workers[name] = PooledWorker(name, device, PlayedWorker(self._play, name, device), 0.0)
        return worker

    def go_on(self, worker: PooledWorker, device: int, may_move: bool) -> bool:
        nodes = self._play.devices.nodes
        if device != worker.device and not (may_move and nodes.get(device) == nodes.get(worker.device)):
            return False
        worker.device = device
        worker.take()
        return True

    def has_worker(self, device: int) -> bool:
        return any(device in (worker.device, worker.home) for worker in self.workers.values())

    def has_busy_worker(self, device: int) -> bool:
        return any(device in (worker.device, worker.home) and worker.busy for worker in self.workers.values())

    def return_worker(self, worker: PooledWorker) -> None:
        self._play.note("returned", worker.name)
        worker.free()
        self.idle.setdefault(worker.device, []).append(worker)

    def forget_worker(self, worker: PooledWorker) -> None:
        super().forget_worker(worker)
        if worker in self.idle.get(worker.device, []):
            self.idle[worker.device].remove(worker)

    def discard_worker(self, worker: PooledWorker) -> None:
        self._play.note("discarded", worker.name)
        super().discard_worker(worker)
        self._play.kill(worker.actor)

    def discard_idle_workers(self, device: int) -> None:
        for worker in list(self.idle.get(device, [])):
            self.discard_worker(worker)

    def discard_all_idle_workers(self) -> None:
        for device in list(self.idle):
            self.discard_idle_workers(device)


class Function(FunctionTrainable):
    """A trainable without checkpoints of its own."""


class Play:
    """One job. ``rng`` decides everything; ``faults``: how many of a thousand steps are faults."""

    def __init__(self, rng: random.Random, faults: int) -> None:
        self.rng, self.faults = rng, faults
        self.now = 1000.0
        self.lines: list[str] = []
        self.futures: list[Future] = []
        self.calm = self.answers = False
        self.told_to_leave: list[int] = []
        self.ahead = 0
        one = rng.choice([*KINDS, None])
        grows = rng.random() < 0.6
        devices = rng.choice([2, 3, 4, 6] if grows else [1, 2, 2, 3, 4])
        nodes = {device: f"node{device % rng.choice([1, 1, 2])}" for device in range(devices)}
        self.devices = PlayedDevices(nodes)
        self.pool = PlayedPool(self)
        packing = rng.choice([1, 1, 2, 4])
        self.most_workers = max(packing, rng.choice([1, 1, 2, 8]))
        lanes = rng.choice([None, None, None, "FAIR"]) if packing > 1 else None
        kind = rng.choice(["gpu", "gpu", "cpu"])
        name = "GPU" if kind == "gpu" else "CPU"
        found = Layout(kind, devices, {name: 1.0}, 1 / packing, packing, {name: 1.0})
        limit = rng.choice([None, packing])
        self.setup = DeviceSetup("job", found, limit, packing, None, lanes, None, None, one_node=rng.random() < 0.5)
        self.resource = name
        self.trials: dict[str, PlayedTrial] = {}
        several = not grows and devices > 1
        for number in range(rng.choice([1, 1, 2, 3] if grows else [1, 2, 3, 5])):
            share = rng.choice([1.0, 1.0, 1.0, 0.5, 2.0 if several else 1.0])
            kind, budget = one or rng.choice(KINDS), rng.choice([20, 40] if grows else [2, 5, 10, 20])
            trial = PlayedTrial(f"t{number}", kind, share, budget, rng.choice([1, 1, 1, 10]))
            trial.named, trial.grows = trial.kind, grows
            if grows and number and rng.random() < 0.2:
                trial.grows = False
            self.trials[trial.name] = trial
        if devices > 1 and rng.random() < 0.3:
            for trial in self.trials.values():
                if trial.kind in ("plain", "saving"):
                    trial.gang = rng.choice([0, 2, min(3, devices)])
        self.waits_for_checkpoints = rng.random() < 0.3
        self.manager: Any = None

    # --- what is written down

    def note(self, *what: Any) -> None:
        self.lines.append(" ".join(map(str, what)))

    def check(self, held: bool, why: str) -> None:
        if not held:
            raise PlayFailed(why + "\n" + "\n".join(self.lines[-60:]))

    # --- the manager in its stand-ins

    @contextmanager
    def stage(self, directory: Path) -> Iterator[None]:
        """The manager is there inside. ``directory``: nothing is written there."""
        clock = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now, sleep=lambda seconds: None)
        with ExitStack() as stack:
            for module in vars(fluidtune.tune).values():
                if isinstance(module, ModuleType) and hasattr(module, "time"):
                    stack.enter_context(patch.object(module, "time", clock))
            stack.enter_context(patch.object(result_logs, "upload", lambda trial: None))
            stack.enter_context(patch.object(EventLog, "open", lambda *args: None))
            self.manager = stack.enter_context(
                standing_alone(
                    directory,
                    self.devices,
                    lambda *args, **named: self.pool,
                    lambda trial, up_to: self.note("logs", trial.trial_id, up_to),
                    self.setup,
                )
            )
            self._listen()
            yield

    def _listen(self) -> None:
        job = self.manager.job
        job.scheduler.adapter.waits_for_checkpoints = self.waits_for_checkpoints
        job.log._clock = lambda: self.now
        job.log._report = SimpleNamespace(prepare=lambda: None, begin=lambda: None, wait=lambda: None)
        job.snapshots.trial_ended = lambda trial: None
        decide = job.decide

        def listened(events: list[Any]) -> list[Any]:
            for event in events:
                self.note("event", event)
            instructions = decide(events)
            check_engine(job.engine)
            for instruction in instructions:
                self.note("instruction", instruction)
            return instructions

        job.decide = listened
        job.keep_checkpoint = lambda trial, saved: self._keep(self.trials[trial.trial_id], saved)
        ahead = job.ask_ahead

        def listened_ahead(starting: int) -> None:
            if starting != self.ahead:
                self.ahead = starting
                self.note("ahead", starting)
            ahead(starting)

        job.ask_ahead = listened_ahead
        self.manager._calls.wait_for_one = lambda timeout: self._answer_one()

    # --- Tune

    def begin(self) -> None:
        """Tune makes its trials, and asks for the actors of all of them."""
        for trial in self.trials.values():
            cls = Stepper if trial.kind == "class" else Function
            trial.tune = tunes_trial(
                trial.name,
                {self.resource: trial.share},
                trainable_name=trial.named,
                get_trainable_cls=lambda cls=cls: cls,
                storage=SimpleNamespace(trial_fs_path=trial.name),
            )
            self.manager.note_trial(trial.tune)
            self.add(trial)

    def _keep(self, trial: PlayedTrial, saved: Any) -> None:
        known = trial.tune.latest_checkpoint_result
        self.check(known is None or known.count <= saved.count, f"{trial.name}: checkpoint {saved.count} came late")
        trial.tune.latest_checkpoint_result, trial.tune.checkpoint = saved, saved

    def add(self, trial: PlayedTrial) -> None:
        """Tune asks for the trial's actor."""
        self.note("tune adds", trial.name)
        trial.tune.status, trial.waits, trial.pausing = "RUNNING", "start", False
        trial.tracked = self.manager.add_actor(
            None,
            {"config": {TRIAL_INFO: trial.tune}},
            None,
            on_start=lambda tracked: self._started(trial),
            on_stop=lambda tracked: self.note("tune: stopped", trial.name),
            on_error=lambda tracked, error: self._failed(trial, error),
        )

    def _ask(self, trial: PlayedTrial, method: str, *args: Any) -> None:
        trial.waits = method
        tracked = trial.tracked

        def on_result(_: TrackedActor, value: Any) -> None:
            self.check(trial.tracked is tracked and trial.waits == method, f"{trial.name}: {method} answered twice")
            getattr(self, f"_on_{method}")(trial, value)

        def on_error(_: TrackedActor, error: Exception) -> None:
            if trial.tracked is tracked:  # else Tune has heard that the actor failed
                self._failed(trial, error)

        how = {"on_result": on_result, "on_error": on_error, "_return_future": self.waits_for_checkpoints}
        future = self.manager.schedule_actor_task(trial.tracked, method, args, **how)
        self.note("tune asks", trial.name, method, "" if future is None else "with a future")

    def _started(self, trial: PlayedTrial) -> None:
        self.check(trial.waits == "start", f"{trial.name} was started twice")
        self.note("tune: started", trial.name)
        if trial.tune.latest_checkpoint_result is not None:
            self._ask(trial, "restore", trial.tune.latest_checkpoint_result)
        else:
            self._ask(trial, "train")

    def _on_restore(self, trial: PlayedTrial, value: Any) -> None:
        self._ask(trial, "train")

    def _on_train(self, trial: PlayedTrial, result: dict[str, Any]) -> None:
        self.note("tune hears", trial.name, result)
        if RESULT_DUPLICATE in result:
            self._stop(trial, "TERMINATED")
            return
        trial.heard += 1
        count = result["count"]
        self.check(count == trial.heard, f"{trial.name}: {count} instead of {trial.heard} was heard")
        trial.tune.last_result = result
        if trial.heard >= trial.budget and self.rng.random() < 0.9:
            self._stop(trial, "TERMINATED")
        elif result["saved"]:
            self._ask(trial, "save")
        elif self.rng.random() < 0.05:
            self._pause(trial)
        else:
            self._ask(trial, "train")

    def _on_save(self, trial: PlayedTrial, value: Any) -> None:
        self._keep(trial, value)
        if trial.pausing:
            self._stop(trial, "PAUSED")
        else:
            self._ask(trial, "train")

    def _pause(self, trial: PlayedTrial) -> None:
        if trial.kind in ("saving", "class"):
            trial.pausing = True
            self._ask(trial, "save")
        else:
            self._stop(trial, "PAUSED")

    def _stop(self, trial: PlayedTrial, status: str) -> None:
        self.note("tune stops", trial.name, status)
        trial.tune.status, trial.waits = status, "stop"
        tracked, trial.tracked = trial.tracked, None
        self.manager.clear_actor_task_futures(tracked)
        tracked.set_on_start(None)
        tracked.set_on_error(None)
        self.manager.schedule_actor_task(tracked, "stop")
        self.manager.remove_actor(tracked)
        trial.over = status in ("TERMINATED", "ERROR")
        if status == "PAUSED" and self.rng.random() < 0.3:
            self.add(trial)

    def _failed(self, trial: PlayedTrial, error: Exception) -> None:
        self.note("tune: failed", trial.name, error)
        self.check(trial.tracked is not None, f"{trial.name} failed after its end")
        retry = self.rng.random() < 0.5 and trial.failures < 3
        self._stop(trial, "ERROR")
        if retry:
            trial.failures += 1
            trial.tune.num_failures += 1
            trial.over = False
            checkpoint = trial.tune.latest_checkpoint_result
            trial.heard = checkpoint.count if checkpoint else 0
            trial.tune.status = "PENDING"
            if self.rng.random() < 0.5:
                self.add(trial)

    # --- workers

    def called(self, worker: PlayedWorker, method: str, args: tuple[Any, ...]) -> Future:
        self.note("call", worker.name, method, *map(_plain, args))
        future = Future(worker, method, args)
        if not worker.alive:
            self.futures.append(future)
            return future
        if method == "load":
            self.check(worker.trial is None, f"{worker.name} hosts two trials")
            worker.trial, worker.role = self.trials[args[1].trial], "leader"
            worker.reported = 0 if args[1].repeats else args[1].delivered
            worker.group, worker.changed, worker.ungrowable = [], False, None
            room = args[1].train
            worker.devices = worker.trial.gang if room is None else room.devices
        elif method == "attach":
            self.check(worker.trial is None, f"{worker.name} hosts two trials")
            self.check(args[0].address is not None, f"{worker.name} does not know where its leader is")
            worker.trial, worker.role = self.trials[args[0].trial], "follower"
            worker.over, worker.leads = "", None
        if method in ("train", "save", "restore"):
            self.check(worker.role == "leader", f"{worker.name} leads no trial: {method}")
            busy = [one for one in self.futures if one.worker is worker and one.method in ("train", "save", "restore")]
            self.check(not busy, f"{worker.name} is asked for two things at once")
        self.futures.append(future)
        return future

    def kill(self, worker: PlayedWorker) -> None:
        """The process dies; the calls under way end with it."""
        if not worker.alive:
            return
        worker.alive = False
        self.note("died", worker.name)
        self._left(worker)

    def _left(self, worker: PlayedWorker) -> None:
        """The worker hosts nothing any more: what follows for its leader and its followers."""
        for follower in worker.group:
            follower.over = follower.over or "over"
        worker.group = []
        leader = worker.leads
        if leader is not None and worker in leader.group:
            leader.group.remove(worker)
            leader.changed = True
        worker.trial, worker.role, worker.leads = None, "", None

    def _can_answer(self, future: Future) -> bool:
        worker = future.worker
        if not worker.alive or future.method in ("train", "info"):
            return True
        first = next(one for one in self.futures if one.worker is worker)
        return first is future and (future.method != "follow" or bool(worker.over) or worker.leads is None)

    def answer(self, future: Future) -> None:
        """Give the call an answer that the worker could give now."""
        worker = future.worker
        self.futures.remove(future)
        if worker.alive:
            value = getattr(self, f"_answer_{future.method}")(worker, *future.args)
        else:
            value = RayActorError()
        handler = self.manager._calls._handlers.pop(future, None)
        self.note("answer", worker.name, future.method, _plain(value), "" if handler else "(unheard)")
        if handler is not None:
            handler(value)
            if future.method in ("train", "save", "restore") and self._chance(20):
                handler(value)  # it comes twice

    def _chance(self, thousandths: float) -> bool:
        return not self.calm and self.rng.random() < thousandths / 1000 * self.faults / 20

    def _answer_info(self, worker: PlayedWorker) -> Any:
        broken = "its GPU is lost" if self._chance(10) else None
        forked = self.pool.forks
        return WorkerInfo(int(worker.name[1:]), [str(worker.device)], broken=broken, forked=forked)

    def _answer_load(self, worker: PlayedWorker, ref: Any, spec: Any) -> Any:
        worker.one_node, worker.may_grow = spec.one_node, spec.may_grow
        value: Any = self._facts(worker)
        if self._chance(40):
            value = self.rng.choice(
                [
                    Eviction("no room", (0.4, 0.1)),
                    Eviction("its GPU is lost", broken=0),
                    ValueError("its code"),
                    RuntimeError(f"{NeedsPlainProcess.__module__}.{NeedsPlainProcess.__qualname__}: it reads X"),
                ]
            )
        return value

    def _answer_attach(self, worker: PlayedWorker, spec: Any) -> Any:
        if self._chance(60):
            return self.rng.choice(["it is refused", ValueError("its own")])
        found = [pooled.actor for pooled in self.pool.workers.values() if pooled.actor.name == spec.address]
        leaders = [one for one in found if one.alive and one.role == "leader" and one.trial is worker.trial]
        if not leaders or worker.trial is None:
            return "there is no leader"
        (leader,) = leaders
        node = {self.devices.nodes.get(one.device) for one in (leader, worker)} - {None}
        self.check(len(node) < 2 or not leader.one_node, f"{worker.name} cannot reach {leader.name}")
        leader.group.append(worker)
        leader.changed, worker.leads = True, leader
        return None

    def _answer_follow(self, worker: PlayedWorker) -> Any:
        over = worker.over
        if worker.role == "follower":
            self._left(worker)
        return {"its own": "ValueError('its own')", "broken": Eviction("its GPU is lost", broken=0)}.get(over)

    def _facts(self, worker: PlayedWorker) -> GroupFacts:
        assert worker.trial is not None
        if not worker.may_grow:
            return GroupFacts(is_elastic=worker.trial.kind == "elastic")
        return GroupFacts(
            is_elastic=worker.trial.kind == "elastic",
            address=worker.name,
            one_node=worker.one_node,
            calls_modules=worker.trial.grows and worker.reported > 0,
            width=0 if worker.changed else 1 + len(worker.group),
            ungrowable=worker.ungrowable,
        )

    def _answer_train(self, worker: PlayedWorker, ticket: Any = None, stored: int = 0) -> Any:
        trial = worker.trial
        if trial is None:
            return RuntimeError("the trial was unloaded")
        kind: Any = trial.true_kind
        if self._chance(15):
            return ValueError("its code")
        if trial.kind == "elastic" and self._chance(5):
            return IterationReply({}, kind, 0.0, anew="its counter differs")
        if worker.devices < trial.gang:
            return IterationReply({}, kind, 0.0, lack=Eviction("its workers", devices=trial.gang))
        if self._chance(15):
            if self.rng.random() < 0.1:
                return RuntimeError(f"{NeedsPlainProcess.__module__}.{NeedsPlainProcess.__qualname__}: it reads X")
            lack = self.rng.choice(
                [
                    Eviction("no room", (0.4, 0.1), between=True),
                    Eviction("no room", (0.5, 0.1)),
                    Eviction("no room"),
                    Eviction("its GPU is lost", broken=0),
                ]
            )
            return IterationReply({}, kind, 0.0, lack=lack)
        seconds = self.rng.choice([0.01, 1.0, 1.0, 4.0]) / (1 + len(worker.group))
        if worker.reported >= trial.budget + 1 and self.rng.random() < 0.5:
            return IterationReply({RESULT_DUPLICATE: True}, kind, 0.0, worker.reported)
        rewritten = []
        if trial.kind == "saving" and worker.reported and self.rng.random() < 0.05:
            rewritten = [_saved(trial, worker.reported)]  # the newest iteration that Tune has heard of ran again
        worker.reported += 1
        count = worker.reported
        saved = None
        if trial.kind == "saving" and self.rng.random() < 0.4:
            saved = _saved(trial, count)
        number = count * trial.factor
        reply = IterationReply(
            {TRAINING_ITERATION: number, "count": count, "score": 0.5, "saved": saved is not None},
            kind,
            seconds,
            count,
            memory=0.2,
            ephemeral=0.05,
            rewritten=rewritten,
        )
        reply.saved = None if self.waits_for_checkpoints else saved
        if self._chance(5):
            worker.ungrowable = "nothing of it can be divided"
        reply.facts, worker.changed = self._facts(worker), False
        return reply

    def _answer_save(self, worker: PlayedWorker) -> Any:
        if self._chance(10) or worker.trial is None:
            return ValueError("its save")
        return _saved(worker.trial, worker.reported)

    def _answer_restore(self, worker: PlayedWorker, checkpoint: Any, again: bool = False) -> Any:
        if self._chance(10) or worker.trial is None:
            return ValueError("its restore")
        worker.reported = max(worker.reported, checkpoint.count)
        return worker.reported

    def _answer_footprint(self, worker: PlayedWorker) -> Footprint:
        return Footprint(self.rng.choice([1, 1, 1, 10, 30]), 100)

    def _answer_unload(self, worker: PlayedWorker, keep: Any) -> Any:
        if worker.role:
            self._left(worker)
        return keep or self._chance(500)

    # --- what happens

    def act(self) -> None:
        """One thing happens."""
        draw = self.rng.random()
        if not self.calm and draw < self.faults / 1000:
            self.fault(self.rng.choice(FAULTS))
            return
        self.now += self.rng.choice([0.0, 0.01, 0.5, 2.0])
        self.step(answers=draw < 0.7)

    def step(self, answers: bool) -> None:
        """The manager does a step. ``answers``: one worker answers if the manager waits."""
        self.answers = answers
        self.manager.step(0.0)
        held = self.manager.job.engine.held_devices()
        for run in self.manager._runs.values():
            check_life(run.life)
            if run.life.place == "live" and run.id in held and not self.manager._events:
                known = set(run.life.crew.devices) <= set(held[run.id])
                self.check(known, f"{run.id} is on {run.life.crew.devices}, and holds {held[run.id]}")

    def _answer_one(self) -> None:
        """The manager waits for one answer."""
        answerable = [one for one in self.futures if self._can_answer(one)] if self.answers else []
        if answerable:
            self.answer(self.rng.choice(answerable))

    def fault(self, what: str) -> None:
        """Something goes wrong, or changes from outside: one of `FAULTS`."""
        living = [worker.actor for worker in self.pool.workers.values() if worker.actor.alive]
        if what == "kill" and living:
            self.kill(self.rng.choice(living))
        elif what == "member" and any(worker.role == "follower" for worker in living):
            self.kill(self.rng.choice([worker for worker in living if worker.role == "follower"]))
        elif what == "lose" and len(self.devices.nodes) > 1:
            device = self.rng.choice(list(self.devices.nodes))
            self.note("device lost", device)
            self.devices.lose(device)
            for worker in living:
                if worker.device == device:
                    self.kill(worker)
        elif what == "leave" and self.devices.nodes:
            device = self.rng.choice(list(self.devices.nodes))
            if self.manager.job.engine.has_device(device) and device not in self.told_to_leave:
                self.note("device leaves", device)
                self.devices.leave.append(device)
                self.told_to_leave.append(device)
        elif what == "gain" and len(self.devices.nodes) < 6:
            self.devices.gain()
        elif what == "late":
            self.now += 700.0
        elif what == "follower":
            attached = [one for one in living if one.role == "follower" and one.leads is not None and not one.over]
            if attached:
                one = self.rng.choice(attached)
                one.over = self.rng.choice(["over", "its own", "its own", "broken"])
                self.note("follower ends", one.name, one.over)
        elif what == "tune":
            self._tune_acts()
        elif what == "budget":
            trial = self.rng.choice(list(self.trials.values()))
            if trial.waits in ("train", "save"):
                self.note("budget", trial.name)
                self.manager.budget_changed(trial.name, self.rng.choice([None, 5.0, 50.0, 500.0]), "g")

    def _tune_acts(self) -> None:
        trial = self.rng.choice(list(self.trials.values()))
        if trial.tracked is None and not trial.over:
            self.add(trial)
        elif trial.tracked is not None:
            self._stop(trial, self.rng.choice(["PAUSED", "TERMINATED", "PAUSED"]))

    def finish(self) -> None:
        """No further fault happens: all trials come to their ends."""
        self.calm = True
        for device in [device for device in self.told_to_leave if device in self.devices.nodes]:
            self.devices.lose(device)
        most = max(1, *(max(int(trial.share), trial.gang) for trial in self.trials.values()))
        idle = 0
        for _ in range(MOST_STEPS):
            if max(Counter(self.devices.nodes.values()).values(), default=0) < most:
                self.devices.gain()
            for trial in self.trials.values():
                if trial.tracked is None and not trial.over:
                    self.add(trial)
            before = len(self.lines)
            self.act()
            idle = idle + 1 if len(self.lines) == before else 0
            if all(trial.over for trial in self.trials.values()) and not self.futures and not self.manager._callbacks:
                break
            if idle > 60:
                self.now += 700.0
            left = [trial.name for trial in self.trials.values() if not trial.over]
            self.check(idle < 200, f"it stands still; {left} are left")
        else:
            self.check(False, "it never ends")
        for _ in range(5):
            self.step(answers=False)
        engine = self.manager.job.engine
        self.check(engine.held_devices() == {}, f"devices are held at the end: {engine.held_devices()}")
        busy = [name for name, worker in self.pool.workers.items() if worker.busy]
        self.check(not busy, f"workers are busy at the end: {busy}")
        self.check(len(self.manager._runs) == 0, "trials are left at the end")


def _saved(trial: PlayedTrial, count: int) -> Any:
    metrics = {TRAINING_ITERATION: count * trial.factor}
    return SimpleNamespace(metrics=metrics, checkpoint=SimpleNamespace(path=f"{trial.name}/{count}"), count=count)


def _plain(value: Any) -> str:
    """A value in words that are the same in every run."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({str(value)[:80]})"
    if hasattr(value, "secret"):
        if hasattr(value, "address"):
            return f"{value.trial} {value.address}"
        kept = ("trial", "delivered", "repeats", "own_numbers", "one_node", "may_grow", "may_be_squeezed", "ticket")
        return " ".join(f"{name}={getattr(value, name)}" for name in kept)
    if isinstance(value, type):
        return value.__name__
    return repr(value)


def play(seed: int, directory: Path) -> list[str]:
    """Play the schedule of this seed to its end. Returns what happened, line by line.

    Raises:
        PlayFailed: the driver has lost something, done something twice, or stands still.
    """
    rng = random.Random(seed)
    faults = rng.choice([0, 10, 30, 60, 120])
    played = Play(rng, faults)
    with played.stage(directory):
        played.begin()
        for _ in range(rng.choice([50, 150, 400])):
            played.act()
        played.finish()
    return played.lines

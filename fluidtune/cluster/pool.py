"""The pool of workers: which process serves which trial.

A worker belongs to one device and serves one trial, unless the script reuses its actors. The next process of a device
may be started before a trial needs it, as a spare.

A process that is not wanted any more ends in order, as a trial's process does under stock Ray Tune: it leaves Ray at
once, so that the next process can start, and then runs its exit handlers. Only a process that does not come to that is
killed.

A process is started when it is first needed and never before. On one node no more processes start at a time than it
has cores: sixteen that start together on two cores are all ready after the time of eight starts in a row; two by two,
the first ones train while the last ones wait.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fluidtune.cluster.devices.device_source import DeviceSource
from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.forks.nodes import is_here
from fluidtune.cluster.new_processes import NewProcesses, PooledWorker, Use
from fluidtune.device_kinds import KINDS
from fluidtune.ray_compat.descent import end_made_by
from salus_share.mps import ANSWER_S, end_client

#: A worker that unloads its trial is waited for this long before another process is started, seconds.
UNLOAD_SOON_S = 1.0
#: Processes that may start at a time on a node that says it has fewer cores.
STARTS_AT_LEAST = 2
#: Seconds that processes may take to end when the job ends, before the others are killed or left to end by themselves.
#: ``_actor_force_cleanup_timeout`` of Ray's TuneController, which gives actors as long at the end of a run.
CLOSE_S = 10.0
#: Seconds that a process may take for its exit handlers where TUNE_FORCE_TRIAL_CLEANUP_S is not set: the default of
#: that variable in Ray's TuneController, which is how long it lets an actor clean up.
END_S = 600.0
#: Seconds that the end of the job waits until all have been killed. A daemon is asked twice, and a process that asks it
#: takes a few seconds to start.
KILLED_S = 3 * ANSWER_S


def cleanup_patience() -> float:
    """Seconds that a worker may take to clean up after a stopped trial, and to end: stock Tune's own limit."""
    return float(os.environ.get("TUNE_FORCE_TRIAL_CLEANUP_S", END_S))


class WorkerPool:
    """Workers by device. Callers name a device and get a worker; the pool chooses the process.

    One thing: a worker's life, from its start to its end, changes in one place.

    ``new``: starts its processes. ``spares``: the next process of a device is started while a trial runs there.
    ``divided``: a device's memory is divided among its trials, so that nothing starts there while a trial is unloaded.
    """

    def __init__(
        self,
        plan: Layout,
        devices: DeviceSource,
        new: NewProcesses,
        spares: bool = False,
        divided: bool = False,
    ):
        self._layout = plan
        self._devices = devices
        self._killing = Killing(devices)
        self._new = new
        self._spares = spares
        self._divided = divided
        #: Processes of this machine that were told to end and have served trials, which may have left exit handlers.
        self._ending: list[psutil.Process] = []
        #: Processes that were told to end and have not left Ray yet: the future of that -> the worker. Handles are
        #: kept so long, because Ray 2.44 kills an actor that nobody holds.
        self._leaving: dict[Any, PooledWorker] = {}
        #: Every living worker by name, and by device and name.
        self.workers: dict[str, PooledWorker] = {}
        self._on_device: defaultdict[int, dict[str, PooledWorker]] = defaultdict(dict)
        #: Those that serve another device than that in whose group they live, by name.
        self._away: dict[str, PooledWorker] = {}
        #: By node, how many of its processes may start at a time, and those that were starting at the last look.
        self._starts: dict[str, int] = {}
        self._starting: defaultdict[str, list[PooledWorker]] = defaultdict(list)

    def can_serve(self, device: int, others: tuple[int, ...] = ()) -> bool:
        """Whether the device has a worker now: one is idle, or there is room for one more process, which may start.

        A worker that still unloads a trial keeps its room. For a worker that sees ``others`` too the
        device must have no busy worker.
        """
        here = self._on_device[device].values()
        busy = sum(worker.busy for worker in here)
        if others:
            return busy == 0 and not self._is_crowded(device)
        # A worker that is about to be free is there sooner than a new process. What it holds is promised to the next.
        soon = any(worker.is_unloading(within=math.inf if self._divided else UNLOAD_SOON_S) for worker in here)
        if self._idle(device):
            return not (soon and self._divided)
        return (
            not soon
            and not self._new.is_nearly_ready(device)
            and busy < self._layout.packing
            and not self._is_crowded(device)
        )

    def _is_crowded(self, device: int) -> bool:
        """Whether the most processes that may start at a time on the device's node are starting."""
        node = self._devices.nodes.get(device)
        if node is None:
            return False  # the process that is started there fails, and its trial hears so
        if node not in self._starts:
            self._count_cores(node)
        starting = [worker for worker in self._starting[node] if worker.starting and self.is_alive(worker)]
        self._starting[node] = starting
        return len(starting) >= self._starts[node]

    def _count_cores(self, new: str) -> None:
        """Find out how many processes may start at a time on the node ``new``, and on all others that are not known."""
        cores = {each["NodeID"]: int(each["Resources"].get("CPU", 0)) for each in ray.nodes()}
        for node in {new, *self._devices.nodes.values()} - self._starts.keys():
            found = [count for identifier, count in cores.items() if identifier.startswith(node)]
            self._starts[node] = max([STARTS_AT_LEAST, *found])

    def take_idle_worker(self, device: int, others: tuple[int, ...] = ()) -> PooledWorker | None:
        """An idle worker of the device; None when there is none, or none that could see the GPUs of ``others`` too."""
        idle = self._idle(device)
        if not idle or self._must_see(others):
            return None
        ready = [worker for worker in idle if not worker.starting]
        chosen = (ready or idle)[-1]
        chosen.take()
        return chosen

    def _idle(self, device: int) -> list[PooledWorker]:
        """The idle workers of the device, in the order in which they were started."""
        return [worker for worker in self._on_device[device].values() if worker.use is Use.IDLE]

    def start_worker(self, device: int, others: tuple[int, ...] = ()) -> PooledWorker:
        """A new process on the device. The device must be one that `can_serve`.

        ``others``: devices whose GPUs it must see as well; none is one of `unknown_gpus`. CUDA reads the list of GPUs
        once, so such a worker is started for one trial, and the idle workers of the device are discarded.
        """
        visible = [self._new.gpus[d][1] for d in (device, *others)] if self._must_see(others) else None
        self.discard_idle_workers(device)
        return self._add_worker(self._new.start(device, visible, several=bool(others)))

    def go_on(self, worker: PooledWorker, device: int, may_move: bool) -> bool:
        """A worker that waits serves its trial again on this device, if that is its own one or, where it ``may_move``,
        another one of its node. Returns whether it does.
        """
        if device != worker.device:
            node = self._devices.nodes.get(worker.device)
            if not may_move or node is None or self._devices.nodes.get(device) != node:
                return False
            del self._on_device[worker.device][worker.name]
            worker.device = device
            self._on_device[device][worker.name] = self._away[worker.name] = worker
        worker.take()
        return True

    def _add_worker(self, worker: PooledWorker) -> PooledWorker:
        self.workers[worker.name] = self._on_device[worker.device][worker.name] = worker
        node = self._devices.nodes.get(worker.device)
        if node is not None:
            self._starting[node].append(worker)
        return worker

    def _must_see(self, others: tuple[int, ...]) -> bool:
        """Whether a worker must be told to see the GPUs of further devices: cores need no telling."""
        return bool(others) and KINDS[self._layout.kind].visible is not None

    def unknown_gpus(self, device: int, others: tuple[int, ...]) -> list[int]:
        """Those of the devices whose GPUs a worker has to see and whose ids are not known yet."""
        if not self._must_see(others):
            return []
        return [each for each in (device, *others) if self._new.is_unknown(each)]

    def note_gpu(self, worker: PooledWorker) -> None:
        """A worker has said what it sees: the GPU that its device's placement group holds."""
        assert worker.info is not None
        gpus = worker.info.gpus
        self._new.gpus[worker.device] = worker.group, gpus[0] if gpus else str(worker.device)

    def start_probe(self, device: int) -> PooledWorker | None:
        """A new process that is to say which GPU the device is; None: one that will say so is starting, or none may."""
        if self._is_crowded(device) or any(worker.starting for worker in self._on_device[device].values()):
            return None
        return self._add_worker(self._new.start(device, None))

    def stop_forking(self, why: str) -> None:
        """Start only plain processes from now on."""
        if self._new.stop_forking(why):
            self.discard_all_idle_workers()

    def start_spares(self) -> list[PooledWorker]:
        """Start the next process of each device on which a trial runs. Returns these.

        A spare takes nothing of its device until a trial takes it. There is none where processes cannot be forked.
        """
        if not self._spares:
            return []
        started = []
        for device, here in list(self._on_device.items()):
            runs = any(worker.busy and not worker.starting for worker in here.values())
            if not runs or self._idle(device) or self._is_crowded(device) or not self._new.can_spare(device):
                continue
            started.append(self._add_worker(self._new.start(device, None, spare=True)))
        return started

    def return_worker(self, worker: PooledWorker) -> None:
        """The worker is free for the next trial, unless it was started for one trial."""
        if not self.is_alive(worker):
            return
        worker.free()
        if worker.started_for == "several":
            self.discard_worker(worker)

    def discard_worker(self, worker: PooledWorker) -> None:
        """Let a worker end in order: it takes no part in the job any more, and runs its exit handlers by itself."""
        self._forget(worker)
        self._tell_to_end(worker)

    def kill_worker(self, worker: PooledWorker) -> None:
        """Kill a worker that does not answer."""
        self._forget(worker)
        self._killing.kill(worker)

    def forget_worker(self, worker: PooledWorker) -> None:
        """A worker has died."""
        self._forget(worker)
        _kill(worker.actor)

    def _forget(self, worker: PooledWorker) -> None:
        self.workers.pop(worker.name, None)
        self._on_device[worker.device].pop(worker.name, None)
        self._away.pop(worker.name, None)

    def _tell_to_end(self, worker: PooledWorker) -> None:
        process = self._local_process(worker) if worker.use is not Use.IDLE else None
        if process is not None:
            self._ending = [*(each for each in self._ending if each.is_running()), process]
        self._note_ends()
        self._leaving[worker.actor.end.remote(cleanup_patience())] = worker

    def _note_ends(self) -> None:
        """Forget the workers that have ended."""
        if self._leaving:
            for future in ray.wait(list(self._leaving), num_returns=len(self._leaving), timeout=0)[0]:
                del self._leaving[future]

    def _local_process(self, worker: PooledWorker) -> psutil.Process | None:
        """The worker's process, if it is known and on this machine."""
        node = self._devices.nodes.get(worker.device)
        if worker.pid is None or not node or not is_here(node):
            return None
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(worker.pid)
        return None

    def discard_idle_workers(self, device: int) -> None:
        """Let the idle workers of a device end: the device is gone, or they are of no use.

        The death of a worker that serves a trial shows in its answer to that trial.
        """
        for worker in self._idle(device):
            self.discard_worker(worker)

    def discard_all_idle_workers(self) -> None:
        """Let all idle workers end: what they hold of their devices' memory is needed."""
        for device in list(self._on_device):
            self.discard_idle_workers(device)

    def node_of(self, worker: PooledWorker) -> str | None:
        """The whole id of the worker's node; None: it is not known, or gone."""
        return _whole(self._devices.nodes.get(worker.device))

    def is_alive(self, worker: PooledWorker) -> bool:
        """Whether the worker is neither dead nor discarded, as far as is known."""
        return worker.name in self.workers

    def has_busy_worker(self, device: int) -> bool:
        """Whether a worker of the device, or one that lives in its group, serves a trial, unloads it or ends."""
        return any(worker.busy for worker in self._of(device))

    def has_worker(self, device: int) -> bool:
        """Whether a worker of the device, or one that lives in its group, is there, whatever it does."""
        return bool(self._of(device))

    def _of(self, device: int) -> list[PooledWorker]:
        self._note_ends()
        living = (*self._on_device[device].values(), *self._away.values(), *self._leaving.values())
        return [worker for worker in living if device in (worker.device, worker.home)]

    def close(self) -> None:
        """Let all workers end, and kill those that do not come to it.

        A worker that still unloads its trial gets the rest of its `CLOSE_S`. Trials' exit handlers on this machine are
        waited for until `CLOSE_S` seconds have passed in all, and then left to end by themselves.
        """
        now = time.monotonic()
        for worker in list(self.workers.values()):
            if worker.starting:
                self.kill_worker(worker)
            else:
                self._tell_to_end(worker)
        while self._leaving:
            due = {future: self._deadline(worker, now) for future, worker in self._leaving.items()}
            wait_s = max(0.0, min(due.values()) - time.monotonic())
            for future in ray.wait(list(due), num_returns=1, timeout=wait_s)[0]:
                del self._leaving[future]
            for future in [each for each in self._leaving if time.monotonic() >= due[each]]:
                self._killing.kill(self._leaving.pop(future))
        self._killing.finish()
        self.workers.clear()
        self._on_device.clear()
        self._away.clear()
        psutil.wait_procs(self._ending, timeout=max(0.0, now + CLOSE_S - time.monotonic()))
        self._ending.clear()
        self._new.close()

    def _deadline(self, worker: PooledWorker, closing: float) -> float:
        """When the worker is killed if it has not left Ray (monotonic clock); the pool is closed at ``closing``."""
        if not worker.busy:  # also one that waits
            return closing + CLOSE_S
        return worker.told + CLOSE_S if worker.use is Use.UNLOADING else closing + UNLOAD_SOON_S


class Killing:
    """Kills worker processes of a pool that do not answer; one in MPS is ended under its daemon before.

    That happens on the worker's node, in a task of Ray's. Only the end of the job waits for it.
    """

    def __init__(self, devices: DeviceSource) -> None:
        self._devices = devices
        #: The tasks that end clients of MPS, each with its worker.
        self._under_way: dict[Any, PooledWorker] = {}

    def kill(self, worker: PooledWorker) -> None:
        """Kill the worker: at once, or when its daemon has dropped what it computes.

        A process that is starting computes nothing yet.
        """
        node = _whole(self._devices.nodes.get(worker.device)) if worker.in_mps else None
        if node is None:
            _kill(worker.actor)
            return
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(_end_and_kill).options(num_cpus=0, scheduling_strategy=there)
        self._under_way[task.remote(worker.pid, worker.actor)] = worker

    def finish(self) -> None:
        """Wait until all have been killed, and kill those at once that have not."""
        if self._under_way:
            ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=KILLED_S)
        for worker in self._under_way.values():
            _kill(worker.actor)
        self._under_way.clear()


def _whole(node: str | None) -> str | None:
    """The id of a living node that begins so."""
    found = (each["NodeID"] for each in ray.nodes() if each.get("Alive", True))
    return None if node is None else next((each for each in found if each.startswith(node)), None)


def _end_and_kill(pid: int, actor: Any) -> None:
    with suppress(OSError):
        end_client(pid)
    _kill(actor)


def _kill(actor: Any) -> None:
    """Kill the actor, and end what it has created in Ray."""
    ray.kill(actor)
    end_made_by(actor)

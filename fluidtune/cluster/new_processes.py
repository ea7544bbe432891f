"""Starts the worker processes of a job: forked from their node's server, or as Ray starts a process.

It works out what a process needs before it starts, and what it gets. The pool decides which device needs a process, and
when.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fluidtune import hash_seed
from fluidtune.cluster.data.node_files import VARIABLE, NodeFiles
from fluidtune.cluster.devices.device_source import DeviceSource
from fluidtune.cluster.devices.layout import Layout
from fluidtune.cluster.forks.fork_launcher import THREADS, THREADS_UNLESS_SET
from fluidtune.cluster.forks.nodes import ForkServers, is_here
from fluidtune.cluster.hosting.trial_sessions import DEVICE_VARIABLE
from fluidtune.cluster.hosting.worker import Worker
from fluidtune.cluster.sharing.mps import MpsSettings
from fluidtune.device_kinds import KINDS
from fluidtune.ray_compat.accelerators import none_visible, options_of
from fluidtune.ray_compat.trainable import ENV_VARS_TO_PROPAGATE

if TYPE_CHECKING:
    from fluidtune.cluster.hosting.messages import WorkerInfo

#: Environment variables that stock Tune gives its trial processes and that user code may rely on.
_PASSED_ON = {*ENV_VARS_TO_PROPAGATE, "TUNE_FUNCTION_THREAD_TIMEOUT_S"}


class Use(Enum):
    """What a worker does for trials. It is WAITING while its trial is paused and may go on there.

    started for a trial --> SERVING <--take-- IDLE <-- started as a spare
                               |               ^
                            unload             |
                               v               |
                            UNLOADING --free---+

    SERVING --wait--> WAITING --take--> SERVING;  WAITING --unload--> UNLOADING
    """

    SERVING = "serving"
    UNLOADING = "unloading"
    IDLE = "idle"
    WAITING = "waiting"


@dataclass
class PooledWorker:
    """One worker process, as the driver knows it."""

    name: str
    device: int
    actor: Any
    #: Unix time at which the process was asked for; for the event log.
    asked: float
    #: The placement group that it was started in.
    group: Any = None
    #: "several": it sees several GPUs, serves one trial and is not kept. "spare": no trial needed it when it started.
    started_for: Literal["trial", "several", "spare"] = "trial"
    #: Its process has not answered yet. It may serve a trial meanwhile, whose calls wait.
    starting: bool = True
    #: What its process has said of itself; None: nothing yet.
    info: WorkerInfo | None = None
    use: Use = Use.SERVING
    #: When it was last told to unload its trial (monotonic clock).
    told: float = 0.0
    #: It holds resources of its device, so that no other process may be there beside it.
    holds: bool = False
    #: The device in whose placement group it lives. A trial that has waited may go on on another one.
    home: int = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.device

    @property
    def busy(self) -> bool:
        """It serves a trial or unloads one."""
        return self.use in (Use.SERVING, Use.UNLOADING)

    @property
    def pid(self) -> int | None:
        """Its process id; None: it has not answered."""
        return None if self.info is None else self.info.pid

    @property
    def in_mps(self) -> bool:
        """It is a client of its GPU's MPS daemon."""
        return self.info is not None and bool(self.info.mps)

    def take(self) -> None:
        self.use = Use.SERVING

    def unload(self) -> None:
        self.use, self.told = Use.UNLOADING, time.monotonic()

    def free(self) -> None:
        self.use = Use.IDLE

    def wait(self) -> None:
        self.use = Use.WAITING

    def is_unloading(self, within: float) -> bool:
        """Whether it was told to unload less than ``within`` seconds ago and has not answered."""
        return self.use is Use.UNLOADING and time.monotonic() - self.told < within


def worker_environment() -> dict[str, str]:
    """The environment variables that a worker gets from this driver after its start, as from stock Ray Tune."""
    found = {name: value for name in _PASSED_ON if (value := os.environ.get(name)) is not None}
    return {"PL_DISABLE_FORK": "1", **found}


class NewProcesses:
    """Belongs to one pool. ``mps``: how processes share a GPU under MPS. ``fork``: they are forked where possible."""

    def __init__(
        self, plan: Layout, devices: DeviceSource, job: str, mps: MpsSettings | None = None, fork: bool = False
    ) -> None:
        self._layout, self._devices, self._job, self._mps = plan, devices, job, mps
        self._kind = KINDS[plan.kind]
        #: `Worker` as Ray's class of actors, from the first start on. Ray pickles and exports each one that is made,
        #: which takes the driver 18 ms of CPU time, and a start 1 ms (median of 15 starts, Ray 2.60).
        self._actor_class: Any = None
        #: How many processes were started so far.
        self._count = 0
        #: Device -> its placement group, and the id of the GPU that this holds. A worker inside the group has said so.
        self.gpus: dict[int, tuple[Any, str]] = {}
        self.environment = worker_environment()
        beside = {THREADS: str(plan.process_threads)}
        forks = fork and self._kind.computes
        #: How the names of the actors begin that hold the shared data of nodes.
        self._data = f"fluidtune-data-{secrets.token_hex(8)}-"
        #: The data of the driver's own node; None: no process was started there.
        self._own_data: NodeFiles | None = None
        self._forks = ForkServers(self.environment, beside) if forks else None
        # Whether the user has set their number, only a process that begins there knows: see `TrialResources`.
        self.environment = {**self.environment, **beside}
        if self._kind.cores:
            # A server has begun before it is known what the devices are. What is imported does not depend on it, except
            # where a package reads it at its import: the process imports that anew.
            self.environment = {**self.environment, **none_visible(dict(ray.get_runtime_context().runtime_env))}
        #: By node, what Ray must give to a process before it starts; empty: nothing. A node that has come to the
        #: cluster since the job began need not have been started as the others were.
        self._before_start: dict[str | None, dict[str, Any]] = {}

    def _prepare(self, device: int) -> str | None:
        """Learn what a process on the device's node needs, and have the node's fork server begin. Returns the node."""
        node = self._devices.nodes.get(device)
        if node not in self._before_start:
            self._before_start[node] = self._needed_before_start()
        if self._forks is not None and node is not None:
            # The driver holds the data of its own node.
            self._forks.prepare(node, self._before_start[node], None if is_here(node) else self._data + node)
        return node

    def _shared_data(self, node: str | None) -> dict[str, str]:
        """The variable by which a process finds the shared data of its node; empty: the node has none."""
        if node is None or sys.platform != "linux":
            return {}
        if is_here(node):
            self._own_data = self._own_data or NodeFiles()
            return {VARIABLE: self._own_data.paths}
        forks = self._forks is not None and self._forks.off is None
        return {VARIABLE: self._data + node} if forks else {}

    def is_nearly_ready(self, device: int) -> bool:
        """Whether a process on the device is there sooner if it is forked after a moment than if it is started now."""
        return self._forks is not None and self._forks.is_nearly_ready(self._prepare(device))

    def can_spare(self, device: int) -> bool:
        """Whether a process can be forked on the device that takes nothing of it."""
        if self._forks is None or self._forks.command(self._devices.nodes.get(device)) is None:
            return False
        return self._kind.visible is None or not self.is_unknown(device)

    def is_unknown(self, device: int) -> bool:
        """Whether no worker has said yet which GPU the device is."""
        return device not in self.gpus or self.gpus[device][0] != self._devices.group(device)

    def stop_forking(self, why: str) -> bool:
        """Start only plain processes from now on. False: that is so already."""
        return self._forks is not None and self._forks.turn_off(why)

    def start(self, device: int, visible: list[str] | None, spare: bool = False, several: bool = False) -> PooledWorker:
        """``visible``: ids of all GPUs that the process must see; None: the one of its device. ``several``: it is for a
        trial over several devices.
        """
        asked = time.time()
        group = self._devices.group(device)
        self._count += 1
        name = f"{self._job}-{device}-{self._count}"
        resources = dict(self._layout.worker)
        environment = {**self.environment, DEVICE_VARIABLE: str(device)}
        node = self._prepare(device)
        command = None if self._forks is None else self._forks.command(node)
        # The device's group has what the job has taken: a process that holds nothing of it may wait with its trial.
        holds = not spare and (not self._kind.cores or several or command is None)
        if not holds:
            resources = {}
            if self._kind.visible is not None:
                environment[self._kind.visible] = self.gpus[device][1]
        if visible is not None and self._kind.visible is not None:
            resources[self._kind.resource] = 1.0
            environment[self._kind.visible] = ",".join(visible)
        environment |= self._shared_data(node)
        runtime_env = self._before_start[node]
        if command is not None:
            # Ray sets the number of threads by what the process holds: it is there before.
            variables = {**runtime_env.get("env_vars", {}), THREADS_UNLESS_SET: environment[THREADS]}
            runtime_env = {**runtime_env, "env_vars": variables, "py_executable": command}
        if self._actor_class is None:
            self._actor_class = ray.remote(Worker)
        actor = self._actor_class.options(
            **options_of(resources),
            max_restarts=0,
            runtime_env=runtime_env or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=self._devices.bundle(device)
            ),
        ).remote(name, environment, self._mps if visible is None else None, self._layout.kind)
        if spare:
            return PooledWorker(name, device, actor, asked, group, "spare", use=Use.IDLE)
        used_for: Literal["trial", "several"] = "trial" if visible is None else "several"
        return PooledWorker(name, device, actor, asked, group, used_for, holds=holds)

    def _needed_before_start(self) -> dict[str, Any]:
        """The ``runtime_env`` by which workers hash alike, and import Ray as stock does. Emulated devices need none."""
        if not self._kind.computes:
            return {}
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        rays = {name: value for name, value in self.environment.items() if name.startswith("RAY_")}
        return hash_seed.runtime_env(nodes, dict(ray.get_runtime_context().runtime_env), rays) or {}

    def close(self) -> None:
        """Let the fork servers of the job end, and its shared data be freed."""
        if self._own_data is not None:
            self._own_data.close()
        if self._forks is not None:
            self._forks.close()

"""The fork servers of one job, one a node: which node has one that is ready, and what a process on it is started with.

Where there is no server, and after it has died, processes are started as Ray starts them. The server on the driver's
own machine is the driver's, if what the Ray node starts there may as well be the driver's child (`_raylets`): it can
begin before Ray is up, and serves one job after another. Other nodes have an actor that holds theirs for the job.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fluidtune.cluster.data.node_files import NodeFiles
from fluidtune.cluster.forks.child import environment_at_start
from fluidtune.cluster.forks.fork_launcher import PREFIX, THREADS
from fluidtune.cluster.forks.fork_server import ForkServer, ServerState
from fluidtune.cluster.forks.preload import modules_of_trials
from fluidtune.cluster.forks.quick_nodes import start_quick_nodes
from fluidtune.error_lines import first_line

log = logging.getLogger(__name__)

#: What a runtime environment may hold besides for processes to be forked: Ray applies it to the launcher, before the
#: server is asked. Other fields (conda, pip, uv, containers, another Python) make another Python of it.
_APPLIED = {"env_vars", "working_dir", "py_modules", "config", "_ray_commit", "worker_process_setup_hook"}
#: What Ray gives a process of one core or less, unless the variable is set: the number of threads of its libraries.
ONE_THREAD = {THREADS: "1"}
#: What the shell and Ray give each process anew.
_OF_THE_PROCESS = {"SPT_NOENV", "SHLVL", "_", "PWD", "OLDPWD", "FLUIDTUNE_EMULATED_DEVICE"}
#: Seconds for which a process is not started while a server imports its last modules. A plain process would begin later
#: to import the same. Lightning and Transformers take 3 s on two cores; a server that takes longer than this waits for
#: something, or has more to import than a trial needs.
NEARLY_S = 10.0


def obstacle(runtime_env: Mapping[str, Any]) -> str | None:
    """Why processes with this runtime environment cannot be forked; None: they can, as far as is known."""
    if sys.platform != "linux":
        return f"forks of imported packages are unsafe on {sys.platform}"
    other = [name for name, value in runtime_env.items() if value and name not in _APPLIED]
    if PREFIX in str(runtime_env.get("py_executable")):
        other.remove("py_executable")  # `forked`: a fork server, too
    return f"the runtime environment has {', '.join(sorted(other))}" if other else None


class _Here:
    """The driver's own server. It is started and waited for in a thread, because both take their time."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        #: What became of it; None: it is starting.
        self.state: ServerState | None = None
        self.environment = lasting(environment)
        self.server = ForkServer(modules, self.environment)
        #: The variables of Ray's that it has imported with; None: it has not imported its last modules yet.
        self.rays: dict[str, str] | None = None
        #: Since when it imports its last modules (monotonic clock).
        self.finishing: float | None = None
        self._finish: queue.SimpleQueue[tuple[list[str], dict[str, str]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fork-server", daemon=True).start()

    def finish(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Ray is up: have the server import what needs Ray, too, and then fork processes."""
        if self.finishing is None:
            self.finishing, self.rays = time.monotonic(), dict(environment)
            self._finish.put((list(modules), self.rays))

    def _run(self) -> None:
        try:
            self.server.begin()
        except OSError as error:
            self.state = ServerState(None, str(error))
            return
        self.state = self.server.finish(*self._finish.get())
        if self.state.command is not None:
            self.state = ServerState(None, self.server.wait())


class Holder:
    """The actor that holds a node's server and shared data. It asks for no resources and lives as long as the job."""

    def __init__(
        self,
        modules: tuple[list[str], list[str]],
        unless_set: Mapping[str, str],
        environment: Mapping[str, str],
        name: str | None,
    ) -> None:
        self._data = NodeFiles()
        first, self._then = modules
        job = ray.get_runtime_context().get_job_id()
        whole = {**unless_set, **environment_at_start(), "RAY_JOB_ID": job, **environment}
        self._server = ForkServer(first, whole, name)

    def start(self) -> ServerState:
        return self._server.finish(self._then, {})

    def wait(self) -> str:
        return self._server.wait()

    def shared_data(self) -> str:
        """The paths of the node's shared data."""
        return self._data.paths


class There:
    """A server that an actor holds. ``environment``, ``unless_set``: see `ForkServers`; what else a process of Ray's on
    the node has, it has as well. ``server``: its name; None: a new one.

    ``name``: the actor's, by which processes find the node's shared data; None: they are held elsewhere, or not at all.
    """

    def __init__(
        self,
        node: str,
        modules: tuple[list[str], list[str]],
        environment: Mapping[str, str],
        unless_set: Mapping[str, str],
        runtime_env: Mapping[str, Any],
        server: str | None = None,
        name: str | None = None,
    ) -> None:
        self.state: ServerState | None = None
        whole = next((each["NodeID"] for each in ray.nodes() if each["NodeID"].startswith(node)), node)
        options = dict(
            name=name,
            num_cpus=0,
            max_concurrency=3,
            runtime_env=dict(runtime_env) or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(whole, soft=False),
        )
        self._actor = ray.remote(Holder).options(**options).remote(modules, unless_set, environment, server)
        #: The call that is answered when the server is ready, and then the one that is answered when it has ended.
        self._awaited = self._actor.start.remote()

    def look(self) -> None:
        """Hear from the actor, if there is news."""
        if self._awaited is None or not ray.wait([self._awaited], timeout=0)[0]:
            return
        try:
            said = ray.get(self._awaited)
        except ray.exceptions.RayError as error:
            said = f"its actor died: {first_line(error)}"
        self._awaited = None
        self.state = said if isinstance(said, ServerState) else ServerState(None, said)
        if self.state.command is not None:
            self._awaited = self._actor.wait.remote()

    def stop(self) -> None:
        """Let it end: a server ends with the process that holds it."""
        ray.kill(self._actor)


#: The driver's own server, once it has begun.
_here: _Here | None = None


def lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment matters to imports that need no Ray."""
    return {name: value for name, value in environment.items() if name not in _OF_THE_PROCESS and name[:4] != "RAY_"}


def _begin_here(environment: Mapping[str, str], anew: bool = False) -> _Here:
    """The driver's own server, which has imported in this environment, or begins to. ``anew``: not the one it has."""
    global _here
    before = _here
    died = before is not None and before.state is not None and before.state.command is None
    if before is None or anew or died or before.environment != lasting(environment):
        _here = _Here(modules_of_trials()[0], environment)
        if before is not None:
            threading.Thread(target=before.server.stop, name="fork-server-ends", daemon=True).start()
        return _here
    return before


def _finish_here(environment: Mapping[str, str]) -> _Here:
    """The driver's own server, with what needs Ray. ``environment``: that of a worker of the Ray node."""
    rays = {name: value for name, value in environment.items() if name[:4] == "RAY_"}
    host = _begin_here(environment)
    if host.rays not in (None, rays):
        host = _begin_here(environment, anew=True)  # the driver has started another Ray node meanwhile
    host.finish(modules_of_trials()[1], rays)
    return host


def is_here(node: str) -> bool:
    """Whether this process runs on the node. ``node``: the beginning of the node's id."""
    return ray.get_runtime_context().get_node_id().startswith(node)


def of_own_node() -> dict[str, str] | None:
    """The environment of workers of this process' Ray node; None: its raylet is none of this user's processes here."""
    context = ray.get_runtime_context()
    with suppress(psutil.Error, RuntimeError):  # a client of Ray is on no node
        for raylet in _raylets(f"--node_id={context.get_node_id()}"):
            return {**_of_workers(raylet), "RAY_RAYLET_PID": str(raylet.pid), "RAY_JOB_ID": context.get_job_id()}
    return None


def _raylets(word: str) -> list[psutil.Process]:
    """The raylets whose command has this word and whose workers may be this process' children as well.

    They are this user's, start this Python, and have this process' limits of memory and devices: its control groups.
    """
    found, python = [], f"--python_worker_command={sys.executable} "
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            told = each.cmdline() if each.name() == "raylet" and each.uids().real == os.getuid() else []
            fits = word in told and any(said.startswith(python) for said in told)
            if fits and Path(f"/proc/{each.pid}/cgroup").read_text() == Path("/proc/self/cgroup").read_text():
                found.append(each)
    return found


def _of_workers(raylet: psutil.Process) -> dict[str, str]:
    found = raylet.environ()
    if found.get("RAY_LD_PRELOAD_ON_WORKERS", "0") == "0" and "LD_PRELOAD" not in os.environ:
        found.pop("LD_PRELOAD", None)  # Ray's own, for the raylet
    return dict(found)


@contextmanager
def while_ray_starts(runtime_env: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[None]:
    """Have the driver's own server import while this process starts Ray, or connects to it, inside.

    ``runtime_env``: the job's. ``environment``: variables that the job's processes get after their start. A job that
    turns out to need other ones gets another server.
    """
    start_quick_nodes()
    possible, address = obstacle(runtime_env) is None, os.environ.get("RAY_ADDRESS")
    more = {**(runtime_env.get("env_vars") or {}), **environment}
    with suppress(psutil.Error):
        raylets = _raylets(f"--gcs-address={address}") if address is not None else []
        if possible and (address is None or raylets):
            _begin_here({**ONE_THREAD, **(_of_workers(raylets[0]) if raylets else os.environ), **more})
    yield
    own = of_own_node() if possible else None
    if own is not None:
        _finish_here({**ONE_THREAD, **own, **more})


class ForkServers:
    """See the module.

    ``environment``: variables that the job's processes get after their start. ``unless_set``: those of them that Ray
    gives a process which does not have them.
    """

    def __init__(self, environment: Mapping[str, str], unless_set: Mapping[str, str]) -> None:
        self._environment, self._unless_set = dict(environment), dict(unless_set)
        self._nodes: dict[str, _Here | There] = {}
        self._said: set[str] = set()
        self._runtime_env = dict(ray.get_runtime_context().runtime_env)
        #: Why processes are not forked in this job; None: they are, where there is a server.
        self.off: str | None = None
        why = obstacle(self._runtime_env)
        if why is not None:
            self.turn_off(why)

    def turn_off(self, why: str) -> bool:
        """Fork no process of this job any more. False: that is so already."""
        if self.off is not None:
            return False
        self.off = why
        log.warning("FluidTune: new processes are plain ones, which takes longer: %s", why)
        return True

    def prepare(self, node: str, runtime_env: Mapping[str, Any], name: str | None = None) -> None:
        """Start the node's server, unless it has one.

        ``node``: the beginning of the node's id. ``name``: see `There`.
        """
        if self.off is not None or node in self._nodes:
            return
        own = of_own_node() if is_here(node) else None
        if own is not None:
            user = {**self._runtime_env.get("env_vars", {}), **runtime_env.get("env_vars", {})}
            self._nodes[node] = _finish_here({**self._unless_set, **own, **user, **self._environment})
            return
        modules = modules_of_trials()
        self._nodes[node] = There(node, modules, self._environment, self._unless_set, runtime_env, name=name)

    def _on(self, node: str | None) -> _Here | There | None:
        return None if node is None or self.off is not None else self._nodes.get(node)

    def command(self, node: str | None) -> str | None:
        """Ray's ``py_executable`` for a process on the node now; None: it is started as Ray does."""
        host = self._on(node)
        if isinstance(host, There):
            host.look()
        if host is None or host.state is None:
            return None
        if host.state.why is not None:
            self._say_once(f"new processes of a node are plain ones, which takes longer: {host.state.why}")
        return host.state.command

    def is_nearly_ready(self, node: str | None) -> bool:
        """Whether a process on the node is there sooner if it is forked after a moment than if it is started now."""
        host = self._on(node)
        if not isinstance(host, _Here) or host.state is not None or host.finishing is None:
            return False
        return time.monotonic() - host.finishing < NEARLY_S

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.warning("FluidTune: %s", line)

    def close(self) -> None:
        """Let the servers of other nodes end. The driver's own one serves its next job, too."""
        for host in self._nodes.values():
            if isinstance(host, There):
                host.stop()
        self._nodes.clear()

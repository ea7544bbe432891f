"""Actors and tasks that are no workers of trials, forked on whichever node Ray starts them: `fluidtune.forked`.

The command that starts them is the same on all nodes. Where it finds no server, it starts Python as it is.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray

from fluidtune.cluster.forks import fork_launcher, nodes
from fluidtune.cluster.forks.fork_server import ForkServer, new_name
from fluidtune.cluster.forks.preload import modules_of_program
from fluidtune.cluster.forks.quick_nodes import start_quick_nodes

log = logging.getLogger(__name__)

#: How often it is looked whether Ray is up, seconds.
_LOOK_S = 0.05
#: How long after an error it is tried again, seconds.
_AGAIN_S = 1.0
#: Runs the launcher where it and the server's socket are, else this Python as it is, and else the node's.
_GUARD = (
    'if [ -x "$1" ] && grep -qs "$3" /proc/net/unix; then exec "$1" -I -S "$2" "$3" "${@:4}"; '
    'elif [ -x "$1" ]; then exec "$1" "${@:4}"; else exec python "${@:4}"; fi'
)


def forked(modules: Sequence[str] | None = None) -> dict[str, Any]:
    """A runtime environment with which Ray forks the processes of tasks and actors.

    ``ray.init(runtime_env=fluidtune.forked())``. A server on each node imports packages once, and new processes of the
    job are forked from it. Until it is ready, on nodes that come later, and where it cannot be, processes are started
    as Ray starts them. Further fields ("env_vars", "working_dir", "py_modules") can be added to the dictionary.

    Args:
        modules: the names of what the servers import. None: what this process has imported of installed packages.

    Returns:
        a ``runtime_env`` for ``ray.init``; {} on platforms without forks.
    """
    if nodes.obstacle({}) is not None:
        return {}
    start_quick_nodes()
    server, names = new_name(), modules_of_program(modules)
    threading.Thread(target=_serve, args=(server, names), name="forked", daemon=True).start()
    return by_server(server)


class ForkedActors(nodes.ForkServers):
    """Has actors that this process starts forked, on whichever node Ray starts them: each node has a server for them.

    It waits for the servers, `nodes.NEARLY_S` at most: they import what a plain process would. They end with this
    process.

    ``modules``: the names of what the servers import. ``environment``: variables that the actors set first. Until the
    servers are ready, and where they cannot be, processes are started as Ray starts them.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(environment, nodes.ONE_THREAD)
        self._server, names = new_name(), modules_of_program(modules)
        for node in [each["NodeID"] for each in ray.nodes() if each["Alive"] and self.off is None]:
            self._nodes[node] = nodes.There(node, names, environment, nodes.ONE_THREAD, {}, self._server)
        until = time.monotonic() + nodes.NEARLY_S
        while any(each.state is None for each in self._nodes.values()) and time.monotonic() < until:
            time.sleep(_LOOK_S)
            for node in self._nodes:
                self.command(node)  # hears from it, and says why it has none

    def runtime_env(self) -> dict[str, Any]:
        """What of a ``runtime_env`` an actor needs that is started now."""
        return {} if self.off is not None else by_server(self._server)


def by_server(name: str) -> dict[str, Any]:
    """The ``runtime_env`` of processes that are forked by the server of this name, where there is one."""
    words = ["bash", "-c", _GUARD, "forked", sys.executable, str(fork_launcher.__file__), name]
    return {"py_executable": shlex.join(words)}


def _serve(name: str, modules: tuple[list[str], list[str]]) -> None:
    """Hold the server of this machine, and have the other nodes hold theirs, whenever this process has started Ray."""
    first, then = modules
    environment = {**nodes.ONE_THREAD, **os.environ}
    server = ForkServer(first, nodes.lasting(environment), name)
    job: str | None = None
    others: list[nodes.There] = []
    used, failures = False, 0
    try:
        server.begin()
        while threading.main_thread().is_alive():
            time.sleep(_AGAIN_S if failures else _LOOK_S)
            try:
                if ray.is_initialized() and _job() != job:
                    user = dict(ray.get_runtime_context().runtime_env).get("env_vars", {})
                    own = nodes.of_own_node()
                    if used or user or own is None:
                        server.stop()
                        base = os.environ if own is None else {**own, **user}
                        server = ForkServer(first, nodes.lasting({**nodes.ONE_THREAD, **base}), name)
                    if own is not None:
                        used = True
                        state = server.finish(then, {key: value for key, value in own.items() if key[:4] == "RAY_"})
                        if state.why is not None:
                            log.warning("fluidtune.forked: processes are plain ones: %s", state.why)
                    there, job = _other_nodes(own is not None), _job()
                    others = [nodes.There(node, modules, {}, nodes.ONE_THREAD, {}, name) for node in there]
                failures = 0
            except Exception as error:
                # A client of Ray that disconnects meanwhile has an error of any class here, once.
                failures += 1
                if failures == 2:
                    log.warning("fluidtune.forked: processes are plain ones for now: %s", error)
    except OSError as error:
        log.warning("fluidtune.forked: processes are plain ones: %s", error)
    finally:
        server.stop()
        del others


def _job() -> str:
    """Which job this process is, in which cluster."""
    return f"{ray.get_runtime_context().get_job_id()} {_node()}"


def _node() -> str | None:
    """The node of this process; None: it is on none, as a client of Ray (``ray://``)."""
    with suppress(RuntimeError):
        return str(ray.get_runtime_context().get_node_id())
    return None


def _other_nodes(own: bool) -> list[str]:
    """The nodes whose server an actor has to hold. ``own``: this process holds that of its own node."""
    alive = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    return [node for node in alive if node != _node() or not own]

"""Quick nodes: those where Ray starts a process by `fork_launcher` at once, and not by a program that imports Ray.

They are the nodes that a process of FluidTune starts. ``fluidtune node start`` starts one of a cluster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fluidtune.cluster.forks import fork_launcher
from fluidtune.ray_compat import worker_start

#: Seconds within which a node must have said whether it is one. A plain process takes five on two cores.
_ANSWER_S = 60.0


def start_quick_nodes() -> None:
    """Have the nodes that this process starts from now on be quick ones."""
    if sys.platform == "linux":
        worker_start.start_workers_by(str(fork_launcher.__file__))


def start_node(options: Sequence[str]) -> None:
    """Start a quick node as ``ray start`` does with these options."""
    start_quick_nodes()
    (command,) = entry_points(group="console_scripts", name="ray")
    sys.argv = ["ray", "start", *options]
    command.load()()


def slow_nodes() -> list[str]:
    """The addresses of the nodes of this cluster that are none, or do not say."""
    name = fork_launcher.__name__.rpartition(".")[2]

    def is_quick() -> bool:
        with open(f"/proc/{os.environ['RAY_RAYLET_PID']}/cmdline") as command:
            return name in command.read()

    nodes = [node for node in ray.nodes() if node["Alive"]]
    there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    asked = [ray.remote(is_quick).options(num_cpus=0, scheduling_strategy=each).remote() for each in there]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
    quick = [each for each in answered if ray.get(each)]
    return [node["NodeManagerAddress"] for node, each in zip(nodes, asked, strict=True) if each not in quick]

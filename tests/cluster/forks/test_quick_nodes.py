"""Quick nodes on real Ray: what is started there at once, what Ray's own program starts, and clusters of both kinds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.contracts.processes import python, until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("no_ray")]


#: Prints, for each runtime environment of an actor: what its process finds, and how its launcher was started.
CONTEXTS = """
import json, os, sys
import psutil, ray, fluidtune
folder, *contexts = map(json.loads, sys.argv[1:])

@ray.remote(num_cpus=0)
class Process:
    def found(self):
        above = psutil.Process().parent()
        forked = "server.py" in " ".join(above.cmdline())
        return forked, os.environ.get("A_VALUE"), os.path.exists("of_mine.py")

def launchers():
    (raylet,) = [each for each in psutil.Process().children() if each.name() == "raylet"]
    try:
        commands = [each.cmdline() for each in raylet.children()]
    except psutil.NoSuchProcess:  # it has just ended
        return launchers()
    return [command[1].partition(" ")[0] for command in commands if "fork_launcher" in " ".join(command)]

runtime_env = {**fluidtune.forked(["json"]), "working_dir": folder}
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=runtime_env)
while True:
    actor = Process.remote()
    if ray.get(actor.found.remote())[0]:
        break
    ray.kill(actor)
ray.kill(actor)
while launchers():
    pass
for context in contexts:
    actor = Process.options(runtime_env=context).remote()
    print(json.dumps([ray.get(actor.found.remote()), launchers()]))
    ray.kill(actor)
    while launchers():
        pass
"""


def test_contexts_that_are_known_whole_go_to_the_server_at_once_and_others_through_rays_own_program(
    tmp_path: Path,
) -> None:
    (tmp_path / "of_mine.py").write_text("")
    strange = "1 'x' \"y\" @fluidtune-forks-0123456789abcdef"
    contexts: list[dict[str, Any]] = [
        {"env_vars": {"A_VALUE": "1"}},
        {"env_vars": {"A_VALUE": strange}},
        {"env_vars": {"A_VALUE": "${HOME}/x${NOT_THERE}"}},
        {"env_vars": {"A_VALUE": "2"}, "py_executable": sys.executable},
        {},
    ]
    said = python("-c", CONTEXTS, *map(json.dumps, [str(tmp_path), *contexts]))
    found = [json.loads(line) for line in said.splitlines() if line[:1] == "["]
    at_once, through_rays = ["-IScimport"], ["-I"]
    assert found == [
        [[True, "1", True], at_once],
        # What looks like a server's socket and is none.
        [[True, strange, True], through_rays],
        # Ray's program puts one variable into another one.
        [[True, f"{os.environ['HOME']}/x", True], through_rays],
        # Another Python than ours, and so no server.
        [[False, "2", True], []],
        [[True, None, True], at_once],
    ]


SLOW_AND_QUICK = """
import ray
from ray.cluster_utils import Cluster
from fluidtune.cluster.forks.quick_nodes import slow_nodes, start_quick_nodes
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
ray.init(address=cluster.address, log_to_driver=False)
before = len(slow_nodes())
start_quick_nodes()
cluster.add_node(num_cpus=1)
print(before, len(slow_nodes()), len(ray.nodes()))
ray.shutdown()
cluster.shutdown()
"""


def test_a_cluster_knows_which_of_its_nodes_are_quick() -> None:
    assert python("-c", SLOW_AND_QUICK).split() == ["1", "1", "2"]


CLIENT = """
import sys, time
import ray, fluidtune
there = fluidtune.forked(["json"])
for _ in range(2):
    ray.init(sys.argv[1], runtime_env=there)

    @ray.remote(num_cpus=0)
    class Process:
        def is_forked(self):
            return "fluidtune.cluster.forks.child" in sys.modules

    while not ray.get((actor := Process.remote()).is_forked.remote()):
        ray.kill(actor)
        time.sleep(1)
    print("forked", flush=True)
    ray.shutdown()
"""


def answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_a_command_starts_a_quick_node_as_rays_does_and_clients_of_ray_have_processes_forked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "fluidtune", "node", "start", "--head", "--block", "--port=0", "--num-cpus=1"]
    words += ["--include-dashboard=false", "--disable-usage-stats", f"--ray-client-server-port={port}"]
    # Of its own: the `ray.init` of another test's script would find the cluster in Ray's folder.
    words += ["--temp-dir", tempfile.mkdtemp()]
    open_to_all = {"RAY_AUTH_MODE": "disabled"}  # a client needs the token of a cluster that has one
    environment = {**os.environ, **open_to_all}
    node = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        assert until(lambda: any(each.name() == "raylet" for each in psutil.Process(node.pid).children()), 60)
        (raylet,) = [each for each in psutil.Process(node.pid).children() if each.name() == "raylet"]
        assert any("fork_launcher" in word for word in raylet.cmdline())
        # Seen: no process of a client was forked. The server of the first connection may be there when the second one
        # begins: Ray starts a process by -m then.
        assert until(lambda: answers(port), 60)
        said = python("-c", CLIENT, f"ray://127.0.0.1:{port}", **open_to_all)
        assert said.split() == ["forked"] * 2
    finally:
        node.send_signal(signal.SIGTERM)
        node.wait(60)

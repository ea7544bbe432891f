"""A node dies with its devices and workers. Its trials continue elsewhere, and use the node that replaces it."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.conftest import assert_nothing_left
from tests.faults.test_kills import check_reports, fit

pytestmark = [pytest.mark.ray, pytest.mark.faults]

#: Ray notices a dead node after two seconds instead of half a minute.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture
def two_nodes(no_ray):
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, node
    ray.shutdown()
    cluster.shutdown()


def kill_nodes(cluster, node, log: Path, job: Future, wanted: int) -> int:
    """While the job runs, kill the second node ``wanted`` times, at random moments after progress, and replace it.

    Every other time, all trials must have made progress. Otherwise, on a slow machine, the trial on that node would
    never complete an iteration and would be given up. Ray's Cluster starts nodes in the main thread only.
    """
    rng, kills, seen = random.Random(5), 0, 0
    while kills < wanted and not job.done():
        time.sleep(0.05)
        events = read_events(log) if log.exists() else []
        active = {e["trial"] for e in events if e["event"] == "trial_started"}
        active -= {e["trial"] for e in events if e["event"] == "trial_ended" and e["ending"] == "stopped"}
        reported = {e["trial"] for e in events[seen:] if e["event"] == "trial_result"} & active
        if not reported or (kills % 2 and reported != active):
            continue
        time.sleep(rng.uniform(0.0, 1.0))
        cluster.remove_node(node, allow_graceful=False)
        kills += 1
        time.sleep(rng.uniform(1.0, 2.0))
        seen = len(read_events(log))
        node = cluster.add_node(num_cpus=1)
    return kills


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["elastic", "checkpointing"])
def test_a_node_killed_again_and_again(kind, kills, two_nodes, tmp_path):
    cluster, node = two_nodes
    iterations = 30 * kills
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(fit, kind, tmp_path, 3, iterations, 0.1)
        done = kill_nodes(cluster, node, tmp_path / "job" / EVENT_LOG_NAME, job, kills)
        grid = job.result()
    assert not grid.errors
    assert done == kills
    check_reports(kind, tmp_path, 3, iterations, tmp_path)
    events = read_events(tmp_path / "job" / EVENT_LOG_NAME)
    lost = [e for e in events if e["event"] == "device_lost"]
    gained = [e for e in events if e["event"] == "device_gained"]
    assert len(lost) >= min(2, kills) and len(gained) >= len(lost) - 1
    assert_nothing_left()


@pytest.mark.timeout(300)
def test_trials_leave_a_node_that_ray_drains(two_nodes, tmp_path):
    cluster, node = two_nodes
    log = tmp_path / "job" / EVENT_LOG_NAME
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(fit, "elastic", tmp_path, 2, 14, 0.3)
        while len({e["trial"] for e in (read_events(log) if log.exists() else ()) if e["event"] == "trial_result"}) < 2:
            time.sleep(0.1)
        command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", cluster.address]
        preempted = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        subprocess.run([*command, "--node-id", node.node_id, *preempted], check=True)
        grid = job.result()
    assert not grid.errors
    check_reports("elastic", tmp_path, 2, 14, tmp_path)
    events = read_events(log)
    assert [e["why"] for e in events if e["event"] == "suspend_asked"] == ["leaving_device"]
    returned = [e["device"] for e in events if e["event"] == "device_returned"]
    moved = [e["devices"] for e in events if e["event"] == "trial_started" and e["resumed"]]
    assert len(moved) == 1 and not any(set(devices) & set(returned[:1]) for devices in moved)
    assert not [e for e in events if e["event"] == "worker_lost"]

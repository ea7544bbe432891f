"""A job of GPUs on a Ray cluster that has none, and that Ray's own autoscaler lets grow and shrink.

The cluster has a head of one core and no GPU. Ray's autoscaler adds nodes of one core and one GPU each, two at most, by
its provider ``fake_multinode``: each node is a raylet of its own on this machine. Ray does not check that a GPU is
there, and the trials compute nothing. All else is real: the placement groups that wait in Ray's queue, the autoscaler
that reads it, the nodes that come and go, the workers' processes.

The figures, in seconds: ``first_gpu`` and ``second_gpu``, from the start of the job until the node is in Ray's table;
``used``, from the second GPU until both are used to nine tenths, which is the first moment from which a window of
`WINDOW_S` s has so many seconds of iterations; ``freed``, from the end of ``fit`` until nothing holds any GPU;
``gone``, from the end of ``fit`` until the last GPU's node has gone. The autoscaler takes a node away that was idle for
``idle_timeout``. ``utilisation`` is the part of both GPUs' time that was in iterations in the `JUDGED_S` s after
``used``, or until fewer than two trials were left.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import environment, finish, free_ports, kill_tree, parser, result, say

#: Seconds of the windows for ``used`` and for ``utilisation``. Judgement: some iterations long; a minute.
WINDOW_S, JUDGED_S = 10.0, 60.0
#: Seconds for which a node is idle before the autoscaler takes it away. Judgement: Ray's own default for clouds is five
#: minutes, and the example of this provider has one; a quarter of a minute lets the benchmark show what the job does.
IDLE_TIMEOUT_S = 15.0
#: Seconds after which the benchmark gives up a cluster that does not start, or nodes that do not go.
PATIENCE_S = 120.0

#: A look at the cluster: unix seconds, the GPUs that are there, and those of them that nothing holds.
Seen = tuple[float, float, float]

GPUS = 2
#: Trials, and iterations of a second each: in all, and with ``--quick``.
FULL, QUICK = (8, 20), (4, 10)


def autoscaler_config(gcs_address: str) -> dict[str, Any]:
    """What ``ray start --autoscaling-config`` reads; the keys are those of Ray's ``ray-schema.json``."""
    empty: dict[str, Any] = {key: [] for key in ("initialization_commands", "setup_commands", "rsync_exclude")}
    empty |= {key: [] for key in ("rsync_filter", "cluster_synced_files")}
    empty |= {f"{kind}_setup_commands": [] for kind in ("head", "worker")}
    empty |= {f"{kind}_start_ray_commands": [] for kind in ("head", "worker")}
    return {
        **empty,
        "cluster_name": "fluidtune-autoscaling",
        "max_workers": GPUS,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_TIMEOUT_S / 60,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": gcs_address,
        },
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "gpu": {
                "resources": {"CPU": 1, "GPU": 1, "object_store_memory": 80 << 20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": GPUS,
            },
        },
    }


@contextmanager
def autoscaling_cluster() -> Iterator[tuple[str, Mapping[str, str]]]:
    """A cluster of its own for the time of the ``with`` block: its address, and the environment of who connects.

    Raises RuntimeError if it does not start. All of its processes, the nodes that came included, are killed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="ft-as-", dir="/tmp") as place:
        port, client_port = free_ports(2)
        address = f"127.0.0.1:{port}"
        config = Path(place) / "autoscaler.json"
        config.write_text(json.dumps(autoscaler_config(address)))
        settings = {**environment(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        own = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        options = [f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={place}/ray", "--num-cpus=1"]
        options += ["--num-gpus=0", "--include-dashboard=false", f"--autoscaling-config={config}"]
        options += ["--disable-usage-stats", f"--ray-client-server-port={client_port}"]
        options += [f"--object-store-memory={80 << 20}"]
        log = Path(place) / "start.log"
        with log.open("w") as output:
            head = subprocess.Popen(
                [Path(sys.executable).with_name("ray"), "start", "--head", "--block", *options],
                env={**settings, **own},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while "--block" not in log.read_text():
                if head.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Ray did not start:\n{log.read_text()[-4000:]}")
                time.sleep(0.2)
            yield address, settings
        finally:
            kill_tree(head)


def gpu_trial(config: dict[str, Any]) -> None:
    """Computes nothing for ``iterations`` seconds, on one GPU."""
    from ray import tune

    for iteration in range(config["iterations"]):
        time.sleep(1.0)
        tune.report({"score": float(iteration)})


class Watch:
    """Notes in a thread how many GPUs the cluster has, and how many of these nothing holds."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        import ray

        while not self._over.wait(0.2):
            there = sum(node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"])
            self.seen.append((time.time(), there, ray.available_resources().get("GPU", 0.0)))

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()


def held_between(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Seconds of these intervals between ``start`` and ``end``."""
    return sum(max(0.0, min(until, end) - max(since, start)) for since, until in intervals)


def used_from(intervals: list[tuple[float, float]], second_gpu: float, end: float) -> float | None:
    """The first moment from ``second_gpu`` on from which a window has nine tenths of both GPUs' time; None: never."""
    moments = [second_gpu, *sorted(since for since, _ in intervals if since > second_gpu)]
    for moment in moments:
        if moment + WINDOW_S <= end and held_between(intervals, moment, moment + WINDOW_S) >= 0.9 * GPUS * WINDOW_S:
            return moment
    return None


def run_job(trials: int, iterations: int) -> dict[str, Any]:
    """Run the job on the cluster to which this process is connected, and return the figures."""
    from ray import tune
    from ray.tune import RunConfig, TuneConfig

    import fluidtune
    from fluidtune.report import EVENT_LOG_NAME, read_events

    watch = Watch()
    try:
        with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as storage:
            began = time.time()
            grid = fluidtune.Tuner(
                tune.with_resources(gpu_trial, {"cpu": 1, "gpu": 1}),
                param_space={"x": tune.grid_search(list(range(trials))), "iterations": iterations},
                tune_config=TuneConfig(metric="score", mode="max"),
                run_config=RunConfig(name="job", storage_path=storage, verbose=0),
            ).fit()
            ended = time.time()
            events = read_events(Path(storage) / "job" / EVENT_LOG_NAME)
            results = [event for event in events if event["event"] == "trial_result"]
        assert not grid.errors, grid.errors
        say(f"{len(grid)} trials in {ended - began:.1f} s; waiting until the GPUs have gone")
        while (not watch.seen or watch.seen[-1][1]) and time.time() < ended + PATIENCE_S:
            time.sleep(0.2)
    finally:
        watch.close()
    iterations_of: dict[str, list[tuple[float, float]]] = {}
    for event in results:
        iterations_of.setdefault(event["trial"], []).append(
            (event["t"] - event["seconds"] * event.get("iterations", 1), event["t"])
        )
    return figures(watch.seen, iterations_of, began, ended)


def figures(
    seen: list[Seen], iterations_of: Mapping[str, list[tuple[float, float]]], began: float, ended: float
) -> dict[str, Any]:
    """The figures of the module's second paragraph. ``iterations_of``: start and end of each iteration, by trial.

    All times are unix seconds. Raises RuntimeError if the cluster never had both GPUs.
    """
    first = next((at for at, there, _ in seen if at >= began and there), None)
    second = next((at for at, there, _ in seen if at >= began and there >= GPUS), None)
    if first is None or second is None:
        raise RuntimeError("the autoscaler did not bring two GPUs before the job was over; give the trials more work")
    intervals = [one for iterations in iterations_of.values() for one in iterations]
    # From the end of the last trial but one on there is work for one GPU only.
    work_ends = sorted(max(until for _, until in iterations) for iterations in iterations_of.values())[-GPUS]
    used = used_from(intervals, second, work_ends)
    since = second if used is None else used
    until = min(work_ends, since + JUDGED_S)
    freed = next((at for at, there, free in seen if at >= ended and free == there), None)
    gone = next((at for at, there, _ in seen if at >= ended and not there), None)
    return {
        "trials": len(iterations_of),
        "job": ended - began,
        "first_gpu": first - began,
        "second_gpu": second - began,
        "used": None if used is None else used - second,
        "utilisation": held_between(intervals, since, until) / (GPUS * (until - since)) if until > since else None,
        "freed": None if freed is None else freed - ended,
        "gone": None if gone is None else gone - ended,
        "idle_timeout": IDLE_TIMEOUT_S,
    }


def main() -> None:
    """See the module."""
    args = parser("A job of GPUs on a cluster that Ray's autoscaler lets grow from none to two.").parse_args()
    with autoscaling_cluster() as (address, settings):
        os.environ.update(settings)
        import ray  # not before: it reads the token when it is imported

        ray.init(address=address, log_to_driver=False)
        try:
            found = run_job(*(QUICK if args.quick else FULL))
        finally:
            ray.shutdown()
    finish(result("autoscaling", f"gpu:{GPUS}", "emulated", **found), args.json)


if __name__ == "__main__":
    main()

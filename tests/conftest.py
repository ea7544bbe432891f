"""What all tests share: one Ray at a time, nothing left behind after a test, and no test left out silently."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import settings

# Usage statistics would talk to the network at every `ray.init`.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

# The same examples in every run; `--hypothesis-profile=default` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# --- tests that need what this machine has not


def _gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA GPU here"


def _mps() -> str | None:
    return None if shutil.which("nvidia-cuda-mps-control") else "no nvidia-cuda-mps-control here"


def _horovod() -> str | None:
    from fluidtune.elastic.backends.horovod_there import horovod_missing

    return horovod_missing()


def _pb2() -> str | None:
    from ray.tune.schedulers.pb2 import PB2

    try:
        PB2(hyperparam_bounds={"x": [0.0, 1.0]})
    except RuntimeError as error:
        return f"this Ray's PB2 says: {error}"
    return None


#: marker -> why its tests cannot run here, None when they can.
_NEEDS = {"gpu": _gpu, "mps": _mps, "horovod": _horovod, "pb2": _pb2}
#: (marker, why) -> how many tests were left out.
_left_out: Counter[tuple[str, str]] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, check in _NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        why = check() if marked else None
        if why is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=why))
            _left_out[marker, why] += len(marked)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        names = {marker.name for marker in item.iter_markers()} & {*_NEEDS, "ray", "faults", "slow"}
        _left_out[" and ".join(sorted(names)) or "unmarked", "deselected by -m or -k"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # in a process of pytest-xdist
        output["left_out"] = [[marker, why, count] for (marker, why), count in _left_out.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Each process has collected all tests.
    for marker, why, count in getattr(node, "workeroutput", {}).get("left_out", []):
        _left_out[marker, why] = count


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _left_out:
        terminalreporter.section("left out")
        for (marker, why), count in sorted(_left_out.items()):
            terminalreporter.line(f"{count} {marker} test{'s' if count > 1 else ''}: {why}")


# --- Ray


class OneRay:
    """At most one Ray lives at a time; tests that want the same one share it."""

    def __init__(self) -> None:
        self._wanted: dict[str, float] | None = None

    def use(self, **resources: float) -> None:
        import ray

        if self._wanted == resources and ray.is_initialized():
            return
        self.stop()
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **resources)
        self._wanted = resources

    def stop(self) -> None:
        self._wanted = None
        import sys

        if "ray" in sys.modules:
            import ray

            ray.shutdown()


@pytest.fixture(scope="session")
def one_ray() -> Iterator[OneRay]:
    ray = OneRay()
    yield ray
    ray.stop()


@pytest.fixture
def ray2(one_ray: OneRay) -> Iterator[None]:
    """A Ray of two CPUs; the test must leave it as it found it."""
    one_ray.use(num_cpus=2)
    yield
    assert_nothing_left()


@pytest.fixture
def ray4(one_ray: OneRay) -> Iterator[None]:
    """A Ray of four CPUs and some of a custom resource."""
    one_ray.use(num_cpus=4, resources={"licence": 2})
    yield
    assert_nothing_left()


@pytest.fixture
def ray_gpus(one_ray: OneRay) -> Iterator[None]:
    """A Ray of four CPUs that believes to have two GPUs."""
    one_ray.use(num_cpus=4, num_gpus=2)
    yield
    assert_nothing_left()


@pytest.fixture
def no_ray(one_ray: OneRay) -> Iterator[None]:
    """No Ray at all: for tests that start their own, in this process or another, or must start none."""
    one_ray.stop()
    yield
    one_ray.stop()


#: Processes of Ray itself.
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


def actor_processes(root: psutil.Process | None = None) -> list[str]:
    """The titles of processes below ``root`` (this one) that are Ray actors or running tasks."""
    titles = []
    for process in (root or psutil.Process()).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::") and not title.startswith(_RAYS_OWN):
            titles.append(f"{title.strip()} (pid {process.pid})")
    return titles


def placement_groups() -> list[str]:
    """The names of placement groups that are not removed."""
    from ray.util.placement_group import placement_group_table

    return [str(g["name"]) for g in placement_group_table().values() if g["state"] != "REMOVED"]


def assert_nothing_left(patience: float = 10.0) -> None:
    """Fail unless every actor process and placement group goes away within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while True:
        left = actor_processes() + placement_groups()
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.05)


@pytest.fixture
def no_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune without its CSV, JSON and TensorBoard loggers, where a test does not look at their files."""
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")

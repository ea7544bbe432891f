"""What all tests share: one Ray cluster at a time, which a test leaves as it found it, and no test left out silently.

What a whole run leaves behind is looked for in `tests.leftovers`.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import pytest
from hypothesis import settings

# Usage statistics would talk to the network at every `ray.init`.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

pytest_plugins = ["tests.leftovers"]

# The same examples in every run; `--hypothesis-profile=default` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=3, help="how often tests/faults kills a driver and a node; workers twice as often"
    )
    parser.addoption("--starts", type=int, default=2, help="how many jobs tests/slurm starts as two users")
    parser.addoption("--at-once", type=int, default=2, help="how many of them at a time")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How often a test kills a driver or a node."""
    return int(request.config.getoption("--kills"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Where coroutines of tests run."""
    return "asyncio"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes with one thread, as in a worker. On a busy machine several threads wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- tests that need what this machine has not


def _gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA GPU here"


def _mps() -> str | None:
    return None if shutil.which("nvidia-cuda-mps-control") else "no nvidia-cuda-mps-control here"


def _pb2() -> str | None:
    from ray.tune.schedulers.pb2 import PB2

    try:
        PB2(hyperparam_bounds={"x": [0.0, 1.0]})
    except RuntimeError as error:
        return f"this Ray's PB2 says: {error}"
    return None


def _labels() -> str | None:
    from ray.util import placement_group

    selects = "bundle_label_selector" in inspect.signature(placement_group).parameters
    return None if selects else "this Ray selects no nodes by labels"


def _lacking(*modules: str, remedy: str) -> str | None:
    # Found and not imported, which takes seconds.
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed: {remedy}" if missing else None


_serve = partial(
    *(_lacking, "starlette", "uvicorn", "httptools", "msgspec", "prometheus_client", "uvloop"),
    remedy="fluidtune[serve]",
)
_trackers = partial(
    _lacking, "wandb", "mlflow", "sqlalchemy", "tensorboard", "tensorboardX", remedy="make test-frameworks"
)
_clients = partial(_lacking, "kserve", "mlserver", remedy="pip install kserve mlserver")


#: Programs that playwright can drive; it needs no browser of its own then.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _browser() -> str | None:
    if CHROMIUM is None:
        return "there is no chromium here"
    lacking = [name for name in ("playwright", "axe_playwright_python") if importlib.util.find_spec(name) is None]
    return f"not installed: pip install {' '.join(lacking).replace('_', '-')}" if lacking else None


def _slurm() -> str | None:
    from tests.slurm.real_slurm import missing

    return missing()


#: marker -> why its tests cannot run here, None when they can.
_NEEDS = {
    **{"gpu": _gpu, "mps": _mps, "pb2": _pb2, "serve": _serve},
    **{"trackers": _trackers, "browser": _browser, "labels": _labels, "slurm": _slurm, "clients": _clients},
}
#: (marker, why) -> how many tests were left out.
_left_out: Counter[tuple[str, str]] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _shares(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        elif item.get_closest_marker("core") and _cluster(item) in _RARE:
            item.add_marker(pytest.mark.xdist_group(_cluster(item)))
    for marker, check in _NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        why = check() if marked else None
        if why is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=why))
            _left_out[marker, why] += len(marked)
    items.sort(key=_place)


def _shares(item: pytest.Item) -> bool:
    """It shares a fixture with other tests of its module, which pytest-xdist would make in each of its processes."""
    fixtures = getattr(item, "_fixtureinfo", None)
    found = [] if fixtures is None else [each[-1] for each in fixtures.name2fixturedefs.values()]
    return any(each.scope == "module" and each.baseid not in ("", "tests") for each in found)


#: The clusters that tests ask for. Those of the shortest tests come last, so that all processes end together.
_CLUSTERS = ("no_ray", None, "ray4", "ray_gpus", "ray2")
#: Those that few tests of core ask for. One process runs them, so that the others need not start such a cluster.
_RARE = ("ray4", "ray_gpus")


def _cluster(item: pytest.Item) -> str | None:
    return next((name for name in getattr(item, "fixturenames", ()) if name in _CLUSTERS), None)


def _place(item: pytest.Item) -> tuple[bool, int]:
    """The longest tests come first; then those that want the same cluster follow each other."""
    return item.get_closest_marker("faults") is None, _CLUSTERS.index(_cluster(item))


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
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"first attempt of {report.nodeid}, which then ran once more")
        terminalreporter.line(report.longreprtext)
    if _left_out:
        terminalreporter.section("left out")
        for (marker, why), count in sorted(_left_out.items()):
            terminalreporter.line(f"{count} {marker} test{'s' if count > 1 else ''}: {why}")


# --- Ray


class OneRay:
    """At most one Ray cluster lives at a time in a process; tests that want the same resources share it."""

    def __init__(self) -> None:
        self._wanted: dict[str, Any] | None = None
        #: A test failed that used the cluster and may have left something there; the next test gets another cluster.
        self.suspect = False
        #: Bytes of the objects that stay in the cluster for as long as it lives.
        self.kept = 0.0

    def use(self, **resources: Any) -> None:
        import ray

        from fluidtune.cluster.forks.quick_nodes import start_quick_nodes

        start_quick_nodes()
        if self._wanted == resources and ray.is_initialized() and not self.suspect:
            return
        self.stop()
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **resources)
        self._wanted = resources

    def stop(self) -> None:
        self._wanted, self.kept, self.suspect = None, 0.0, False
        if "ray" in sys.modules:
            import ray

            ray.shutdown()

    def shared(self, caplog: pytest.LogCaptureFixture, **resources: Any) -> Iterator[None]:
        """The fixture of a test that shares a cluster with others, and must leave it as it found it."""
        self.use(**resources)
        yield
        # The traceback of a logged exception refers to objects.
        caplog.get_records("call").clear()
        if not self.suspect:
            assert_nothing_left()

    def assert_no_objects(self) -> None:
        """Fail unless all objects of the shared cluster's store are freed."""
        if self._wanted is not None and not self.suspect:
            wait_until_nothing(lambda: [f"{n} bytes of objects" for n in [objects_in_store()] if n > self.kept])


_ONE_RAY = OneRay()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    _ONE_RAY.suspect |= report.failed
    return report


@pytest.fixture(scope="session")
def one_ray() -> Iterator[OneRay]:
    yield _ONE_RAY
    _ONE_RAY.stop()


@pytest.fixture(scope="module")
def no_objects_left(one_ray: OneRay) -> Iterator[None]:
    """Once for each module and not for each test, because Ray frees objects only once in a second."""
    yield
    gc.collect()
    one_ray.assert_no_objects()


@pytest.fixture
def ray2(one_ray: OneRay, no_objects_left: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A Ray cluster of two CPUs."""
    yield from one_ray.shared(caplog, num_cpus=2)


@pytest.fixture
def ray4(one_ray: OneRay, no_objects_left: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A Ray cluster of four CPUs and two of a custom resource."""
    yield from one_ray.shared(caplog, num_cpus=4, resources={"licence": 2})


@pytest.fixture
def ray_gpus(one_ray: OneRay, no_objects_left: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A Ray cluster that believes to have four CPUs and two GPUs."""
    yield from one_ray.shared(caplog, num_cpus=4, num_gpus=2)


@pytest.fixture
def no_ray(one_ray: OneRay) -> Iterator[None]:
    """No Ray cluster: for tests that start their own, in this process or another one, or must start none."""
    one_ray.stop()
    yield
    one_ray.stop()


@pytest.fixture
def one_node(no_ray: None) -> Iterator[Any]:
    """A Ray cluster of one node with one CPU. Ray lets it add nodes in the main thread only."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def kept_parameters(ray2: None, one_ray: OneRay) -> Iterator[None]:
    """For ``tune.with_parameters``, whose objects stock Tune keeps until the driver leaves the cluster."""
    yield
    gc.collect()
    time.sleep(1.5)
    one_ray.kept = objects_in_store()


#: Processes of Ray itself.
RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


def actor_processes(root: psutil.Process | None = None) -> list[str]:
    """The titles of processes below ``root`` (this one) that are Ray actors or running tasks."""
    titles = []
    for process in (root or psutil.Process()).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::") and not title.startswith(RAYS_OWN):
            titles.append(f"{title.strip()} (pid {process.pid})")
    return titles


def placement_groups() -> list[str]:
    """The names of placement groups that are not removed."""
    from ray.util.placement_group import placement_group_table

    return [str(g["name"]) for g in placement_group_table().values() if g["state"] != "REMOVED"]


def taken_resources() -> dict[str, float]:
    """How much of each of the cluster's resources is not free."""
    import ray

    free = ray.available_resources()
    return {name: total - free.get(name, 0) for name, total in ray.cluster_resources().items()}


def objects_in_store() -> float:
    """Bytes of the objects in Ray's store."""
    return taken_resources()["object_store_memory"]


def left_in_cluster() -> list[str]:
    """Actors, tasks, placement groups and resources that are not given back."""
    import ray

    named = [f"the actor named {name}" for name in ray.util.list_named_actors(all_namespaces=True)]
    resources = {name: taken for name, taken in taken_resources().items() if name != "object_store_memory"}
    taken = [f"{taken} of {name}" for name, taken in resources.items() if taken > 0]
    return [*actor_processes(), *placement_groups(), *named, *taken]


def wait_until_nothing(left: Callable[[], list[str]], patience: float = 60.0) -> None:
    """Fail unless ``left()`` becomes empty within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while found := left():
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {found}")
        time.sleep(0.05)


def assert_nothing_left() -> None:
    """Fail unless what a test started in the cluster is gone, now or soon."""
    wait_until_nothing(left_in_cluster)

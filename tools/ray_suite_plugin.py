"""The pytest plugin of `tools.ray_suite`: Ray Tune's tests run under stock Ray Tune or under FluidTune.

With the environment variable ``RAY_SUITE_SIDE=fluid``, ``ray.tune.run`` and ``ray.tune.Tuner`` are FluidTune's, put
there as `fluidtune run SCRIPT` does it. The report of a test has the property ``fluidtune`` if FluidTune's executor,
and not only its entry points, took part in the test. On a machine with fewer cores than the tests count on, Ray is
told that there are as many.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest

from fluidtune.tune import manager
from fluidtune.tune.stand_ins import around_init, stand_in

#: The cores that the tests count on: "the unit test only has access to 4 CPUs on Buildkite" (`test_tuner.py`).
CORES = 4


def pytest_configure(config: pytest.Config) -> None:
    if multiprocessing.cpu_count() < CORES:
        # A cluster of a test that does not say how many cores it has takes this number. Ray reads the variable.
        os.environ["RAY_USE_MULTIPROCESSING_CPU_COUNT"] = "1"
        multiprocessing.cpu_count = lambda: CORES
    if os.environ["RAY_SUITE_SIDE"] == "fluid":
        # For the whole run: a test module imports the two names when it is collected.
        around_init(None)
        stand_in(None)


@pytest.fixture(autouse=True)
def _executor_noted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Notes whether FluidTune's actor manager is made in this process while the test runs."""
    made = []
    construct = manager.FluidActorManager.__init__

    def noting(self: manager.FluidActorManager, *args: object) -> None:
        made.append(self)
        construct(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(manager.FluidActorManager, "__init__", noting)
    yield
    if made:
        request.node.user_properties.append(("fluidtune", "1"))

"""Scripts of other people's frameworks: under ``fluidtune run`` each reports what it reports under stock Ray Tune.

A script runs on both sides, one after the other, each with a Ray cluster of its own. A script whose framework is not
installed is left out, and the reason names what is missing. benchmarks/frameworks/requirements.txt has all of them.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from benchmarks.frameworks.catalogue import NEEDS, missing
from benchmarks.frameworks.runs import Outcome, differences, run
from benchmarks.sides import OURS

pytestmark = [pytest.mark.frameworks, pytest.mark.ray, pytest.mark.usefixtures("no_ray"), pytest.mark.timeout(600)]


@functools.cache
def outcome(name: str, side: str) -> Outcome:
    """What the script has found on a side. It runs there once for all tests."""
    return run(name, side)


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> str:
    """The name of a script whose modules are installed."""
    name: str = request.param
    if lacking := missing(name):
        pytest.skip(f"{name} needs {', '.join(lacking)}: pip install -r benchmarks/frameworks/requirements.txt")
    return name


def by_trial(found: Outcome, metric: str) -> dict[str, Any]:
    """Trial -> all values that it reported of a metric, None if it reported none."""
    return {trial: of.get(metric) for trial, of in found["results"].items()}


@pytest.mark.parametrize("framework", NEEDS, indirect=True)
def test_a_script_reports_what_it_reports_under_stock(framework: str) -> None:
    ours, stock = outcome(framework, OURS), outcome(framework, "stock")
    assert stock["errors"] == 0, stock["results"]
    assert ours["trials"] == stock["trials"]
    assert not differences(ours, stock), "\n".join(differences(ours, stock))


@pytest.mark.parametrize("framework", ["accelerate_precision"], indirect=True)
def test_each_trial_of_accelerate_trains_in_the_precision_that_it_asks_for(framework: str) -> None:
    """Accelerate keeps the precision in a singleton of the process."""
    for trial, precision in by_trial(outcome(framework, OURS), "precision").items():
        asked, _ = json.loads(trial)["trial"]
        assert precision == [asked or "no"] * 3, trial


@pytest.mark.parametrize("framework", ["keras_registry"], indirect=True)
def test_no_trial_of_keras_sees_what_another_has_registered(framework: str) -> None:
    registered = by_trial(outcome(framework, OURS), "registered")
    assert registered == {trial: [0, 0, 0] for trial in registered}


@pytest.mark.parametrize("framework", ["lightning_trials"], indirect=True)
def test_lightning_keeps_the_handlers_of_its_log_in_each_trial(framework: str) -> None:
    handlers = by_trial(outcome(framework, OURS), "log_handlers")
    assert handlers == {trial: [1.0, 1.0, 1.0] for trial in handlers}

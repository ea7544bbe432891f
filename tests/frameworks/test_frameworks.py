"""Scripts of other people's frameworks: under ``fluidtune run`` each reports what it reports under stock Ray Tune.

A script runs on both sides, one after the other, each with a Ray cluster of its own. A script whose framework is not
installed is left out, and the reason names what is missing. benchmarks/frameworks/requirements.txt has all of them.
"""

from __future__ import annotations

import pytest

from benchmarks.frameworks.catalogue import NEEDS, missing
from benchmarks.frameworks.runs import differences, run
from benchmarks.sides import OURS

pytestmark = [pytest.mark.frameworks, pytest.mark.ray, pytest.mark.usefixtures("no_ray"), pytest.mark.timeout(600)]


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> str:
    """The name of a script whose modules are installed."""
    name: str = request.param
    if lacking := missing(name):
        pytest.skip(f"{name} needs {', '.join(lacking)}: pip install -r benchmarks/frameworks/requirements.txt")
    return name


@pytest.mark.parametrize("framework", NEEDS, indirect=True)
def test_a_script_reports_what_it_reports_under_stock(framework: str) -> None:
    ours, stock = run(framework, OURS), run(framework, "stock")
    assert stock["errors"] == 0, stock["results"]
    assert ours["trials"] == stock["trials"]
    assert not differences(ours, stock), "\n".join(differences(ours, stock))

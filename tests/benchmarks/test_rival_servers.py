"""The baselines answer or refuse every request once."""

from __future__ import annotations

import pytest

from benchmarks.rival_servers.clipper import Clipper
from benchmarks.rival_servers.clockwork import Clockwork
from benchmarks.rival_servers.nexus import Nexus
from benchmarks.rival_servers.serve_batch import ServeBatch
from benchmarks.rival_servers.shepherd import PreemptiveSimulation, Shepherd
from benchmarks.serve_arrivals import arrivals
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile


@pytest.mark.parametrize(
    "make",
    [
        lambda models: Nexus(models, {"a": 0.4, "b": 0.2}),
        Clockwork,
        Shepherd,
        lambda models: Shepherd(models, heads=False),
        Clipper,
        lambda models: ServeBatch(models, 8, 1.5, 16),
    ],
)
@pytest.mark.parametrize("load", [0.3, 3.0])
def test_every_request_is_answered_or_refused_once(make, load):
    """The simulation counts each request once, and fails if one is left."""
    models = [Model(name, Profile.linear(1.0, 5.0, 16), 12.0) for name in "ab"]
    rates = {"a": 0.4 * load, "b": 0.2 * load}
    requests = list(zip(range(300), arrivals(rates, dict.fromkeys("ab", 12.0), 1, 0.4), strict=False))
    last = requests[-1][1].arrival
    simulation = PreemptiveSimulation(make(models), 3, iter([one for _, one in requests]), 0.0, last)
    outcome = simulation.run()
    assert sum(count.total for count in outcome.models.values()) == 300
    if load < 1:
        assert outcome.bad_rate < 0.4
    assert max(outcome.busy.values()) <= last * (1 + 1e-9)

"""Goodput and use of GPUs on the twin, against the paper's figures. Whole searches are in `benchmarks.serve`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.serve import Trial, median_queueing, model, ours, simulate
from benchmarks.serve_twin import MeasuredSimulation
from symphony_serve.errors import ServeError
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.twin import ModelCount, Simulation
from tests.serve.driving import staggered

TRIAL = Trial(2.0, 10.0, 1, 0.005)
RESNET = (1.053, 5.072, 25.0)
INCEPTION = (5.090, 18.368, 70.0)


@pytest.mark.slow
class TestTable2:
    """One model on 8 GPUs, Poisson."""

    @pytest.mark.parametrize(("profile", "rate", "batch"), [(RESNET, 5200, 14), (INCEPTION, 915, 8)])
    def test_deferred_starts_bear_what_the_paper_says(self, profile, rate, batch):
        outcome = simulate(ours, [model("m", *profile)], 8, rate, TRIAL)
        assert outcome.worst_bad_rate <= 0.01
        assert outcome.median_batch() >= batch


class TestSimulation:
    def test_what_is_counted(self):
        """Figure 4's model: requests at 0, 0.75, ..; those of the first 3 s are not counted."""
        one = Model("m", Profile.linear(1.0, 5.0, 16), 12.0)
        outcome = MeasuredSimulation(Scheduler([one]), 3, iter(staggered("m", 24, 0.75, 12.0)), 3.0, 13.5).run()
        assert outcome.models == {"m": ModelCount(good=19)}
        assert outcome.batches == {4: 16, 3: 3}
        assert outcome.median_batch() == 4
        assert median_queueing(outcome) == pytest.approx(1.5)
        assert outcome.busy == pytest.approx({0: 8.25 + 5.25, 1: 11.25, 2: 8.25})
        assert outcome.utilisation == pytest.approx(33.0 / 40.5)

    def test_a_server_that_forgets_requests_is_found_out(self):
        silent = SimpleNamespace(handle=lambda event, now: [])
        with pytest.raises(ServeError, match="2 requests are neither"):
            Simulation(silent, 1, iter(staggered("m", 2, 1.0, 5.0)), 0.0, 10.0).play()

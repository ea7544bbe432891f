"""What a job with rungs tells the arbiter that it has to do, while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import HyperBandScheduler

from fluidtune.tune import leased_devices
from fluidtune.tune.tuning_job import TuningJob
from tests.tune.running import fit
from tests.tune.trainables import Stepper

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray2")]


def test_rungs_to_come_are_told_from_the_start(tmp_path: Path, monkeypatch: Any) -> None:
    told: list[float] = []
    decide = TuningJob.decide

    def decided(self: TuningJob, *args: Any) -> Any:
        instructions = decide(self, *args)
        progress = leased_devices.Progress(lambda: self.engine, self.trials.rungs_after, None, None)
        progress.update({})
        views = self.engine.trials.values()
        left = sum(job.iters_remaining for jobs in progress.valuation(1.0, 1).phases for job in jobs)
        told.append(sum(view.done for view in views) + left)
        return instructions

    monkeypatch.setattr(TuningJob, "decide", decided)
    space = {"x": tune.grid_search(list(range(17)))}
    results = fit("fluid", Stepper, space, tmp_path, scheduler=HyperBandScheduler(max_t=9, reduction_factor=3))
    done = sum(result.metrics["training_iteration"] for result in results)
    assert done == 75
    # 51 of them in the first rungs. While a trial goes on without a pause, what follows counts twice for a moment.
    assert min(told) >= done
    assert sum(total < done + 1 for total in told) > 0.9 * len(told)

"""The trials of a run are read without the results that they have reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from ray import tune
from ray.tune import ExperimentAnalysis, RunConfig, TuneConfig, Tuner

from fluidtune.ray_compat.run_state import trials_of
from fluidtune.serving.winners import winners
from tests.tune.trainables import report_saved

pytestmark = pytest.mark.ray


def train(config: dict[str, Any]) -> None:
    for step in range(3):
        report_saved(step, {"score": step * config["factor"]})


def test_no_result_file_is_opened_and_nothing_else_is_missing(one_ray: Any, tmp_path: Path) -> None:
    """Seen: with `serve --follow`, requests waited at each look at a long search."""
    one_ray.use(num_cpus=2)
    ranked = TuneConfig(metric="score", mode="max")
    given = RunConfig(name="run", storage_path=str(tmp_path), verbose=0)
    Tuner(train, param_space={"factor": tune.grid_search([1, 2])}, tune_config=ranked, run_config=given).fit()
    where = str(tmp_path / "run")
    wanted = ExperimentAnalysis(where).trials
    for path in tmp_path.rglob("result.json"):
        path.write_text("no JSON")  # Who reads it, fails or says so.
    opened: list[str] = []

    class Files(pyarrow.fs.FSSpecHandler):  # type: ignore[misc]
        def open_input_stream(self, path: str) -> Any:
            opened.append(Path(path).name)
            return super().open_input_stream(path)

    import fsspec

    found = trials_of(where, pyarrow.fs.PyFileSystem(Files(fsspec.filesystem("file"))))
    assert [(one.trial_id, one.status, one.config, one.last_result, one.checkpoint.path) for one in found] == [
        (one.trial_id, one.status, one.config, one.last_result, one.checkpoint.path) for one in wanted
    ]
    assert len(opened) == 1 and opened[0].startswith("experiment_state")
    assert [one.value for one in winners(where, 2, "score", "max")] == [4, 2]

"""What a script may do around ``fit``: start and stop Ray in a loop, remove its folder, fit twice, run as a module."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
from ray import tune

import fluidtune
from tests.contracts.processes import python
from tests.tune.running import outcome
from tests.tune.trainables import score, without_checkpoints


@pytest.mark.newest
@pytest.mark.ray
@pytest.mark.usefixtures("no_ray")
def test_ray_is_started_and_stopped_around_two_jobs_of_one_process(tmp_path: Path) -> None:
    # Seen: the script died with status 1 in its second or third round. Fifty rounds: `python -m tests.faults.rounds`
    said = python("-m", "tests.faults.rounds", "--rounds", "2", "--within", str(tmp_path))
    assert len(re.findall(r"^round \d+: ", said, re.MULTILINE)) == 2
    assert not list(tmp_path.iterdir()), "removed, and there again"


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
def test_one_tuner_fits_twice(tmp_path: Path) -> None:
    # Seen: the second `fit()` raised "You passed a `metric` or `mode` argument".
    found = {}
    for side, kind in (("stock", tune.Tuner), ("fluid", fluidtune.Tuner)):
        tuner = kind(
            without_checkpoints,
            param_space={"x": tune.grid_search([1, 2]), "n": 3},
            tune_config=tune.TuneConfig(metric="score", mode="max"),
            run_config=tune.RunConfig(name=side, storage_path=str(tmp_path), verbose=0),
        )
        fits = [tuner.fit(), tuner.fit()]
        found[side] = [outcome(results) for results in fits]
        assert len({result.path for results in fits for result in results}) == 4
    assert found["stock"] == found["fluid"] == [[(x, 3, score(x, 3)) for x in (1, 2)]] * 2


@pytest.mark.parametrize(
    ("given", "kind"), [(None, "FIFOScheduler"), ("fifo", "FIFOScheduler"), ("hyperband", "HyperBandScheduler")]
)
def test_an_algorithm_that_is_no_object_of_the_script_is_new_in_each_run(given: str | None, kind: str) -> None:
    scheduler = fluidtune.FluidScheduler(given)  # type: ignore[arg-type]
    first, second = [(scheduler.set_search_properties("score", "max"), scheduler.base_scheduler) for _ in range(2)]
    assert first[0] and second[0] and first[1] is not second[1]
    assert type(first[1]).__name__ == type(second[1]).__name__ == kind
    assert scheduler.adapter._base is second[1]


def test_an_algorithm_of_the_script_is_the_same_in_each_run() -> None:
    scheduler = fluidtune.FluidScheduler(base := tune.schedulers.FIFOScheduler())
    again = pickle.loads(pickle.dumps(scheduler))
    assert [scheduler.set_search_properties("score", "max") for _ in range(2)] == [True, False]
    assert scheduler.base_scheduler is base and again.set_search_properties("score", "max")


def test_of_a_pickled_scheduler_only_what_is_of_one_run_is_left_out() -> None:
    """Tune pickles it for a later restore. Seen: a subclass lost its own attributes, and a copy had no mode."""
    scheduler = fluidtune.FluidScheduler(tune.schedulers.FIFOScheduler())
    settings = {"base_scheduler", "executor", "kept"}
    for made in (fluidtune.FluidScheduler(), scheduler):
        made.own, made.extension = "own", object()  # type: ignore[attr-defined,assignment]
        assert made.__getstate__().keys() - {"_make_base"} == {*settings, "own"}
    again = pickle.loads(pickle.dumps(scheduler))
    assert (again.own, again.mode, again.extension, again._begun) == ("own", None, None, False)


MODULES = {
    "__init__.py": "",
    "numbers_of.py": "def double(x):\n    return 2.0 * x\n",
    "search.py": """
import json, sys

import ray
from ray import tune

import fluidtune
from package.numbers_of import double  # pickled by reference: workers import it

def loop(config):
    from package import numbers_of

    for iteration in range(2):
        tune.report({"score": double(config["x"]) * iteration, "same": numbers_of.double is double})

if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    run = tune.RunConfig(name="fluid", storage_path=sys.argv[1], verbose=0)
    results = fluidtune.Tuner(loop, param_space={"x": tune.grid_search([1, 2, 3])}, run_config=run).fit()
    names = ("training_iteration", "score", "same")
    ended = [(result.config["x"], *(result.metrics[name] for name in names)) for result in results]
    print("ENDED", json.dumps([ended, [str(error) for error in results.errors]]))
""",
}


@pytest.mark.ray
@pytest.mark.usefixtures("no_ray")
def test_a_script_that_is_run_as_a_module_of_a_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, text in MODULES.items():
        (package / name).write_text(text)
    printed = python("-m", "package.search", str(tmp_path / "storage"), cwd=tmp_path)
    (said,) = [line for line in printed.splitlines() if line.startswith("ENDED")]
    assert json.loads(said.removeprefix("ENDED")) == [[[x, 2, 2.0 * x, True] for x in (1, 2, 3)], []]

"""What `tools.ray_boundary` reports, and that the project is clean."""

from __future__ import annotations

import pytest

from tools import ray_boundary
from tools.ray_boundary import accesses

RAYS = frozenset({"_storage", "_mode"})
ELSEWHERE = frozenset({"_base", "_job"})


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import ray._private.worker", "ray._private.worker"),
        ("import ray._private.state as state", "ray._private.state"),
        ("from ray.train._internal.session import get_session", "ray.train._internal.session.get_session"),
        ("from ray.tune.schedulers.hyperband import _Bracket", "ray.tune.schedulers.hyperband._Bracket"),
        ("def late():\n    from ray.tune.execution import tune_controller", "ray.tune.execution.tune_controller"),
        ("from ray import tune\ntune.result.TRIAL_INFO", "ray.tune.result"),
        ("import_module('ray._private.state')", "ray._private.state"),
        ("controller._storage.experiment_dir_name", "_storage"),
        ("tracked._on_stop(tracked)", "_on_stop"),
        ("getattr(scheduler, '_mode', None)", "_mode"),
        ("setattr(controller, '_actor_manager', ours)", "_actor_manager"),
        ("operator.attrgetter('bracket._live_trials')", "_live_trials"),
        ("vars(stopper)['_max_iter']", "_max_iter"),
        ("class Tuner(Base):\n    def fit(self): return self._local_tuner", "_local_tuner"),
        ("class Ours:\n    _mode = None\ndef f(scheduler): return scheduler._mode", "_mode"),
        ("from fluidtune.tune.api import Tuner\nTuner()._local_tuner", "_local_tuner"),
    ],
)
def test_an_access_is_found(source: str, name: str) -> None:
    assert name in [access.name for access in accesses(source, ELSEWHERE, RAYS)]


@pytest.mark.parametrize(
    "source",
    [
        "from ray import tune\ntune.run(print)\ntune.search.Searcher",
        "from ray.tune.experiment import Trial\nTrial.PENDING",
        "'a sentence about ray._private.state'",
        "class Ours:\n    def __init__(self, other):\n        self._x = other._x",
        "class Ours(Base):\n    def f(self): return self._job",
        "class Ours:\n    def __init__(self): self._mode = None\n    def f(self): return self._mode",
        "from fluidtune.tune import api\napi._wrapped(1)",
        "from typing import NamedTuple\nfound._replace(line=1)._asdict()",
    ],
)
def test_what_is_no_access_is_not_reported(source: str) -> None:
    assert accesses(source, ELSEWHERE, RAYS) == []


def test_a_test_may_look_into_our_objects_and_not_into_ray_s() -> None:
    source = "manager._job\ncontroller._storage\npbt._trial_state"
    assert [access.name for access in accesses(source, ELSEWHERE | {"_storage"}, RAYS, test=True)] == [
        "_storage",
        "_trial_state",
    ]


def test_the_names_of_the_list_are_read() -> None:
    source = '"""Title.\n\n- ``Tuner._local_tuner``, ``_Bracket._n``: why.\n- ``TuneController.cleanup``: why.\n"""'
    assert ray_boundary.listed_names(source) == {"_local_tuner", "_n"}


@pytest.mark.slow
def test_an_exception_that_is_not_needed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ray_boundary.EXCEPTIONS, ("fluidtune/errors.py", "_storage"), "a reason")
    assert [(file, found.name) for file, found in ray_boundary.project_accesses()] == [
        ("fluidtune/errors.py", "_storage")
    ]

"""A finished run to serve, and what fronts keep, for the modules of this directory."""

from __future__ import annotations

import shutil

import pytest

from fluidtune.ray_compat import kept_state
from tests.conftest import assert_nothing_left
from tests.serving.runs import run


@pytest.fixture(scope="session")
def finished_run(one_ray, tmp_path_factory):
    """The directory of a finished run, in which nothing was served."""
    one_ray.use(num_cpus=2)
    return run(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def finished(finished_run, one_ray, tmp_path_factory):
    """The directory of a finished run, and a cluster of two CPUs that is left as it was found."""
    one_ray.use(num_cpus=2)
    yield shutil.copytree(finished_run, tmp_path_factory.mktemp("results") / finished_run.name)
    assert_nothing_left()


@pytest.fixture
def kept(monkeypatch):
    """By name, what fronts keep for the next one. Each front is called "front"."""
    kept = {}
    monkeypatch.setattr(kept_state, "own_name", lambda: "front")
    does = {"keep": kept.__setitem__, "kept": kept.get, "forget": lambda name: kept.pop(name, None)}
    for name, stand_in in does.items():
        monkeypatch.setattr(kept_state, name, stand_in)
    return kept

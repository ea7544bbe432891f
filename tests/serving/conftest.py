"""A finished run to serve, and `fluidtune serve plan --models`, for the modules of this directory."""

from __future__ import annotations

import shutil
import sys

import pytest
from click.testing import CliRunner

from fluidtune.cli import cli
from fluidtune.errors import FluidTuneError
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


@pytest.fixture
def plan_said(tmp_path, monkeypatch):
    """Run `fluidtune serve plan --models` on this text of a file, without Ray: what was said."""
    monkeypatch.setitem(sys.modules, "ray", None)

    def ask(text: str, *options: str) -> str:
        path = tmp_path / "models.toml"
        path.write_text(text)
        done = CliRunner().invoke(cli, ["serve", "plan", "--models", str(path), *options])
        if isinstance(done.exception, FluidTuneError):
            said = str(done.exception)
            assert "\n" not in said
            return said
        assert done.exception is None, done.exception
        return done.output

    return ask

"""``ray.tune.run`` and ``ray.tune.Tuner`` are where we replace them. Needs no running Ray."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from ray import tune
from ray.tune import TuneConfig

from fluidtune.ray_compat.entry_points import RAY_RUN, RAY_TUNER, replace, tune_config


def test_a_tuner_s_configuration_is_where_we_read_it(tmp_path: Any) -> None:
    config = TuneConfig(num_samples=3)
    assert tune_config(tune.Tuner(lambda config: None, tune_config=config)) is config


def test_a_script_finds_ours_wherever_it_imports_them_from_and_rays_afterwards() -> None:
    places = [importlib.import_module(name) for name in ("ray.tune", "ray.tune.tune", "ray.tune.tuner")]

    def found() -> set[Any]:
        return {getattr(place, name) for place in places for name in ("run", "Tuner") if hasattr(place, name)}

    class Ours:
        pass

    assert found() == {RAY_RUN, RAY_TUNER}
    try:
        replace(print, Ours)
        assert found() == {print, Ours}
    finally:
        replace(RAY_RUN, RAY_TUNER)
    assert found() == {RAY_RUN, RAY_TUNER}


def test_a_tuner_over_ray_client_has_no_configuration_here_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from fluidtune.tune.api import Tuner

    tuner = Tuner.__new__(Tuner)
    vars(tuner).update(_is_ray_client=True, _remote_tuner=None)
    assert tune_config(tuner) is None
    monkeypatch.setattr(RAY_TUNER, "fit", lambda self: "the results")
    assert tuner.fit() == "the results"

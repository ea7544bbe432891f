"""Keras 3 networks in trials: what is reported, and that a trial that was paused goes on as if it had not been."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ray import tune
from ray.tune.schedulers import HyperBandScheduler

import fluidtune

pytestmark = [pytest.mark.ray, pytest.mark.keras, pytest.mark.usefixtures("ray2")]

os.environ.setdefault("KERAS_BACKEND", "torch")


def train(config):
    """A trial: an ordinary Keras fit, whose order of batches depends on the epoch alone."""
    import keras

    from fluidtune.integrations.keras import ReportCallback, restored

    keras.utils.set_random_seed(config["seed"])
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    y = (x[:, :3].sum(axis=1) > 0).astype("float32")

    def network():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    model, start = restored(network)
    callbacks = [ReportCallback(config.get("metrics"), every=config.get("every", 1))]
    if config.get("stop"):
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=partial(stop, model, config["stop"])))
    model.fit(x, y, initial_epoch=start, epochs=9, shuffle=False, batch_size=16, callbacks=callbacks, verbose=0)


def stop(model, after, epoch, logs):
    model.stop_training = epoch + 1 == after


def losses(result):
    return list(result.metrics_dataframe["loss"])


def test_a_trial_that_hyperband_pauses_reports_what_it_reports_undisturbed(tmp_path):
    search = {"seed": tune.grid_search([1, 2, 3, 4])}
    run = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    band = HyperBandScheduler(max_t=9, reduction_factor=3, metric="loss", mode="min")
    grid = fluidtune.Tuner(
        train, param_space=search, tune_config=tune.TuneConfig(scheduler=band), run_config=run
    ).fit()
    alone = tune.Tuner(train, param_space=search, run_config=run).fit()
    assert not grid.errors and not alone.errors
    expected = {each.config["seed"]: losses(each) for each in alone}
    assert {len(each) for each in expected.values()} == {9}
    for each in grid:
        got = losses(each)
        assert got == pytest.approx(expected[each.config["seed"]][: len(got)], rel=1e-6)
    assert max(len(losses(each)) for each in grid) == 9


def test_every_third_epoch_and_the_last_are_reported_under_the_names_asked_for(tmp_path):
    config = {"seed": 1, "metrics": {"entropy": "loss"}, "every": 4}
    run = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    (result,) = fluidtune.Tuner(train, param_space=config, run_config=run).fit()
    assert len(result.metrics_dataframe["entropy"]) == 3  # after epochs 4, 8 and 9
    assert "loss" not in result.metrics


def test_the_last_epoch_is_reported_where_the_training_ends_early(tmp_path):
    run = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    (result,) = fluidtune.Tuner(train, param_space={"seed": 1, "every": 4, "stop": 6}, run_config=run).fit()
    assert len(losses(result)) == 2  # after epochs 4 and 6
    assert json.loads(Path(result.checkpoint.path, "epochs.json").read_text()) == 6


def test_a_metric_that_keras_has_not_logged_is_named(tmp_path):
    run = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    (result,) = fluidtune.Tuner(train, param_space={"seed": 1, "metrics": "accuracy"}, run_config=run).fit()
    assert "Keras has not logged accuracy in this epoch, but loss" in str(result.error)


def test_less_than_one_epoch_is_refused():
    from fluidtune.integrations.keras import ReportCallback

    with pytest.raises(ValueError, match="every=0: give a number of epochs, at least 1"):
        ReportCallback(every=0)

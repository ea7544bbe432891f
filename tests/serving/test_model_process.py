"""The process of a device, without a process: what it loads, and what becomes of each input of a batch."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys

import numpy as np
import pytest
from ray.tune import Checkpoint

from fluidtune.errors import FluidTuneError
from fluidtune.serving import model_process
from fluidtune.serving.model_process import Loading, ModelProcess, _grown
from fluidtune.serving.winners import Winner
from symphony_serve.errors import ServeError
from tests.serving.runs import FAILS, load


@pytest.fixture
def winner(tmp_path):
    (tmp_path / "factor.json").write_text("3")
    return Winner("t", Checkpoint.from_directory(tmp_path), {"factor": 3}, 3.0)


def outcomes(load, winner, inputs):
    return [(status, json.loads(text)) for status, text in ModelProcess(Loading.of(load, [winner])).run("t", inputs)[0]]


def made(function, samples=(1,)):
    """A ``load`` whose model is this function."""
    if samples is not None:
        function.samples = samples
    return lambda directory, config: function


def test_a_batch_is_answered(winner):
    assert outcomes(load, winner, [1, 2]) == [(200, 3), (200, 6)]


def test_an_input_that_the_model_fails_with_does_not_reach_its_neighbours(winner):
    said = (500, {"error": "the model failed: ValueError('a negative number')", "code": "model_failed"})
    assert outcomes(load, winner, [1, FAILS, 2]) == [(200, 3), said, (200, 6)]


def test_a_measurement_fails_where_the_model_fails(winner):
    with pytest.raises(ValueError, match="a negative number"):
        ModelProcess(Loading.of(load, [winner])).measure("t", [1, FAILS])


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (made(lambda values: values, samples=None), "has no samples; set its attribute samples"),
        (made(lambda values: [1, 2]), "returned 2 outputs for 1 inputs; return as many"),
        (made(lambda values: [object()]), "no JSON value .*; return numbers"),
        (made(lambda values: [float("nan")]), "no JSON value"),
        (made(lambda values: 1 / 0), "fails with its own samples: ZeroDivisionError"),
        (made(lambda values: values, samples=[object()]), "has a value of type object"),
        (made(lambda values: values, samples=np.zeros((2, 3))), "samples of trial t are a ndarray, expected a list of"),
        (made(lambda values: values, samples=[np.zeros(3)]), "has a value of type ndarray, expected what JSON has"),
        (made(lambda values: values, samples=7), "samples of trial t are a int, expected a list"),
        (made(lambda values: values, samples="text"), "samples of trial t are a str, expected a list"),
        (lambda directory, config: 7, "load returned int for trial t, expected a function"),
        (lambda directory, config: config["missing"], "trial t does not load: KeyError.*; check load"),
    ],
)
def test_models_that_are_refused(winner, load, said):
    with pytest.raises(ServeError, match=said):
        ModelProcess(Loading.of(load, [winner]))


def test_a_load_that_cannot_be_sent(winner):
    import threading

    lock = threading.Lock()
    with pytest.raises(FluidTuneError, match="cannot be sent to another process"):
        Loading.of(lambda directory, config: lock, [winner])


def test_a_load_whose_module_the_process_does_not_find(winner, tmp_path, monkeypatch):
    (tmp_path / "found_here_only.py").write_text("def load(directory, config): ...")
    with monkeypatch.context() as here:
        here.syspath_prepend(str(tmp_path))
        loading = Loading.of(importlib.import_module("found_here_only").load, [winner])
    sys.modules.pop("found_here_only")
    elsewhere = dataclasses.replace(loading, paths=())
    with pytest.raises(ServeError, match=r"load cannot be imported on .*found_here_only.*; put its module where"):
        ModelProcess(elsewhere)


@pytest.mark.parametrize("inputs", [[1, 2], [1]])
def test_a_process_whose_gpu_has_failed_ends(winner, monkeypatch, inputs):
    """CUDA cannot be used any more after a failed kernel: every later batch would fail. docs/bugs.md, 351."""
    calls = []

    def model(values):
        calls.append(values)
        if len(calls) > 1:  # the first one is its own sample
            raise RuntimeError("CUDA error: device-side assert triggered")
        return values

    process = ModelProcess(Loading.of(made(model), [winner]))
    calls[:] = [0]
    monkeypatch.setattr(model_process, "cuda_failure", lambda: "device-side assert triggered")
    monkeypatch.setattr("os._exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    with pytest.raises(SystemExit) as ended:
        process.run("t", inputs)
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("before", "after", "bytes_"),
    [((0, 500), (0, 530), 30), ((0, 500), (40, 3000), 40), ((40, 3000), (60, 3100), 20), ((40, 3000), (40, 2900), 0)],
)
def test_a_models_bytes_are_those_of_the_gpu_if_it_has_any_there(before, after, bytes_):
    """On a GPU the first model has brought the process' own memory there. docs/bugs.md, 535."""
    assert _grown(before, after) == bytes_


def exits(*given):
    sys.exit(3)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (exits, r"the checkpoint of trial u does not load: SystemExit\(3\); check load"),
        (made(exits), r"the model of trial u fails with its own samples: .*SystemExit\(3\)"),
    ],
)
def test_a_model_that_exits_is_one_that_fails_and_the_others_of_its_process_stay(winner, load, said):
    """docs/bugs.md, 594."""
    exiting = dataclasses.replace(winner, name="u", load=Loading.of(load, []).load)
    with pytest.raises(ServeError, match=said):
        ModelProcess(Loading.of(load, [exiting]))
    process = ModelProcess(Loading.of(made(lambda values: values), [winner]))
    process._hold(exiting)
    with pytest.raises(ServeError, match=said):
        process.held("u")


def test_a_model_that_exits_with_an_input_fails_with_that_input(winner):
    """docs/bugs.md, 594."""

    def function(values):
        return exits() if 2 in values else values

    (_, first), (status, said) = outcomes(made(function), winner, [1, 2])
    assert (first, status, said["code"]) == (1, 500, "model_failed")

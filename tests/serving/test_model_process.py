"""The process of a model, without a process: what it loads, what a model gets, and what becomes of each input."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.tune import Checkpoint

from benchmarks.common import ROOT
from fluidtune.errors import BadInput, FluidTuneError
from fluidtune.serving import model_process
from fluidtune.serving.loaded_model import LoadedModel, Packed
from fluidtune.serving.model_layers import as_function
from fluidtune.serving.model_process import CONTEXT, Loading, ModelProcess, Passed, Started, _grown
from fluidtune.serving.winners import Winner
from symphony_serve.errors import ServeError
from tests.serving import runs
from tests.serving.runs import FAILS, load


@pytest.fixture
def winner(tmp_path):
    (tmp_path / "factor.json").write_text("3")
    return Winner("t", Checkpoint.from_directory(tmp_path), {"factor": 3}, 3.0)


def outcomes(load, winner, inputs):
    process = ModelProcess(Loading.of(load, [winner]))
    return [(status, json.loads(text)) for status, text in process.run(batch(inputs)).value]


def batch(inputs):
    return Passed(list(map(Packed.of, inputs)), len(inputs))


def exits(*given):
    sys.exit(3)


def made(function, samples=(1,)):
    """A ``load`` whose model is this function."""
    if samples is not None:
        function.samples = samples
    return lambda directory, config: function


def test_a_measurement_fails_where_the_model_fails_and_tells_the_line(winner, capsys):
    status, said = ModelProcess(Loading.of(load, [winner])).measure(batch([1, FAILS])).failed
    assert status == 500 and "a negative number" in said
    assert f'File "{runs.__file__}", line' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (made(lambda values: values, samples=None), "has no samples; set its attribute samples"),
        (made(lambda values: [1, 2]), "returned 2 outputs for 1 inputs; return as many"),
        (made(lambda values: [object()]), "no JSON value .*; return numbers"),
        (made(lambda values: [float("nan")]), "no JSON value"),
        (made(lambda values: 1 / 0), "fails with its own samples: ZeroDivisionError"),
        (made(lambda values: values, samples=[object()]), "has a value of type object"),
        (
            made(lambda values: values, samples=np.array(["a"])),
            r"at one place \('<U1', 0\); give arrays of one",
        ),
        (
            made(lambda values: values, samples=[np.zeros(3), 1]),
            r"at one place \('float64', 1\), int; give",
        ),
        (made(lambda values: [BadInput("dark")] * len(values)), "fails with one of its samples: dark"),
        (made(lambda values: values, samples=7), "samples of trial t are a int, expected a list"),
        (made(lambda values: values, samples="text"), "samples of trial t are a str, expected a list"),
        (lambda directory, config: 7, "load returned int for trial t, expected a function"),
        (lambda directory, config: config["missing"], "trial t does not load: KeyError.*; check load"),
        (exits, r"the checkpoint of trial t does not load: SystemExit\(3\); check load"),
        (made(exits), r"the model of trial t fails with its own samples: .*SystemExit\(3\)"),
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
    """CUDA cannot be used any more after a failed kernel. Seen: the model answered 500 for ever."""
    calls = []

    def model(values):
        calls.append(values)
        if len(calls) > 1:  # the first one is its own sample
            raise RuntimeError("CUDA error: device-side assert triggered")
        return values

    process = ModelProcess(Loading.of(made(model), [winner]))
    calls[:] = [0]
    monkeypatch.setattr(model_process, "failure_of_device", lambda: "device-side assert triggered")
    monkeypatch.setattr("os._exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    with pytest.raises(SystemExit) as ended:
        process.run(batch(inputs))
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("before", "after", "bytes_"),
    [((0, 500), (0, 530), 30), ((0, 500), (40, 3000), 40 + CONTEXT), ((0, 3000), (0, 2900), 0)],
)
def test_a_models_bytes_are_those_of_the_gpu_if_it_has_any_there(before, after, bytes_):
    assert _grown(before, after) == bytes_


class Unsaid(BaseException):
    """Says nothing of itself."""

    def __repr__(self):
        raise self


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (SystemExit(3), 500, "the model failed: RuntimeError('it ends its process: SystemExit(3)')"),
        (KeyboardInterrupt(), 500, "the model failed: RuntimeError('it ends its process: KeyboardInterrupt()')"),
        (Unsaid(), 500, "ends its process: Unsaid, whose text fails with Unsaid"),
        (asyncio.CancelledError("a\nb"), 500, "CancelledError"),
        (ValueError("x" * 100_000), 500, "xxx..."),
        (BadInput("too\ndark"), 400, "too dark"),
    ],
)
def test_what_a_model_raises_with_an_input_is_one_short_line_for_that_input_alone(winner, error, status, said):
    def function(values):
        if 2 in values:
            raise error
        return values

    first, found, last = outcomes(made(function), winner, [1, 2, 3])
    assert (first, last, found[0]) == ((200, 1), (200, 3), status)
    assert said in found[1]["error"] and len(found[1]["error"]) < 400 and "\n" not in found[1]["error"]


def test_an_exception_in_place_of_an_output_is_the_error_of_that_input_without_another_run(winner):
    def function(values):
        return [{1: len(values), 2: BadInput("dark"), 3: ValueError("odd"), 4: object()}[value] for value in values]

    found = outcomes(made(function), winner, [1, 2, 3, 4])
    assert found[:2] == [(200, 4), (400, {"error": "dark", "code": "bad_input"})]
    assert [(status, said["code"]) for status, said in found[2:]] == [(500, "model_failed")] * 2


@pytest.mark.parametrize("kind", [list, np.array])
def test_inputs_that_a_failed_batch_has_changed_are_tried_again_as_they_came(winner, kind):
    def halve(rows):
        for row in rows:
            row[0] /= 2
            if row[1]:
                raise ValueError("odd")
        return [row[0] for row in rows]

    rows = [kind([2.0 * number, float(number % 7 == 6)]) for number in range(360)]
    samples = [kind([1.0, 0.0])]
    process = ModelProcess(Loading.of(made(halve, samples), [winner]))
    found = [one for at in range(0, 360, 9) for one in process.run(batch(rows[at : at + 9])).value]
    assert [text for status, text in found if status == 200] == [f"{n}.0" for n in range(360) if n % 7 != 6]
    assert process.ready(Started()).samples.inputs[0][0] == 1.0


@pytest.mark.slow
def test_the_example_loads_a_checkpoint_of_the_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "examples")])
    import serve_digits

    network = serve_digits.network(4)
    torch.save({"model": network.state_dict()}, tmp_path / "state.pt")
    winner = Winner("t", Checkpoint.from_directory(tmp_path), {"width": 4}, 0.5)
    images = serve_digits.digits()[1].tensors[0][:3]
    expected = network(images).argmax(1).tolist()
    found = outcomes(serve_digits.load, winner, images[:, 0].tolist())
    assert [(status, said["digit"]) for status, said in found] == [(200, digit) for digit in expected]


# What a model gets of the inputs that came: the types, shapes and kinds of its samples, whatever is beside them.

NUMBERS = st.lists(st.integers(-99, 99) | st.integers(-99, 99).map(float), min_size=3, max_size=3)


def loaded(samples, function=list):
    def model(inputs):
        model.got = inputs
        return function(inputs)

    model.samples = samples
    return LoadedModel("t", model), model


def answers(model, inputs):
    return [json.loads(text) for _, text in model.attempt([Packed.of(one) for one in inputs])]


@given(
    st.lists(NUMBERS, min_size=1, max_size=5), st.sampled_from([[[1, 2, 3]], [[1, 2.0, 3]], [[1, 2, 3], [0.5, 1, 1]]])
)
def test_an_answer_does_not_depend_on_the_inputs_beside_it(rows, samples):
    """Seen: a model of whole numbers answered `[1.9, 3]` as if it were `[1, 3]`, with 200."""
    kinds, _ = loaded(samples, lambda rows: [str(torch.tensor(rows).dtype)] * len(rows))
    assert answers(kinds, rows) == [answer for row in rows for answer in answers(kinds, [row])]
    sequence = torch.nn.Sequential(torch.nn.Identity())
    sequence.samples = samples
    tensors = LoadedModel("t", as_function(sequence))
    assert answers(tensors, rows) == [answer for row in rows for answer in answers(tensors, [row])] == rows


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int64", "bool", "bfloat16"])
def test_inputs_are_what_the_samples_are(dtype, whole):
    tensor = dtype == "bfloat16"
    samples = torch.ones((2, 3), dtype=torch.bfloat16) if tensor else np.ones((2, 3), dtype)
    model, seen = loaded(samples if whole else list(samples))
    row = [1, 0, None if "float" in dtype else 1] if dtype != "bool" else [True, False, True]
    assert answers(model, [row, row]) == [row, row]
    assert len(seen.got) == 2 and type(seen.got) is (type(samples) if whole else list)
    assert type(seen.got[0]) is type(samples[0])
    assert (seen.got[0].dtype, seen.got[0].shape) == (samples.dtype, (3,))
    seen.got[0][0] = 0  # It may be written to.
    came = model.samples.inputs[0] * 0  # As an array, as it comes in the protocol's binary tensors.
    assert answers(model, [came]) == [came.tolist()]


@pytest.mark.parametrize("whole", [True, False])
def test_samples_may_be_dictionaries_of_arrays(whole):
    samples = {"ids": np.array([[1, 2], [3, 4]]), "mask": torch.ones(2, 2, dtype=torch.bool)}
    rows = [{"ids": samples["ids"][at], "mask": samples["mask"][at]} for at in (0, 1)]
    model, seen = loaded(samples if whole else rows, lambda inputs: [1, 2][: len(inputs["ids"]) if whole else 2])
    assert answers(model, [{"ids": [5, 6], "mask": [True, False]}] * 2) == [1, 2]
    got = seen.got if whole else seen.got[0]
    assert (type(got["ids"]), type(got["mask"])) == (np.ndarray, torch.Tensor)
    assert got["mask"].tolist() == ([[True, False]] * 2 if whole else [True, False])


def test_outputs_may_be_arrays_and_what_is_no_number_is_null():
    outputs = [np.array([1.5, np.nan], np.float32), {"a": torch.tensor([2.0, np.inf])}, np.float64("nan"), [np.int8(3)]]
    model, _ = loaded([1], lambda inputs: outputs[: len(inputs)])
    assert answers(model, [1] * 4) == [[1.5, None], {"a": [2.0, None]}, None, [3]]
    (output,) = model.samples.outputs
    assert output.dtype == np.float32

"""What a model gets of the inputs that came: the types, shapes and kinds of its samples, whatever is beside them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.serving.loaded_model import LoadedModel, Packed
from fluidtune.serving.model_layers import as_function

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

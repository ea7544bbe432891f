"""The OpenAPI document: a public validator takes it, its schemas are the forms, and its page shows all of it."""

from __future__ import annotations

import json

import jsonschema
import pytest
from openapi_spec_validator import validate

from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.openapi import document, schema
from fluidtune.serving.wire import CODES
from symphony_serve.forms import Form

SAMPLE = {"image": [[0, 0.5], [1, 0]], "word": "a<b>'"}
TRIALS = {
    "ab12_00000": Samples([SAMPLE], [[0.5], [1, 2]]),
    "näc/ht": Samples([1], [1]),
}


@pytest.mark.parametrize("token", [True, False])
def test_a_public_validator_takes_the_document(token):
    found = document(TRIALS, 0.2, token)
    validate(json.loads(json.dumps(found)))
    assert found["paths"].keys() >= {"/", "/ab12_00000", "/n%C3%A4c%2Fht", "/metrics", "/v2/models/{model}/infer"}


@pytest.mark.parametrize("outputs", [[{"cat": 0.9}, {"dog": 0.8}], [[{"box": 1}, {}], []]])
def test_outputs_that_are_objects_with_different_keys_may_be_anything(outputs):
    found = document({"t": Samples([1, 2], outputs)}, 0.2, token=False)
    check = jsonschema.Draft202012Validator(found["components"]["schemas"]["Output0"])
    assert all(map(check.is_valid, outputs))
    validate(json.loads(json.dumps(found)))


def test_a_token_is_wanted_for_all_but_the_probes():
    found = document(TRIALS, 0.2, token=True)
    opened = {path for path, one in found["paths"].items() if one.get("get", {}).get("security") == []}
    assert (found["security"], opened) == (
        [{"bearer": []}],
        {"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"},
    )
    assert "401" in found["paths"]["/"]["post"]["responses"]


@pytest.mark.parametrize(
    ("samples", "others"),
    [
        ([1, 2.5], ["a", True, None, [1], {}]),
        (["a"], [1, None]),
        ([True, None], [1, "a"]),
        ([[1, 2]], [[1], [1, 2, 3], [1, "a"], 1]),
        ([[1], [1, 2]], [["a"], [[1]], 1]),
        ([[], [[{"a": 1}]]], [[1], [[{"a": "x"}]], [[{}]], [[{"a": 1, "b": 2}]]]),
        ([{"a": 1, "b": [True]}], [{"a": 1}, {"a": 1, "b": [True], "c": 1}, {"a": 1, "b": []}, []]),
    ],
)
def test_the_schema_takes_what_the_form_takes(samples, others):
    form = Form.of(samples)
    check = jsonschema.Draft202012Validator(schema(form))
    for value in [*samples, *others]:
        assert check.is_valid(value) == (form.trouble(value) is None), value
    assert not all(check.is_valid(value) for value in others)


def test_a_503_names_its_codes_and_when_to_ask_again():
    found = document(TRIALS, 0.2, token=False)["components"]["responses"]["Status503"]
    assert "Retry-After" in found["headers"]
    assert all(f"{name}: " in found["description"] for name, code in CODES.items() if code.status == 503)

"""Paths, methods, codes and headers of the front's answers, which clients rely on, and the document that says them."""

from __future__ import annotations

import ast
import json
import re
import time
from pathlib import Path

import jsonschema
import pytest
from openapi_spec_validator import validate

from fluidtune.serving.answers import HTTPError, route
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.openapi import document, schema
from fluidtune.serving.wire import CODES, timeout_s
from symphony_serve.errors import ServeError
from symphony_serve.forms import Form

pytestmark = pytest.mark.serve

ROOT = Path(__file__).parents[2]
VERSIONS = {"best": ["1", "2"], "next": ["1"], "v2-ranker": ["1"], "v2.1": ["1"], "v20": ["1"]}


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("POST", "/", ("ask", "best", "")),
        ("POST", "/next", ("ask", "next", "")),
        ("POST", "/next/", ("ask", "next", "")),
        # Seen: a model named `v2-ranker` was served, and each request to it got 404.
        *[("POST", f"/{name}", ("ask", name, "")) for name in VERSIONS],
        ("POST", "/v2-rankers", "no model 'v2-rankers' is served; there are best, next, v2-ranker, v2.1, v20"),
        ("GET", "/", ("about", "", "")),
        ("HEAD", "/readyz", ("ready", "", "")),
        ("POST", "/best/next", "no model 'best/next' is served; there are best, next, v2-ranker, v2.1, v20"),
        ("PUT", "/nobody", "no model 'nobody' is served; there are best, next, v2-ranker, v2.1, v20"),
        ("PUT", "/", "PUT / is not served; send GET or HEAD or POST"),
        ("GET", "/best", "GET /best is not served; send POST, or GET /"),
        ("POST", "/metrics", "POST /metrics is not served; send GET or HEAD"),
        ("GET", "/v2", ("server", "", "")),
        ("HEAD", "/v2/health/live", ("live", "", "")),
        ("GET", "/v2/health/ready", ("ready", "", "")),
        ("GET", "/v2/models/best", ("model", "best", "")),
        ("GET", "/v2/models/best/ready", ("model_ready", "best", "")),
        ("GET", "/v2/models/best/versions/2", ("model", "best", "2")),
        ("POST", "/v2/models/best/versions/2/infer", ("infer", "best", "2")),
        ("GET", "/v2/models", "there is no /v2/models; GET /v2 or /v2/models/MODEL"),
        ("GET", "/v2/models/worst", "no model 'worst' is served; there are best, next, v2-ranker, v2.1, v20"),
        ("GET", "/v2/models/best/versions/3", "model 'best' has no version '3'; there are 1, 2"),
        ("GET", "/v2/models/best/config", "there is no /v2/models/best/config; GET /v2 or /v2/models/MODEL"),
        ("POST", "/v2/repository/index", "there is no /v2/repository/index; GET /v2 or /v2/models/MODEL"),
        ("GET", "/v2/models/best/infer", "GET /v2/models/best/infer is not served; send POST"),
        ("POST", "/v2", "POST /v2 is not served; send GET or HEAD"),
    ],
)
def test_what_a_method_and_a_path_ask_for_or_what_there_is_and_is_allowed(method, path, found):
    try:
        asked = route(method, path, VERSIONS)
    except HTTPError as said:
        answer = said.response()
        assert json.loads(answer.body)["error"] == found
        allowed = answer.headers.get("Allow")
        assert (answer.status_code, said.code) == ((405, "method_not_allowed") if allowed else (404, "not_found"))
        assert allowed is None or f"; send {allowed.replace(', ', ' or ')}" in found
    else:
        assert found == (asked.what, asked.model, asked.version)


@pytest.mark.parametrize("path", ["/a{}a", "{}a{}", "/v2/models/{}a", "/v2/models/a{}versions/"])
def test_a_path_takes_time_in_proportion_to_its_length(path):
    """Seen: one of 32,000 slashes held the front's loop for 2.4 s."""
    began = time.process_time()
    with pytest.raises(HTTPError):
        route("POST", path.replace("{}", "/" * 100_000), VERSIONS)
    assert time.process_time() - began < 1.0


def test_every_code_that_the_service_says_is_known_with_its_status():
    said = set()
    for path in (ROOT / "fluidtune" / "serving").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                match node.func.id, [each.value for each in node.args if isinstance(each, ast.Constant)]:
                    case "HTTPError", [int(status), str(code), *_]:
                        said.add((code, status))
                    case "refused", [str(code), *_]:
                        said.add((code, 503))
    assert len(said) > 10, "the calls are written in another way; look for them anew"
    said.discard(("disconnected", 400))  # told to nobody: the client has gone
    assert said <= {(name, code.status) for name, code in CODES.items()}


def test_the_page_has_every_code_that_the_service_says():
    page = (ROOT / "docs" / "serving.md").read_text()
    assert CODES.keys() <= set(re.findall(r"`([a-z_]+)`", page))


@pytest.mark.parametrize(("given", "seconds"), [(None, 0.5), ("100", 0.1), ("1", 0.001), ("9999999999", 0.5)])
def test_a_request_may_want_its_answer_sooner_than_the_slo(given, seconds):
    assert timeout_s(given, 0.5) == seconds


@pytest.mark.parametrize("given", ["", "0", "-1", "1.5", "1e3", "99999999999", "5S", "²"])
def test_a_wrong_deadline_is_refused(given):
    with pytest.raises(ServeError, match="whole milliseconds"):
        timeout_s(given, 0.5)


# The OpenAPI document.

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

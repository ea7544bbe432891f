"""Paths, methods and codes of the front's answers, without Ray."""

from __future__ import annotations

import json

import pytest

from symphony_serve.errors import Refused
from symphony_serve.messages import Reason

pytestmark = pytest.mark.serve

TRIALS = ["best", "next"]


@pytest.mark.parametrize(
    ("method", "path", "asked"),
    [
        ("POST", "/", "best"),
        ("POST", "/next", "next"),
        ("POST", "/next/", "next"),
        ("GET", "/", "/"),
        ("HEAD", "/readyz", "/readyz"),
    ],
)
def test_what_is_asked_for(method, path, asked):
    from fluidtune.serving.answers import route

    assert route(method, path, TRIALS) == asked


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/nobody", 404, None),
        ("POST", "/best/next", 404, None),
        ("PUT", "/nobody", 404, None),
        ("PUT", "/", 405, "GET, HEAD, POST"),
        ("GET", "/best", 405, "POST"),
        ("POST", "/readyz", 405, "GET, HEAD"),
        ("POST", "/metrics", 405, "GET, HEAD"),
    ],
)
def test_what_there_is_not(method, path, status, allow):
    from fluidtune.serving.answers import Said, route

    with pytest.raises(Said) as found:
        route(method, path, TRIALS)
    answer = found.value.response()
    assert (answer.status_code, answer.headers.get("Allow")) == (status, allow)
    said = json.loads(answer.body)
    assert said["code"] == {404: "not_found", 405: "method_not_allowed"}[status]
    assert said["error"]


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("GET", "/v2", ("server", "", "")),
        ("HEAD", "/v2/health/live", ("live", "", "")),
        ("GET", "/v2/health/ready", ("ready", "", "")),
        ("GET", "/v2/models/best", ("model", "best", "")),
        ("GET", "/v2/models/best/ready", ("model_ready", "best", "")),
        ("GET", "/v2/models/best/versions/2", ("model", "best", "2")),
        ("POST", "/v2/models/best/versions/2/infer", ("infer", "best", "2")),
    ],
)
def test_what_a_path_of_the_protocol_asks_for(method, path, what):
    from fluidtune.serving.answers import inference

    found = inference(method, path, {"best": ["1", "2"]})
    assert (found.what, found.model, found.version) == what


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/worst", 404),
        ("GET", "/v2/models/best/versions/3", 404),
        ("GET", "/v2/models/best/config", 404),
        ("GET", "/v2/models/best/infer", 405),
        ("POST", "/v2", 405),
    ],
)
def test_what_the_protocol_does_not_have(method, path, status):
    from fluidtune.serving.answers import Said, inference

    with pytest.raises(Said) as found:
        inference(method, path, {"best": ["1", "2"]})
    assert found.value.status == status
    assert ("Allow" in found.value.headers) == (status == 405)


@pytest.mark.parametrize("reason", Reason)
def test_a_refusal_has_a_code_and_says_when_to_ask_again(reason):
    from fluidtune.serving.answers import of_server

    answer = of_server(Refused("best", reason), 1.2).response()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
    assert json.loads(answer.body) == {"error": "refused", "code": reason.name.lower(), "reason": reason.value}

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
        ("HEAD", "/", "/"),
        ("GET", "/healthz", "/healthz"),
        ("HEAD", "/readyz", "/readyz"),
        ("GET", "/metrics", "/metrics"),
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


@pytest.mark.parametrize("reason", Reason)
def test_a_refusal_has_a_code_and_says_when_to_ask_again(reason):
    from fluidtune.serving.answers import of_server

    answer = of_server(Refused("best", reason), 1.2).response()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
    assert json.loads(answer.body) == {"error": "refused", "code": reason.name.lower(), "reason": reason.value}

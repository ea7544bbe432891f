"""Paths, methods and codes of the front's answers, without Ray."""

from __future__ import annotations

import json
import re
import time

import pytest

from fluidtune.serving.answers import HTTPError, route

pytestmark = pytest.mark.serve

VERSIONS = {"best": ["1", "2"], "next": ["1"]}


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("POST", "/", ("ask", "best", "")),
        ("POST", "/next", ("ask", "next", "")),
        ("POST", "/next/", ("ask", "next", "")),
        ("GET", "/", ("about", "", "")),
        ("HEAD", "/readyz", ("ready", "", "")),
        ("GET", "/nobody", 404),
        ("POST", "/best/next", 404),
        ("PUT", "/nobody", 404),
        ("PUT", "/", "GET, HEAD, POST"),
        ("GET", "/best", "POST"),
        ("POST", "/metrics", "GET, HEAD"),
        ("GET", "/v2", ("server", "", "")),
        ("HEAD", "/v2/health/live", ("live", "", "")),
        ("GET", "/v2/health/ready", ("ready", "", "")),
        ("GET", "/v2/models/best", ("model", "best", "")),
        ("GET", "/v2/models/best/ready", ("model_ready", "best", "")),
        ("GET", "/v2/models/best/versions/2", ("model", "best", "2")),
        ("POST", "/v2/models/best/versions/2/infer", ("infer", "best", "2")),
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/worst", 404),
        ("GET", "/v2/models/best/versions/3", 404),
        ("GET", "/v2/models/best/config", 404),
        ("GET", "/v2/models/best/infer", "POST"),
        ("POST", "/v2", "GET, HEAD"),
    ],
)
def test_what_a_method_and_a_path_ask_for_or_what_is_allowed_there(method, path, found):
    try:
        asked = route(method, path, VERSIONS)
    except HTTPError as said:
        answer = said.response()
        told = json.loads(answer.body)
        assert (answer.status_code, told["code"]) in ((404, "not_found"), (405, "method_not_allowed")) and told["error"]
        assert found == answer.headers.get("Allow", 404)
    else:
        assert found == (asked.what, asked.model, asked.version)


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("GET", "/nobody", "no model 'nobody' is served; there are best, next"),
        ("GET", "/best", "GET /best is not served; send POST, or GET /"),
        ("GET", "/v2/models", "there is no /v2/models; GET /v2 or /v2/models/MODEL"),
        ("POST", "/v2/repository/index", "there is no /v2/repository/index; GET /v2 or /v2/models/MODEL"),
        ("GET", "/v2/models/best/config", "there is no /v2/models/best/config; GET /v2 or /v2/models/MODEL"),
    ],
)
def test_a_refusal_says_what_there_is(method, path, said):
    with pytest.raises(HTTPError, match=f"^{re.escape(said)}$"):
        route(method, path, VERSIONS)


@pytest.mark.parametrize("path", ["/a{}a", "{}a{}", "/v2/models/{}a", "/v2/models/a{}versions/"])
def test_a_path_takes_time_in_proportion_to_its_length(path):
    """Seen: one of 32,000 slashes held the front's loop for 2.4 s."""
    began = time.process_time()
    with pytest.raises(HTTPError):
        route("POST", path.replace("{}", "/" * 100_000), VERSIONS)
    assert time.process_time() - began < 1.0

"""Paths, methods, codes and headers of the front's answers, which clients rely on, without Ray."""

from __future__ import annotations

import ast
import json
import re
import time
from pathlib import Path

import pytest

from fluidtune.serving import wire
from fluidtune.serving.answers import HTTPError, route
from symphony_serve.errors import ServeError

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
    assert said <= {(name, code.status) for name, code in wire.CODES.items()}


def test_the_page_has_every_code_that_the_service_says():
    page = (ROOT / "docs" / "serving.md").read_text()
    assert wire.CODES.keys() <= set(re.findall(r"`([a-z_]+)`", page))


@pytest.mark.parametrize(("given", "seconds"), [(None, 0.5), ("100", 0.1), ("1", 0.001), ("9999999999", 0.5)])
def test_a_request_may_want_its_answer_sooner_than_the_slo(given, seconds):
    assert wire.timeout_s(given, 0.5) == seconds


@pytest.mark.parametrize("given", ["", "0", "-1", "1.5", "1e3", "99999999999", "5S", "²"])
def test_a_wrong_deadline_is_refused(given):
    with pytest.raises(ServeError, match="whole milliseconds"):
        wire.timeout_s(given, 0.5)

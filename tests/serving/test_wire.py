"""The codes and headers that clients rely on: those that the service uses, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fluidtune.serving import wire
from symphony_serve.errors import ServeError

ROOT = Path(__file__).parents[2]


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
    assert wire.CODES.keys() - set(re.findall(r"`([a-z_]+)`", page)) <= {"unauthorized"}, "until there are tokens"


@pytest.mark.parametrize(("given", "seconds"), [(None, 0.5), ("100", 0.1), ("1", 0.001), ("9999999999", 0.5)])
def test_a_request_may_want_its_answer_sooner_than_the_slo(given, seconds):
    assert wire.timeout_s(given, 0.5) == seconds


@pytest.mark.parametrize("given", ["", "0", "-1", "1.5", "1e3", "99999999999", "5S", "²"])
def test_a_wrong_deadline_is_refused(given):
    with pytest.raises(ServeError, match="whole milliseconds"):
        wire.timeout_s(given, 0.5)

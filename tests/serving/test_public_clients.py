"""Public clients ask a real service: tritonclient, `fluidtune.Client`, a reader of OpenAPI documents, Schemathesis."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from openapi_spec_validator import validate

import fluidtune
from benchmarks.common import free_ports
from tests.conftest import CHROMIUM
from tests.serving.runs import FAILS, load

pytestmark = [pytest.mark.ray, pytest.mark.serve]

TOKEN = "a-token-of-the-test"


@pytest.fixture(scope="module")
def served(finished):
    with fluidtune.serve(finished, load, 20.0, top=2, port=free_ports(1)[0], token=TOKEN) as served:
        yield served


def test_tritonclient_reads_what_there_is_and_infers(served):
    import tritonclient.http as triton

    best, other = served.trials

    def asked():  # (The client writes into the headers that it gets.)
        return {"headers": {"Authorization": f"Bearer {TOKEN}"}}

    with triton.InferenceServerClient(urlsplit(served.url).netloc) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready(best, **asked())
        assert client.get_server_metadata(**asked())["name"] == "fluidtune"
        (tensor,) = client.get_model_metadata(other, "1", **asked())["inputs"]
        assert (tensor["datatype"], tensor["shape"]) == ("FP64", [-1])
        for binary in (True, False):
            given = triton.InferInput("input", [3], "FP32")
            given.set_data_from_numpy(np.array([1, 2.5, 4], np.float32), binary_data=binary)
            wanted = triton.InferRequestedOutput("output", binary_data=binary)
            answer = client.infer(other, [given], outputs=[wanted], request_id="7", **asked())
            assert answer.as_numpy("output").tolist() == [2, 5, 8]
            assert answer.get_response()["id"] == "7"


def test_our_own_client_asks(served):
    with fluidtune.Client(served.url, token=TOKEN) as client:
        assert (client(5), client(5, trial=served.trials[1], deadline_s=15.0)) == (15, 10)
        assert client.ready() and client.trials() == served.trials
        with pytest.raises(fluidtune.ServiceError, match="bad_input"):
            client([1])
        with pytest.raises(fluidtune.ServiceError, match="model_failed"):
            client(FAILS)
    with fluidtune.Client(served.url) as client, pytest.raises(fluidtune.ServiceError, match="unauthorized"):
        client(5)


def test_the_document_is_valid_and_its_page_has_every_path(served):
    url = urlsplit(served.url)

    def get(path):
        connection = http.client.HTTPConnection(url.netloc)
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        return connection.getresponse().read().decode()

    document = json.loads(get("/openapi.json"))
    validate(document)
    page = get("/docs")
    assert all(path in page for path in document["paths"])


@pytest.mark.browser
def test_the_page_shows_every_path_in_a_browser(served):
    from playwright.sync_api import sync_playwright

    wrong = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(extra_http_headers={"Authorization": f"Bearer {TOKEN}"})
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(served.url) else wrong.append(request.url))
        page.goto(f"{served.url.rstrip('/')}/docs")
        paths = page.request.get(f"{served.url.rstrip('/')}/openapi.json").json()["paths"]
        assert len(paths) > 5 and all(page.get_by_text(path).first.is_visible() for path in paths)
        browser.close()
    assert wrong == []


def load_records(directory, config):
    """Counts the numbers of a record; it has no input with which it fails."""
    factor = json.loads(Path(directory, "factor.json").read_text())

    def count(records):
        return [{"numbers": factor * len(record["values"]), "name": record["name"]} for record in records]

    count.samples = [{"values": [0.5, 2], "name": "a"}, {"values": [1], "name": "bcd"}]
    return count


#: A refusal is an answer; and what a tensor must be follows from its name, which the protocol's document cannot say.
SCHEMATHESIS = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]
positive_data_acceptance.enabled = false
"""


def test_schemathesis_finds_no_answer_that_the_document_has_not(finished, tmp_path):
    Path(tmp_path, "schemathesis.toml").write_text(SCHEMATHESIS)
    port = free_ports(1)[0]
    with fluidtune.serve(finished, load_records, 20.0, top=2, port=port) as served:
        options = ["--max-examples", "20", "--generation-deterministic", "--request-timeout", "60", "--no-color"]
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{served.url}openapi.json", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Selected: 16/16" in done.stdout and "Tested: 16" in done.stdout

"""Public clients ask a real service: Triton's, KServe's, MLServer's, ours, a reader of its document, schemathesis."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

import fluidtune
from benchmarks.common import free_ports
from tests.serving.runs import FAILS, load

pytestmark = [pytest.mark.ray, pytest.mark.newest, pytest.mark.serve]

TOKEN = "a-token-of-the-test"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def served(finished):
    with fluidtune.serve(finished, load, 20.0, top=2, port=free_ports(1)[0], token=TOKEN) as served:
        yield served


def test_tritonclient_reads_what_there_is_and_infers(served):
    import tritonclient.http as triton

    best, other = served.trials

    def asked():  # (The client writes into the headers that it gets.)
        return {"headers": dict(HEADERS)}

    with triton.InferenceServerClient(urlsplit(served.url).netloc) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready(best, **asked()) and not client.is_model_ready("worst", **asked())
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


@pytest.mark.clients
def test_kserves_client_finds_it_live_and_ready_and_infers(served):
    import kserve

    given = kserve.InferInput("input", [2], "FP32")
    given.set_data_from_numpy(np.array([1, 2.5], np.float32))

    async def ask():
        client, trial = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2")), served.trials[1]
        assert await client.is_server_live(served.url) and await client.is_server_ready(served.url)
        assert await client.is_model_ready(served.url, trial, HEADERS)
        return await client.infer(served.url, kserve.InferRequest(trial, [given]), headers=HEADERS, model_name=trial)

    assert asyncio.run(ask()).outputs[0].as_numpy().tolist() == [2, 5]


@pytest.mark.clients
def test_what_mlservers_codecs_send_is_answered(served):
    from mlserver import codecs

    body = codecs.NumpyRequestCodec.encode_request(np.array([1, 2.5])).model_dump(exclude_none=True)
    assert body["inputs"][0]["shape"] == [2, 1]
    body["inputs"][0]["name"] = "input"
    answer = httpx.post(f"{served.url.rstrip('/')}/v2/models/{served.trials[1]}/infer", json=body, headers=HEADERS)
    assert answer.json()["outputs"][0]["data"] == [2, 5]


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
    with fluidtune.serve(finished, load_records, 20.0, top=2, port=port, name="records") as served:
        options = ["--max-examples", "8", "--generation-deterministic", "--request-timeout", "60", "--no-color"]
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{served.url}openapi.json", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Selected: 16/16" in done.stdout and "Tested: 16" in done.stdout

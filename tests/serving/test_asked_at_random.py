"""Schemathesis asks a service what its OpenAPI document allows, and what it does not.

It has a module of its own, because a cluster has one service, and that of a module's fixture lasts as long as it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fluidtune
from benchmarks.common import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.newest, pytest.mark.serve]


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
        options = ["--max-examples", "8", "--generation-deterministic", "--request-timeout", "60", "--no-color"]
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{served.url}openapi.json", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Selected: 16/16" in done.stdout and "Tested: 16" in done.stdout

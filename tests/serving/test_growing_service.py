"""A service on leases whose load is more than one device bears, in a real Ray cluster of two CPUs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import fluidtune
from benchmarks.common import free_ports
from fluidtune.report import read_events
from tests.faults.serving import Clients, until
from themis_bridge.shell import control

pytestmark = [pytest.mark.ray, pytest.mark.newest, pytest.mark.serve]

#: Seconds: of a batch of 1, in which the model sleeps; and of the SLO. `Clients` are four, and one device answers three
#: of them within the SLO at most.
EACH_S, SLO_S = 0.5, 1.8


def load(directory, config):
    factor = json.loads(Path(directory, "factor.json").read_text())

    def multiply(numbers):
        time.sleep(EACH_S * len(numbers))
        return [factor * number for number in numbers]

    multiply.samples = [1]
    return multiply


def test_a_load_beyond_one_device_gets_another_one(finished):
    control.start("CPU", notice_s=4.0, pace_s=0.5)
    port = free_ports(1)[0]
    try:
        with fluidtune.serve(finished, load, SLO_S, max_batch=1, arbiter="auto", port=port) as served:
            clients = Clients(port)
            try:
                until(lambda: served.status()["devices"] == 2, "a second device")
            finally:
                became = clients.end()
    finally:
        control.stop()
    assert set(became) == {"answered", "refused"}
    events = read_events(finished / "serving" / "fluid_events.jsonl")
    assert max(event["wanted"] for event in events if event["event"] == "devices_wanted") > 1

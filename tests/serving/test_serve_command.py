"""What `fluidtune serve` reads and prints, without Ray."""

from __future__ import annotations

import sys

import pytest
import ray

from fluidtune.errors import FluidTuneError
from fluidtune.serving import service
from fluidtune.serving.service import loader, serve, status_text
from tests.serving import runs

HERE = "tests.serving.runs"


def test_the_function_that_is_named():
    assert loader(f"{HERE}:load") is runs.load


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runs", "names no function; expected MODULE:FUNCTION"),
        ("no_such_module:load", "cannot be imported .*no_such_module.*; run this where it can be"),
        (f"{HERE}:lod", "module tests.serving.runs has no lod"),
        (f"{HERE}:KILLS", "is a int, expected a function"),
    ],
)
def test_functions_that_are_not_there(text, said):
    with pytest.raises(FluidTuneError, match=said):
        loader(text)


def test_without_ray_serve_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    monkeypatch.delattr(ray, "serve", raising=False)
    monkeypatch.setattr(service, "winners", lambda *given: [])
    with pytest.raises(FluidTuneError, match=r'Ray Serve is not installed .*; type: pip install "fluidtune\[serve\]"'):
        serve("run", runs.load, 1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slo": 0.0}, "slo is 0.0, expected seconds above 0"),
        ({"slo": float("nan")}, "slo is nan"),
        ({"slo": 1.0, "max_batch": 0}, "max_batch is 0, expected 1 or more"),
        ({"slo": 1.0, "max_body": 0}, "max_body is 0, expected bytes, 1 or more"),
        ({"slo": 1.0, "starts": "soon"}, "starts is 'soon', expected deferred or eager"),
    ],
)
def test_settings_that_are_refused(monkeypatch, given, said):
    monkeypatch.setattr(service, "winners", lambda *given: [])
    with pytest.raises(FluidTuneError, match=said):
        serve("run", runs.load, **given)


def test_the_status_in_words():
    trial = {
        "trial": "a",
        "value": 1.0,
        "batch_1_s": 0.002,
        "requests": {"answered": 3, "late": 1},
        "batches": {"2": 2},
    }
    found = {
        "state": "serving",
        "why": "",
        "slo_s": 0.2,
        "device_pids": [7],
        "devices": 2,
        "unanswered": 1,
        "devices_wanted": 3,
    }
    assert status_text({**found, "seconds": 9.0, "trials": [trial]}).splitlines() == [
        "serving: SLO 200 ms, 1 of 2 devices, 1 requests wait, 9 s",
        "  the load wants 3 devices",
        "  a: 3 answered, 1 late; 2.0 ms alone, 2.0 requests in a batch",
    ]


def test_what_takes_turns_has_one_core():
    with pytest.raises(
        FluidTuneError, match="beside=True is for devices=\"cpu:1\", not 'cpu:2'; leave one of the two out"
    ):
        service._resources("cpu:2", beside=True)
    assert service._resources(None, beside=True) == (1, {"num_cpus": 0.0})

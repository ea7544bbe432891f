"""`fluidtune serve plan`: devices by rate and SLO, from kept profiles and without Ray."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from fluidtune.cli import cli
from fluidtune.errors import FluidTuneError
from fluidtune.serving import capacity
from symphony_serve.profiles import Profile, profiles_to_json

#: l(b) = b + 5 ms.
FIGURE_4 = Profile.linear(0.001, 0.005, 32)


@pytest.fixture
def profiles(tmp_path):
    """The directory of a run that was served."""
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "profiles.json").write_text(profiles_to_json({"t": FIGURE_4}, "somewhere", {"t": 0.002}))
    return tmp_path


@pytest.mark.slow
def test_more_requests_need_more_devices(profiles, monkeypatch):
    monkeypatch.setattr(capacity, "REQUESTS", 1000)
    models = capacity.models_of(str(profiles), 0.05, "deferred")
    needed = [capacity.devices_for(models, rate)[0] for rate in (100.0, 2000.0, 4000.0)]
    assert needed == sorted(set(needed)) and needed[0] == 1
    # A device that does nothing but the largest batch in time bears 32 requests in 37 ms.
    assert needed[2] >= 4000 * 0.037 / 32
    enough, one_less = (capacity.bad_rate(models, count, 4000.0) for count in (needed[2], needed[2] - 1))
    assert enough <= 0.01 < one_less


def test_the_delays_that_were_measured_count(profiles):
    (model,) = capacity.models_of(str(profiles), 0.05, "eager")
    assert model.delays.margin == 0.002
    with pytest.raises(
        FluidTuneError, match=r"has an SLO of 0.007 s, but a batch of 1 takes 0.006 s and the network 0.002"
    ):
        capacity.models_of(str(profiles), 0.007, "eager")


def test_the_command_needs_no_ray(profiles, monkeypatch):
    monkeypatch.setattr(capacity, "REQUESTS", 200)
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["serve", "plan", str(profiles), "--rate", "300", "--slo", "0.05"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "1 device is needed for 300 requests/s with an SLO of 50 ms.\nThen 0." in done.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("nowhere", 0.1, "eager"), "there are no profiles at 'nowhere'; serve the run once"),
        (("profiles", 0.1, "soon"), "starts is 'soon', expected deferred or eager"),
    ],
)
def test_what_cannot_be_planned(given, said):
    with pytest.raises(FluidTuneError, match=said):
        capacity.models_of(*given)


def test_services_of_other_names_are_named(profiles):
    (profiles / "serving").rename(profiles / "serving-digits")
    with pytest.raises(FluidTuneError, match=r"/serving/profiles.json'; give one of .*/serving-digits$"):
        capacity.models_of(str(profiles), 0.1, "eager")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00"])
def test_a_file_of_something_else(content, tmp_path):
    (tmp_path / "profiles.json").write_bytes(content)
    with pytest.raises(FluidTuneError, match="profiles"):
        capacity.models_of(str(tmp_path / "profiles.json"), 0.1, "eager")


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-306, float("nan"), float("inf")])
def test_a_rate_that_is_none(profiles, rate):
    with pytest.raises(FluidTuneError, match=f"rate is {rate}, expected requests per second above 0"):
        capacity.devices_for(capacity.models_of(str(profiles), 0.05, "eager"), rate)


def test_a_rate_that_needs_too_many_devices_is_refused_before_anything_is_simulated(profiles, monkeypatch):
    models = capacity.models_of(str(profiles), 0.05, "eager")
    monkeypatch.setattr(capacity, "bad_rate", None)
    with pytest.raises(FluidTuneError, match=r"about \d+ devices are needed for 1e\+09 requests/s; ask about a"):
        capacity.devices_for(models, 1e9)

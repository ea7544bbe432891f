"""What `fluidtune.serve` refuses to start, with a real Ray cluster that serves nothing."""

from __future__ import annotations

import socket

import pytest

import fluidtune
from benchmarks.common import free_ports
from fluidtune.errors import FluidTuneError
from fluidtune.serving.running_services import known
from fluidtune.serving.winners import winners
from tests.serving.runs import load

pytestmark = [pytest.mark.ray, pytest.mark.newest, pytest.mark.serve]

#: Seconds. No model is too slow for it.
SLO_S = 200.0


def test_an_slo_that_is_too_short_is_refused_and_nothing_is_left(finished):
    """On a host that other machines reach, which may go without a token."""
    given = {"host": "0.0.0.0", "no_token": True, "port": free_ports(1)[0]}
    with pytest.raises(FluidTuneError, match=r"has an SLO of 1e-06 s, but a batch of 1 takes .* s and the network .*"):
        fluidtune.serve(finished, load, 1e-6, **given)
    assert not known()


def test_which_trials_are_served(finished):
    def factors(**given):
        return [winner.config["factor"] for winner in winners(finished, **given)]

    assert factors() == [3]
    assert factors(top=9) == [3, 2]
    assert factors(top=2, metric="score", mode="min") == [2, 3]
    for given, said in (
        ({"top": 0}, "top is 0, expected"),
        ({"mode": "best"}, "mode is 'best'"),
        ({"metric": "scor"}, "has a number 'scor'; its results have .*score"),
    ):
        with pytest.raises(FluidTuneError, match=said):
            winners(finished, **given)


def test_a_port_that_is_taken(finished):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FluidTuneError, match=f"port {port} of 127.0.0.1 is taken; give another port"):
            fluidtune.serve(finished, load, SLO_S, port=port)

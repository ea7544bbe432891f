"""What of a running search is deployed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fluidtune.errors import FluidTuneError
from fluidtune.serving import following, service
from fluidtune.serving.model_versions import Deploy, Rollback, Service, Version, handle
from fluidtune.serving.winners import Winner
from tests.serving import runs


@pytest.mark.parametrize(
    ("value", "known", "mode", "better"),
    [
        (0.9, [0.8], "max", True),
        (0.8, [0.8], "max", False),
        (0.1, [0.2, None], "min", True),
        (0.9, [0.8, 0.95], "max", False),
        (0.9, [None], "max", True),
    ],
)
def test_better_is_better_than_each_that_is_known(value, known, mode, better):
    assert following.is_better(value, known, mode) is better


async def test_what_was_rolled_back_is_deployed_when_it_has_got_better():
    class Rollouts:
        service = Service(Version(1, "a", "run", SimpleNamespace(value=0.4), "serving"))

        async def deploy(self, winner, run, share):
            self.service = handle(self.service, Deploy(winner.name, run, winner, share))

    rollouts = Rollouts()

    async def phase(value):
        await following.deploy_better(rollouts, Winner("b", None, {}, value), "run", "max")
        return rollouts.service.phase

    assert await phase(0.5) == "loading"
    assert await phase(0.6) == "loading" and rollouts.service.other.what.value == 0.5  # One deploy at a time.
    rollouts.service = handle(rollouts.service, Rollback())
    assert await phase(0.5) == "one"
    assert await phase(0.55) == "loading"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"follow": 0.0}, "follow is 0.0, expected seconds between two looks"),
        ({"follow": 1.0, "top": 2}, "follow is for the best trial alone, and top is 2"),
        ({"follow": 1.0}, "does not tell by which metric its trials are ranked"),
    ],
)
def test_what_cannot_be_followed(given, said):
    with pytest.raises(FluidTuneError, match=said):
        service.serve("no_such_run", runs.load, 1.0, **given)

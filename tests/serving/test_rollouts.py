"""What stands in the way of a deploy before anything is started, with stand-ins for devices and processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from fluidtune.serving.model_process import Loading, Place
from fluidtune.serving.winners import Winner
from symphony_serve.errors import ServeError

pytestmark = pytest.mark.serve

GIB = 2**30


class Device:
    """Stands for a `VersionedDevice` that says this of its memory."""

    over = False

    def __init__(self, place):
        self._place = place

    async def place(self):
        return self._place


def rollouts(*places, trials=1, serving=True):
    from fluidtune.serving.rollouts import Rollouts

    winners = tuple(Winner(name, None, {}, 1.0) for name in "ab"[:trials])
    setting = SimpleNamespace(run="run", stages=1, placing=None, loading=Loading(b"", (), winners))
    made = Rollouts(setting, lambda event, **fields: None)
    made._devices, made._server = [Device(place) for place in places], object() if serving else None
    return made


@pytest.mark.parametrize(
    ("places", "given", "said"),
    [
        (
            [Place("n", "", 2 * GIB, 3 * GIB, 0, 0)] * 2,
            {},
            "a second version takes about 4.0 GiB of the machine, as the first one does, and 3.0 GiB are free",
        ),
        ([Place("n", "0", GIB, 9 * GIB, 6 * GIB, 2 * GIB)], {}, "about 6.0 GiB of the GPU, .* and 2.0 GiB are free"),
        ([Place("n", "", GIB, 9 * GIB, 0, 0)], {"trials": 2}, "this service has several trials"),
        ([Place("n", "", GIB, 9 * GIB, 0, 0)], {"serving": False}, "the service does not answer yet"),
        ([], {}, "the service does not answer yet"),
    ],
)
def test_a_deploy_that_cannot_be_is_refused_before_anything_starts(places, given, said):
    made = rollouts(*places, **given)
    with pytest.raises(ServeError, match=said):
        asyncio.run(made.deploy(Winner("c", None, {}, 2.0), "other", 1.0))
    assert made.service.phase == "one"


def test_devices_of_two_machines_each_need_memory_of_their_own():
    made = rollouts(Place("n", "", 2 * GIB, 3 * GIB, 0, 0), Place("m", "", 2 * GIB, 3 * GIB, 0, 0))
    asyncio.run(made._check_memory())

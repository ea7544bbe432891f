"""A search whose trials take turns with a service, in a real Ray cluster."""

from __future__ import annotations

import shutil

import pytest
from ray import tune

import fluidtune
from fluidtune.cluster.sharing.beside import LANE, Turn
from salus_share.seat_table import SeatTable, home
from salus_share.turns import INSIDE
from tests.tune.running import forks_ready

pytestmark = pytest.mark.ray


@pytest.fixture
def lane():
    """The usual lane; its files are removed."""
    yield home(LANE)
    shutil.rmtree(home(LANE))


def inside(name):
    """Whether a process of that name has its turn now."""
    table = SeatTable(home(LANE))
    with table.lock():
        return any(seat.state == INSIDE and seat.name.startswith(name) for seat in table.seats())


def train(config):
    for _ in range(2):
        tune.report({"turn": inside(tune.get_context().get_trial_id()), "service": inside("service")})


def test_each_iteration_is_a_turn_in_the_lane_of_the_service(one_ray, lane, tmp_path):
    one_ray.use(num_cpus=1)
    forks_ready()
    service = Turn("service", served=True)
    with service.taken():
        pass
    tuner = fluidtune.Tuner(
        train,
        param_space={"number": tune.grid_search([1, 2])},
        run_config=tune.RunConfig(storage_path=str(tmp_path)),
        executor=fluidtune.FluidExecutor(devices="cpu:1", beside=True),
    )
    results = tuner.fit()
    service.leave()
    assert [(one.metrics["turn"], one.metrics["service"]) for one in results] == [(True, False)] * 2

"""A model cut in two stages over two processes, in a real Ray cluster: its answers, its faults, and what is refused."""

from __future__ import annotations

import glob
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fluidtune
from benchmarks.common import free_ports
from fluidtune.errors import FluidTuneError
from tests.conftest import assert_nothing_left
from tests.serve.driving import until
from tests.serving import layered
from tests.serving.asking import ask

pytestmark = [pytest.mark.ray, pytest.mark.serve]

#: Seconds.
SLO_S = 200.0


@pytest.fixture(scope="module")
def run(one_ray, tmp_path_factory):
    one_ray.use(num_cpus=2)
    yield layered.run(tmp_path_factory.mktemp("results"))
    assert_nothing_left()


@pytest.fixture(scope="module")
def served(run):
    with fluidtune.serve(run, layered.load_guarded, SLO_S, stages=2, port=free_ports(1)[0], max_batch=4) as served:
        yield served


@pytest.fixture
def rows():
    random.seed(0)
    return [[random.uniform(-1, 1) for _ in range(8)] for _ in range(12)]


def answers(run, rows):
    (directory,) = glob.glob(str(run / "*" / "checkpoint_*"))
    torch.set_num_threads(1)
    return layered.whole(directory, rows)


def test_two_stages_answer_what_the_whole_model_answers_bit_by_bit(served, run, rows):
    assert [ask(served, row) for row in rows] == [(200, one) for one in answers(run, rows)]
    found = served.status()
    assert len(found["device_pids"]) == 2 and found["devices"] == 1
    ((first, second),) = found["stages"]
    assert (first["first"], first["end"], second["end"]) == (0, second["first"], 11)
    assert first["weights"] > 0 and second["weights"] > 0
    assert first["weights"] + second["weights"] == 4 * sum(one.numel() for one in layered.network().parameters())


def test_an_input_that_a_stage_fails_with_does_not_reach_its_neighbours(served, rows):
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda row: ask(served, row), [rows[0], layered.FAILS, *rows[1:5]]))
    assert [status for status, _ in found] == [200, 500, 200, 200, 200, 200]
    assert found[1][1]["error"] == "the model failed in stage 0: ValueError('a negative row')"


@pytest.mark.faults
@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_stage_takes_its_group_along_and_what_many_had_asked_at_once_is_answered(served, run, rows, stage):
    before = until(lambda: len(found := served.status()["device_pids"]) == 2 and found)
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, served, row) for row in rows]
        os.kill(before[stage], signal.SIGKILL)
        found = [one.result() for one in asked]
    for (status, got), expected in zip(found, answers(run, rows), strict=True):
        assert status == 200 and got == pytest.approx(expected, abs=1e-5)
    after = until(lambda: len(found := served.status()["device_pids"]) == 2 and found)
    assert not set(before) & set(after)
    assert [os.path.exists(f"/proc/{pid}") for pid in before] == [False, False]
    assert ask(served, rows[0]) == (200, answers(run, rows[:1])[0])


def test_an_input_that_ends_a_stage_is_refused_after_two_groups(served):
    assert ask(served, layered.KILLS)[1]["code"] == "lost_twice"


def test_no_other_version_of_a_model_in_stages(served, run):
    with pytest.raises(FluidTuneError, match="its model in stages, and versions are of whole ones; start it anew"):
        served.deploy(run)

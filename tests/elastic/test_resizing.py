"""A trial's result does not depend on its width: the same losses, iterations and weights, resized or not."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.collective_backends import write_into_store

from . import trials
from .driving import Driver, run

pytestmark = [pytest.mark.slow, pytest.mark.core]


def same(ours, reports, weights):
    got_reports, got_weights = ours
    assert got_reports == pytest.approx(reports, rel=1e-4)
    for worker in got_weights:
        for name, value in weights.items():
            torch.testing.assert_close(worker[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("trial", [trials.mlp, trials.normed])
@pytest.mark.parametrize("widths", [(2, 1, 2), (2, 2, 2), (3, 2, 1), (3, 1, 3)])
def test_every_change_of_width_gives_the_result_of_one_worker(pool, trial, widths):
    same(run(pool, trial, {}, widths), *trials.plain(trial, {}))


@pytest.mark.parametrize("widths", [(1, 1, 2), (2, 1, 2)])
def test_what_learns_and_gradients_that_await_a_step_come_along(pool, widths):
    same(run(pool, trials.unfreezing, {}, widths), *trials.plain(trials.unfreezing, {}))


def test_a_parameter_of_integers_comes_along(pool):
    """docs/bugs.md, 690"""
    same(run(pool, trials.permuted, {}, (2, 1, 2)), *trials.plain(trials.permuted, {}))


def test_at_width_one_it_is_plain_torch_bit_for_bit(pool):
    for trial in (trials.mlp, trials.normed):
        (reports, [weights]), plain = run(pool, trial, {}, (1, 1, 1)), trials.plain(trial, {})
        assert reports == plain[0]
        assert all(torch.equal(weights[name], value) for name, value in plain[1].items())


def test_a_loader_that_keeps_its_processes_gives_the_same_order_at_every_width(pool):
    config = {"processes": 1}
    same(run(pool, trials.mlp, config, (2, 1, 2)), *trials.plain(trials.mlp, config))


@pytest.mark.parametrize("persist", [True, False])
def test_a_loader_with_two_processes_at_width_three_comes_to_its_end(pool, persist):
    config = {"processes": 2, "persist": persist}
    same(run(pool, trials.mlp, config, (3, 3, 3)), *trials.plain(trials.mlp, config))


def test_a_stranger_that_reaches_the_store_runs_no_code_and_changes_no_result(pool, tmp_path):
    class Attacked(Driver):
        """Before each resize, what its members will read is there already, written by a process of another trial."""

        def resize(self, width: int) -> None:
            address = pool[0].call(trials.address)
            for key in ("call", "ready/1", "off"):
                pool[2].call(write_into_store, address, f"{self.generation + 1}/{key}", str(tmp_path / "created"))
            super().resize(width)

    same(run(pool, trials.mlp, {}, (2, 1, 2), Attacked), *trials.plain(trials.mlp, {}))
    assert not (tmp_path / "created").exists()

"""Horovod's promises to an elastic script, in a group that FluidTune resizes and that mends itself."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fluidtune.elastic import CommitStore
from tests.contracts.processes import peer_processes, until

from . import trials
from .driving import Driver, run

pytestmark = pytest.mark.horovod

CONFIG = {"backend": "horovod", "stop": 4}


def scripted(config: dict[str, Any], report: trials.Report) -> dict[str, Any]:
    """An elastic Horovod script: a commit after every second batch of six and, unless sparing, after each epoch."""
    from fluidtune.elastic import hvd

    hvd.init()
    preamble = hvd.rank(), hvd.size()
    torch.manual_seed(1 + hvd.rank())
    data = trials.data(48)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(data, seed=5)
    resets: list[int] = []
    seen: list[tuple[int, int]] = []  # (epoch, samples of it that were done) at every call

    @hvd.elastic.run
    def train(state: Any) -> None:
        seen.append((state.epoch, sampler.processed_num))
        while state.epoch < config["stop"]:
            share = 8 // hvd.size() if hvd.size() < 3 else 3
            for batch, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=share, sampler=sampler)):
                time.sleep(config.get("step", 0.0))
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                sampler.record_batch(batch, share)
                state.total += float(hvd.allreduce(loss.detach(), name="loss"))
                if batch % 2:
                    state.commit()
            if hvd.rank() == 0:
                report(state.total / 6)
            state.epoch, state.total = state.epoch + 1, 0.0
            sampler.set_epoch(state.epoch)
            if not config.get("sparing"):
                state.commit()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, total=0.0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    return {"weights": dict(model.state_dict()), "preamble": preamble, "resets": resets, "seen": seen}


@pytest.fixture
def pool():
    with peer_processes(4) as started:
        yield started


def alone(pool: list[Any], stop: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What the script reports, and its weights, in a process without a session."""
    reports, ended = pool[2].call(outside, scripted, {"stop": stop})
    return reports, ended["weights"]


def outside(script: Any, config: dict[str, Any]) -> Any:
    from fluidtune import elastic

    elastic.use(None)
    reports: list[float] = []
    ended = script(config, reports.append)
    import horovod.torch

    horovod.torch.shutdown()
    return reports, ended


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_the_result_does_not_depend_on_the_width(pool, widths):
    expected, weights = alone(pool)
    reports, endings = run(pool, scripted, CONFIG, widths)
    assert reports == pytest.approx(expected, rel=1e-4)
    for ending in endings:
        for name, value in weights.items():
            torch.testing.assert_close(ending["weights"][name], value, rtol=1e-3, atol=1e-5)


def digits(config: dict[str, Any], report: trials.Report) -> None:
    from examples import digits_horovod

    config = {**digits_horovod.ONCE, "batch_size": 32, "epochs": 2}
    digits_horovod.training(config, lambda metrics: report(metrics["loss"]))


def test_the_example_trains_on_whole_batches_at_a_width_that_does_not_divide_its_data(pool):
    expected, _ = pool[2].call(outside, digits, {})
    reports, _ = run(pool, digits, CONFIG, (4,))
    assert reports == pytest.approx(expected, rel=1e-4)


def test_every_trial_of_the_torch_suite_runs_with_horovods_collectives(pool):
    for trial in (trials.mlp, trials.normed):
        reports, _ = run(pool, trial, {"backend": "horovod"}, (2, 1, 2))
        assert reports == pytest.approx(trials.plain(trial, {})[0], rel=1e-4)


def test_callbacks_progress_and_the_place_of_a_joiner(pool):
    driver = Driver(pool, scripted, CONFIG)
    driver.turn(1)
    driver.resize(2)
    pool[0].call(trials.allow, 10)
    (kind, first), (_, joined) = [worker.call(trials.outcome) for worker in pool[:2]]
    assert kind == "returned"
    assert first["preamble"] == (0, 1) and joined["preamble"] == (1, 2)
    assert first["resets"] == [2] and joined["resets"] == [2]
    # The epoch's end is a commit: there they met
    assert first["seen"] == [(0, 0), (1, 0)] and joined["seen"] == [(1, 0)]


def grown(pool: list[Any], config: dict[str, Any], width: int) -> Driver:
    """The script with ``width`` workers, which then train without waiting."""
    driver = Driver(pool, scripted, config)
    driver.turn(1)
    driver.resize(width)
    pool[0].call(trials.allow, 1000)
    until(lambda: pool[0].call(trials.facts)["width"] == width)
    return driver


def test_a_worker_killed_in_an_allreduce_costs_what_is_after_the_commit(pool):
    expected, _ = alone(pool, 12)
    grown(pool, {**CONFIG, "stop": 12, "step": 0.01}, 2)
    until(lambda: len(pool[0].call(trials.reports)) >= 3)
    pool[1].kill()
    until(lambda: pool[0].call(trials.facts)["width"] == 1)
    kind, ended = pool[0].call(trials.outcome)
    assert kind == "returned" and ended["resets"] == [2, 1]
    assert pool[0].call(trials.reports) == pytest.approx(expected, rel=1e-4)
    epoch, progress = ended["seen"][-1]
    assert progress % 16 == 0 and epoch >= 3  # at a commit


def test_an_epoch_that_was_reported_after_the_last_commit_counts_once(pool):
    expected, _ = alone(pool)
    driver = Driver(pool, scripted, {**CONFIG, "sparing": True})
    driver.turn(1)
    driver.resize(2)
    pool[0].call(trials.allow)
    driver.turn(2)
    pool[1].kill()
    pool[0].call(trials.allow, 1000)
    kind, ended = pool[0].call(trials.outcome)
    assert kind == "returned" and ended["resets"] == [2, 1] and ended["seen"][-1] == (1, 48)
    assert pool[0].call(trials.reports) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("width", [3, 4])
def test_two_killed_in_a_row(pool, width):
    grown(pool, {**CONFIG, "stop": 40, "step": 0.01}, width)
    until(lambda: len(pool[0].call(trials.reports)) >= 3)
    pool[1].kill()
    time.sleep(0.1)  # the others are forming a group without it
    pool[width - 1].kill()
    endings = [pool[rank].call(trials.outcome) for rank in (0, 2)[: width - 2]]
    for kind, ended in endings:
        assert kind == "returned" and ended["resets"][0] == width and ended["resets"][-1] == width - 2
    assert len(pool[0].call(trials.reports)) == 40


def test_the_others_of_three_stay_together(pool):
    grown(pool, {**CONFIG, "stop": 30, "step": 0.01}, 3)
    until(lambda: len(pool[0].call(trials.reports)) >= 3)
    pool[2].kill()
    until(lambda: pool[0].call(trials.facts)["width"] == 2)
    assert pool[1].call(trials.facts)["width"] == 2
    endings = [worker.call(trials.outcome) for worker in pool[:2]]
    assert [kind for kind, _ in endings] == ["returned"] * 2
    assert endings[1][1]["resets"] == [3, 2]


def test_a_follower_commits_for_a_leader_that_died(pool, tmp_path):
    follower = {**CONFIG, "stop": 100, "step": 0.01, "commits": str(tmp_path)}
    grown(pool, follower, 2)
    until(lambda: len(pool[0].call(trials.reports)) >= 3)
    pool[0].kill()
    kind, _ = pool[1].call(trials.outcome)
    assert kind == "lost"
    commit = CommitStore(str(tmp_path / "heir-w1")).load()
    assert commit is not None
    assert commit.note == commit.state["values"]["epoch"] >= 2  # the third was reported before its commit
    # The trial goes on from it in another process
    pool[2].call(trials.start, scripted, {**CONFIG, "stop": commit.note + 2, "resume": commit}, True, "w2")
    pool[2].call(trials.allow, 1000)
    kind, ended = pool[2].call(trials.outcome)
    assert kind == "returned"
    progress = commit.state["handlers"]["sampler"]["_saved_sampler_state"]["processed_num"]
    assert ended["seen"] == [(commit.state["values"]["epoch"], progress)]
    assert len(pool[2].call(trials.reports)) == 2


def test_a_commit_of_another_state_is_refused(pool):
    from fluidtune.elastic.hvd.elastic import ObjectState, SavedState

    state = SavedState(ObjectState(bcast_object=None, get_rank=None, epoch=1))
    with pytest.raises(ValueError, match="epoch"):
        state.load({"values": {"batch": 1}, "handlers": {}}, with_streams=True)
    state.load({"values": {"epoch": 7}, "handlers": {}}, with_streams=True)
    assert state._state.epoch == 7


def test_what_is_saved_can_be_gone_back_to_again_and_again():
    from fluidtune.elastic.hvd import elastic

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    state = elastic.TorchState(model, optimizer, epoch=1)
    saved = elastic.SavedState(state)
    commit = saved.capture()
    step()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    for back in (saved.restore, saved.restore, lambda: saved.load(commit, with_streams=True), saved.restore):
        back()
        step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, after[name], rtol=0, atol=0)
    assert {
        float(kept["step"]) for kept in commit["handlers"]["optimizer"]["_saved_optimizer_state"]["state"].values()
    } == {1.0}

"""What a `state_dict` holds besides tensors and plain values: copied, committed, and referred to by name."""

from __future__ import annotations

import random
import threading
import types
from functools import partial

import numpy
import pytest
import torch
from ray import cloudpickle

from fluidtune import elastic
from fluidtune.elastic import Commit, ElasticSession

from . import restarts
from .restarts import store_in

SCRIPT = """
import enum
import torch

class Mode(enum.Enum):
    WARM, COLD = 1, 2

class Record:
    steps = 0

    def __init__(self, mode):
        self.mode = mode

class Warm(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, after, most):
        self.after, self.factor = after, lambda epoch: min(1.0, epoch / most)
        super().__init__(optimizer)

    def get_lr(self):
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def step(self, *args):
        super().step(*args) if self.last_epoch < 3 else self.after.step()

class Counted:
    def __init__(self, **more):
        vars(self).update(more)

    def state_dict(self):
        return dict(vars(self))

    load_state_dict = lambda self, values: vars(self).update(values)
"""


def script() -> types.ModuleType:
    """A script's own module, as a process has it: none that another process could import."""
    module = types.ModuleType("a_script_of_the_user")
    exec(SCRIPT, vars(module))
    return module


def keep(store, iteration, state, note=None):
    """The commits of an iteration and of the one before it."""
    for number in (iteration - 1, iteration):
        made = Commit("t", "", 0, number, number, state, note, life="one")
        assert store.offer(lambda made=made: made, force=True) and store.flush()


state_of = partial(restarts.state_of, pickling=cloudpickle)


def trained(epochs):
    """A state whose optimizer a scheduler of the script steers, with another one in it that goes on after it."""
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    warm = script().Warm(optimizer, after, 4)
    state = state_of(optimizer, warm)
    steered(optimizer, warm, epochs)
    return state, optimizer, warm


def steered(optimizer, scheduler, epochs):
    found = []
    for _ in range(epochs):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("epochs", [1, 5])
def test_a_scheduler_with_a_lambda_and_another_scheduler_steers_the_optimizer_that_steps(epochs, tmp_path):
    # Seen: such a trial failed when it grew ("Can't pickle"), or its learning rate did not change after a move.
    state, optimizer, scheduler = trained(epochs)
    store = store_in(tmp_path, pickling=cloudpickle)
    keep(store, epochs, state.capture())
    expected = steered(optimizer, scheduler, 4)
    other, its_optimizer, its_scheduler = trained(0)
    other.load(store_in(tmp_path).load().state)
    assert steered(its_optimizer, its_scheduler, 4) == expected


def test_what_refers_to_a_prepared_module_refers_to_that_of_the_process():
    def averaged():
        model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        own = script().Counted(whole=model, part=model[0], held={model[0].weight}, count=3)
        return model, own, state_of(model, own)

    (_, _, first), (model, own, second) = averaged(), averaged()
    second.load(first.capture())
    assert own.whole is model and own.part is model[0] and own.count == 3
    assert next(iter(own.held)) is model[0].weight


def test_classes_of_the_script_are_those_that_the_process_has():
    """A restored run has other ones of the same names. Nothing of a class that is there is written over."""
    first, second = script(), script()
    kept = state_of(first.Counted(mode=first.Mode.COLD, record=first.Record(first.Mode.WARM), kind=first.Record))
    second.Record.steps = 7
    own = second.Counted(mode=second.Mode.WARM, record=second.Record(second.Mode.COLD), kind=None)
    other = state_of(own)
    other.load(kept.capture())
    assert own.mode is second.Mode.COLD and own.record.mode is second.Mode.WARM
    assert type(own.record) is own.kind is second.Record and second.Record.steps == 7


def test_a_class_that_the_process_has_not_comes_with_the_state():
    kept = state_of(script().Counted(records=[script().Record(3)]))
    own = script().Counted(records=[])
    other = state_of(own)
    other.load(kept.capture())
    assert [record.mode for record in own.records] == [3]


def test_plain_state_may_refer_to_what_was_prepared():
    def alternating():
        optimizers = [torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0) for _ in range(2)]
        draws = random.Random(3)
        own = elastic.state(active=optimizers[0], draws=draws, history=[numpy.ones(2)], best=numpy.float64(2.0))
        return optimizers, draws, own, state_of(*optimizers, draws, own)

    (first, _, now, kept), (second, draws, own, other) = alternating(), alternating()
    now.active = first[1]
    state = kept.capture()
    now.history[0][0] = 5.0
    for _ in range(2):  # a commit may be loaded twice
        other.load(state)
        assert own.active is second[1] and own.draws is draws and own.best == 2.0
        assert own.history[0].tolist() == [1.0, 1.0]
        own.history[0][0] = 9.0


def test_what_cannot_be_pickled_stops_commits_and_not_the_trial(tmp_path, caplog):
    # Seen: an elastic trial with a lock in a `state_dict` failed at its first boundary.
    own = script().Counted(lock=threading.Lock())
    session = ElasticSession(trial="t", pickling=cloudpickle, commits=store_in(tmp_path, pickling=cloudpickle))
    session.prepare(own)
    assert list(session.epochs(0, 3)) == [0, 1, 2]
    session.close()
    assert "cannot pickle '_thread.lock' object" in session.facts().cannot_commit
    assert store_in(tmp_path).load() is None
    assert len([each for each in caplog.records if "no commit can be made" in each.getMessage()]) == 1


def test_a_commit_has_results_with_what_the_script_defines(tmp_path):
    # Seen: a trial with a function of the script in its parameters had no commits, and began anew after each move.
    note = {"config": {"act": lambda x: x + 1, "model": script().Counted}, "at": 3}
    store = store_in(tmp_path, pickling=cloudpickle)
    keep(store, 1, b"", note)
    found = store_in(tmp_path).load().note
    assert found["config"]["act"](1) == 2 and found["config"]["model"](a=1).a == 1

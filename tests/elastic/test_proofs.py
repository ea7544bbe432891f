"""A commit is proved before a trial goes on from it: what is kept besides makes it begin anew, and is named."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fluidtune import elastic
from fluidtune.elastic.commits.commit_store import is_trusted

from .kept_loops import EPOCHS, INCOMPLETE, WHOLE, momentum, parts, step
from .restarts import Trial, same, store_in


def alone(loop):
    """What a loop returns and reports in one process without a session, to the end."""
    trial = Trial(Path("/nowhere/at/all"), at=set())
    return trial.life(loop), trial.results


@pytest.mark.parametrize(("loop", "named"), INCOMPLETE, ids=lambda value: getattr(value, "__name__", None))
def test_a_loop_that_keeps_something_of_its_own_begins_anew_and_it_is_named(loop, named, tmp_path):
    expected, reports = alone(loop)
    trial = Trial(tmp_path)
    trial.life(loop, dies=6)
    value = trial.to_its_end(loop)
    assert same(value, expected) and same(trial.results, reports)
    _, line, last = trial.said
    assert last is None and line.startswith("epoch 4 run again from its commit ") and named in line, line
    assert trial.ran[1] == [5] and trial.ran[2] == list(range(1, EPOCHS + 1))
    trial.life(loop, dies=6)
    assert line.startswith(trial.session.facts().cannot_commit)
    assert store_in(tmp_path).load() is None


@pytest.mark.parametrize("dies", [3, 6])
@pytest.mark.parametrize("loop", WHOLE, ids=lambda loop: loop.__name__)
def test_a_loop_that_has_prepared_all_goes_on_as_if_nothing_had_been(loop, dies, tmp_path):
    expected, reports = alone(loop)
    trial = Trial(tmp_path)
    trial.life(loop, dies=dies)
    value = trial.life(loop)
    assert trial.said == [None, None], trial.said
    assert same(value, expected)
    measured = {"epoch_s", "trainTime", "samples_per_second"}
    for now, then in itertools.zip_longest(trial.results, reports):
        assert same(
            {k: v for k, v in now.items() if k not in measured}, {k: v for k, v in then.items() if k not in measured}
        )
    each = len(reports) // EPOCHS
    done = dies // each - (dies % each == 0)  # epochs before the last commit
    first_of_phase = loop.__name__ == "two_phases" and done == 5  # the commit before it is of another loop
    assert trial.ran[1][0] == each * (done - 1 - first_of_phase) + 1


@pytest.mark.parametrize("loop", [momentum, *(loop for loop in WHOLE if loop.__name__ == "two_phases")])
def test_a_trial_goes_on_from_a_newer_commit_than_those_that_prove(loop, tmp_path):
    """The pair is of epochs 1 and 2, the newest commit is that of the last boundary, in the later loop, too."""
    expected, reports = alone(loop)
    trial = Trial(tmp_path, at={2, 6})
    trial.life(loop, dies=7)
    kept = store_in(tmp_path).load()
    assert (kept.iteration, *(each.iteration for each in kept.pair)) == (6, 2, 3)
    assert same(trial.life(loop), expected)
    assert trial.ran[1] == [3, 7, 8, 9] and same(trial.results, reports)


def test_a_proof_is_kept_and_made_again_when_the_trial_is_twice_as_old(tmp_path):
    expected, reports = alone(momentum)
    trial = Trial(tmp_path)
    for dies in (4, 5, 6, 8):
        trial.life(momentum, dies=dies)
    assert same(trial.life(momentum), expected) and same(trial.results, reports)
    # Proved at 3. Straight from 4 and from 5; commit 7 is more than twice as old, and proves itself again.
    assert trial.ran == [[1, 2, 3, 4], [3, 4, 5], [5, 6], [6, 7, 8], [7, 8, 9]], trial.ran
    assert [is_trusted(iteration, 3) for iteration in (3, 6, 7)] == [True, True, False]
    assert store_in(tmp_path).load().proved == 7


def test_what_matters_late_is_found_by_the_next_proof(tmp_path):
    """A stage that begins in epoch 5 needs the largest loss before it, which nobody sees in the loop's variables."""

    def staged(report):
        model, optimizer, loader = elastic.prepare(*parts())
        kept = SimpleNamespace(largest=0.0)
        for epoch in elastic.epochs(0, EPOCHS):
            loss = sum(step(model, optimizer, x, y) for x, y in loader)
            kept.largest = max(kept.largest, loss)
            report(loss=loss / kept.largest if epoch > 4 else loss)
        return model.state_dict()

    expected, _ = alone(staged)
    trial = Trial(tmp_path)
    trial.life(staged, dies=3)
    trial.life(staged, dies=8)
    assert same(trial.to_its_end(staged), expected) and trial.said[1] is None
    assert trial.said[2].startswith("epoch 6 run again from its commit reports loss 1, not 0.")


@pytest.mark.parametrize("dies", [1, 2])
def test_a_trial_that_dies_before_it_has_a_pair_begins_anew(dies, tmp_path):
    expected, reports = alone(momentum)
    trial = Trial(tmp_path)
    trial.life(momentum, dies=dies)
    assert store_in(tmp_path).load() is None
    assert same(trial.life(momentum), expected) and same(trial.results, reports)
    assert trial.ran[1] == list(range(1, EPOCHS + 1)) and trial.said == [None, None]


def test_a_trial_that_is_asked_to_leave_commits_and_goes_on_from_there(tmp_path):
    expected, reports = alone(momentum)
    trial = Trial(tmp_path, at={2})
    trial.life(momentum, leaves=5)
    assert same(trial.life(momentum, leaves=6), None)
    assert same(trial.life(momentum), expected) and same(trial.results, reports)
    assert trial.ran == [[1, 2, 3, 4, 5], [3, 6], [7, 8, 9]]


def odd_epochs(how):
    """A loop whose first epoch in a process does something else, which the proof must notice."""

    def loop(report):
        model, optimizer, loader = elastic.prepare(*parts())
        table, first = {}, True
        for epoch in elastic.epochs(0, EPOCHS):
            report(loss=sum(step(model, optimizer, x, y) for x, y in loader))
            if first and epoch:
                if how == "raises":
                    table["missing"]
                if how == "returns":
                    return "ended"
                if how == "leaves":
                    break
                for _ in range(9 if how == "reports" else 0):
                    report(more=1)
            first = False
        if how == "leaves":
            for _ in elastic.epochs(0, 2):
                report(loss=0.0)
        return model.state_dict()

    return loop


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "raises KeyError: 'missing'"),
        ("returns", "ends the loop, which went on before"),
        ("leaves", "leaves the loop, which went on before"),
        ("reports", "reports more than it did before"),
    ],
)
def test_an_epoch_that_goes_another_way_when_it_is_run_again_is_no_proof(how, said, tmp_path):
    trial = Trial(tmp_path)
    trial.life(odd_epochs(how), dies=6)
    trial.life(odd_epochs(how))
    assert trial.said[1].startswith(f"epoch 4 run again from its commit {said}: keep what the loop carries"), trial.said
    assert len(trial.results) == 6
    trial.life(odd_epochs(how))
    assert trial.said[2] is None and trial.ran[2] == list(range(1, len(trial.ran[2]) + 1))


def test_a_commit_of_other_objects_is_not_gone_on_from(tmp_path):
    def bigger(report):
        elastic.prepare(torch.nn.Linear(9, 9), *parts()[1:])
        for _ in elastic.epochs(0, 2):
            report(loss=0.0)

    trial = Trial(tmp_path)
    trial.life(momentum, dies=6)
    trial.life(bigger)
    assert trial.said[1].startswith("the commit before epoch 4 does not fit what the loop has prepared: ")
    assert store_in(tmp_path).load() is None


def test_a_device_that_lacks_memory_is_no_reason_to_forget_a_commit(tmp_path, monkeypatch):
    trial = Trial(tmp_path)
    trial.life(momentum, dies=6)
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.SGD, "load_state_dict", Mock(side_effect=torch.OutOfMemoryError()))
        with pytest.raises(torch.OutOfMemoryError):
            trial.life(momentum)
    assert store_in(tmp_path).load().iteration == 5


def test_a_loop_that_changes_what_it_prepared_keeps_its_last_commit_that_fits(tmp_path):
    def growing(report):
        model, optimizer, loader = elastic.prepare(*parts())
        for epoch in elastic.epochs(0, EPOCHS):
            if epoch == 4:
                extra = torch.nn.Linear(1, 1)
                model.append(extra)
                optimizer.add_param_group({"params": extra.parameters()})
            report(loss=sum(step(model, optimizer, x, y) for x, y in loader))
        return model.state_dict()

    expected, _ = alone(growing)
    trial = Trial(tmp_path)
    trial.life(growing, dies=7)
    assert trial.session.facts().cannot_commit.startswith("the loop has changed what it prepared: module")
    assert same(trial.life(growing), expected) and trial.ran[1] == list(range(4, 10))


@pytest.mark.parametrize("divided", [(False, False), (True, False), (False, True), (True, True)])
def test_rounding_is_no_reason_to_begin_anew_where_calls_were_divided(divided, tmp_path):
    """In the first process, which made the commits, or in the second, which proves them."""
    rounding = [0.0]

    def loop(report):
        model, optimizer, loader = elastic.prepare(*parts())
        for _ in elastic.epochs(0, EPOCHS):
            loss = sum(step(model, optimizer, x, y, rounding[0] * model[0].weight.sum()) for x, y in loader)
            report(loss=loss)

    trial = Trial(tmp_path)
    trial.divided = divided[0]
    trial.life(loop, dies=6)
    trial.divided, rounding[0] = divided[1], 1e-5
    trial.life(loop)
    assert (trial.said[1] is None) == any(divided), trial.said

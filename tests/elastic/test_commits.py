"""Commits: they are complete or do not exist, are worth their price, and let a trial go on as before."""

from __future__ import annotations

import copy
import os
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fluidtune import elastic
from fluidtune.elastic import BeginsAnew, Commit, ElasticSession

from . import kept_loops
from .restarts import EveryBoundary, LocalFiles, same, state_of, store_in


@contextmanager
def in_session(**more):
    """A session, in use by this process."""
    session = ElasticSession(trial="t", **more)
    elastic.use(session)
    try:
        yield session
    finally:
        session.close()
        elastic.use(None)


def commit(number, /, **more):
    state = b"weights" * number
    return replace(Commit("t", "f", loop=0, epoch=number, iteration=number, state=state, life="one"), **more)


def keep(store, number, /, **more):
    assert store.offer(lambda: commit(number, **more), force=True)
    assert store.flush()


def loaded(folder):
    """The iterations of the newest commit and of its pair, None: no commit."""
    found = store_in(folder).load()
    return None if found is None else (found.iteration, found.pair and tuple(each.iteration for each in found.pair))


def test_the_newest_whole_commit_is_loaded_with_the_newest_pair(tmp_path):
    folder = tmp_path / "deep" / "folder"
    store = store_in(folder)
    assert store.load() is None
    seen = []
    for iteration in (1, 2, 3, 5, 8, 9, 10, 20, 21):
        keep(store, iteration)
        seen.append(loaded(folder))
        assert len(os.listdir(folder)) <= 3
    pairs = [None, (2, (1, 2)), (3, (2, 3)), (5, (2, 3)), (8, (2, 3)), (9, (8, 9)), (10, (9, 10)), (20, (9, 10))]
    assert seen == [*pairs, (21, (20, 21))]
    found = store_in(folder).load()
    assert (found.epoch, found.loop, found.fingerprint) == (21, 0, "f")
    assert [each.state for each in (*found.pair, found)] == [b"weights" * number for number in (20, 21, 21)]


@pytest.mark.parametrize(
    "second",
    [{"life": "two"}, {"fingerprint": "g"}, {"loop": 1}, {"epoch": 3}, {"iteration": 3}, {"life": ""}],
    ids=str,
)
def test_a_pair_is_of_two_boundaries_of_one_process_that_follow_each_other(second, tmp_path):
    store = store_in(tmp_path)
    keep(store, 1, life="" if second == {"life": ""} else "one")
    keep(store, 2, **second)
    assert loaded(tmp_path) is None


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "one bit": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "format FLUIDCM3": lambda data: b"FLUIDCM3" + data[8:],  # seen: commits of another version were called damaged
    "another mark": lambda data: data.replace(b'"f"', b'"g"', 1),
    "foreign": lambda data: b"another program's file, which is long enough to have a head of its own" * 9,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_what_is_before_it_taken(tmp_path, damage, caplog):
    store = store_in(tmp_path)
    for iteration in (1, 2, 5):
        keep(store, iteration)
    path = tmp_path / "commit-2"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert loaded(tmp_path) == (2, (1, 2))
    assert ("another version" in caplog.text) == (damage == "format FLUIDCM3")
    keep(store_in(tmp_path), 3)  # takes the place of the damaged one
    assert loaded(tmp_path) == (3, (2, 3))
    path = tmp_path / "commit-1"  # the first of the pair
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert loaded(tmp_path) is None, "what cannot be proved is not gone on from"
    keep(store_in(tmp_path), 4)
    assert loaded(tmp_path) == (4, (3, 4))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_verdict_that_is_not_whole_is_none(tmp_path, damage):
    store = store_in(tmp_path)
    keep(store, 1), keep(store, 2)
    store.note_proved("f", 2)
    assert loaded(tmp_path) == (2, None)
    keep(store, 4)
    assert loaded(tmp_path) == (4, None)
    path = tmp_path / "verdict"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert loaded(tmp_path) == (4, (1, 2))


def test_a_trial_that_was_refused_has_no_commits_and_another_configuration_has(tmp_path):
    store = store_in(tmp_path)
    keep(store, 1), keep(store, 2)
    store.refuse("f", "it keeps a counter")
    assert loaded(tmp_path) is None and {(tmp_path / f"commit-{n}").stat().st_size for n in (0, 1)} == {0}
    again = store_in(tmp_path)
    keep(again, 1), keep(again, 2)
    assert again.refused == "it keeps a counter" and loaded(tmp_path) is None
    keep(again, 1, fingerprint="g"), keep(again, 2, fingerprint="g")
    assert loaded(tmp_path) == (2, (1, 2))


class Slow(LocalFiles):
    """Writes when the test lets it; each write takes ``cost`` seconds of the clock below."""

    def __init__(self):
        self.let = threading.Semaphore(10**6)
        self.now = 0.0
        self.cost = 0.0
        self.fail = False
        self.writes = 0

    def clock(self):
        return self.now

    def write_bytes(self, path, data):
        self.let.acquire()
        self.now += self.cost
        if self.fail:
            raise OSError("no space left")
        super().write_bytes(path, data)
        self.writes += 1


def test_committing_costs_at_most_its_share_of_the_time(tmp_path):
    files = Slow()
    store = store_in(tmp_path, files=files, budget=0.02, clock=files.clock)
    files.cost = 1.0
    made = []
    for turn in range(1, 401):
        files.now += 1.0
        if store.offer(lambda turn=turn: commit(turn)):
            store.flush()
            made.append(turn)
    assert made[:2] == [1, 2], "the first two are not put off: from then on it is known what they cost"
    assert len(made) > 5
    assert sum(b - a >= 49 for a, b in pairwise(made)) == len(made) - 2
    assert len(made) * files.cost <= 0.02 * files.now + 2 * files.cost
    assert not store.offer(lambda: commit(500))


def test_a_storage_that_cannot_be_read_is_a_commit_that_failed(tmp_path):
    files = Slow()
    keep(store_in(tmp_path), 1)
    store, reads = store_in(tmp_path, files=files, budget=1e9), files.read_bytes

    def failing(path):
        assert threading.current_thread().name == "commit"
        raise PermissionError("no access to the bucket")

    files.read_bytes = failing
    assert store.offer(lambda: commit(2)) and not store.flush()
    files.read_bytes = reads
    keep(store, 3), keep(store, 4)
    assert loaded(tmp_path) == (4, (3, 4))


def test_the_second_of_a_pair_waits_for_no_write_and_comes_after_the_first(tmp_path):
    files = Slow()
    files.let = threading.Semaphore(0)
    store = store_in(tmp_path, files=files, budget=1e9)
    assert store.offer(lambda: commit(1))
    assert store.offer(lambda: commit(2), force=True), "nothing is written so far"
    assert files.writes == 0
    files.let.release(2)
    assert store.flush() and loaded(tmp_path) == (2, (1, 2))


def test_a_snapshot_shares_nothing_with_what_goes_on_before_and_after_it_is_loaded():
    model, optimizer, _ = kept_loops.parts()
    progress = elastic.state(history=[1])
    state = state_of(model, optimizer, progress)
    x, y = kept_loops.data().tensors
    kept_loops.step(model, optimizer, x, y)
    kept, before = state.capture(), copy.deepcopy(state.now())
    for _ in range(2):
        kept_loops.step(model, optimizer, x, y)
        optimizer.param_groups[0]["lr"] = 7.0
        progress.history.append(2)
        state.load(kept)
        assert same(state.now()["stateful"], before["stateful"])
    assert state.readable(kept)["stateful"][0]._metadata == model.state_dict()._metadata


@pytest.mark.gpu
def test_a_tensor_of_a_gpu_trials_state_is_on_the_gpu_after_a_commit():
    teacher = torch.nn.Linear(2, 2).cuda()
    own = elastic.state(rates=torch.ones(2, device="cuda"), on_cpu=torch.ones(2), teacher=teacher)
    state = state_of(own, device="cuda")
    state.load(state.capture())
    assert own.rates.is_cuda and own.teacher.weight.is_cuda and not own.on_cpu.is_cuda


def resumed(start, commit_at=2, stop=5):
    """The epochs that run, and the iteration at the end, when the user's start is ``start``."""
    model = torch.nn.Linear(2, 1)
    kept = Commit("t", "f", loop=0, epoch=commit_at, iteration=commit_at + 10, state=state_of(model).capture())
    other = torch.nn.Linear(2, 1)
    with in_session(resume=kept, fingerprint="f") as session:
        assert session.iteration == commit_at + 10
        elastic.prepare(other)
        epochs = list(elastic.epochs(start, stop))
    return epochs, session.iteration, torch.equal(other.weight, model.weight)


def test_the_newer_of_commit_and_the_users_own_checkpoint_counts():
    assert resumed(0) == ([2, 3, 4], 15, True)
    assert resumed(2) == ([2, 3, 4], 15, True)
    assert resumed(3) == ([3, 4], 15, False)
    assert resumed(0, commit_at=5) == ([], 15, True)


def test_a_run_that_does_not_come_to_the_loop_of_its_commit_begins_anew_without_it(tmp_path):
    """The script runs one of its loops only, as its own checkpoint says."""
    store = store_in(tmp_path)
    model = torch.nn.Linear(2, 1)

    def phase(start):
        elastic.prepare(model)
        return list(elastic.epochs(start, 10))

    kept = Commit("t", "", loop=1, epoch=3, iteration=8, state=state_of(model).capture())
    with in_session(resume=kept, commits=store) as session:
        assert phase(3) == []
        with pytest.raises(BeginsAnew, match="number 2, which"):
            session.ended()
    assert store.load() is None
    with in_session() as session:
        assert phase(3) == [*range(3, 10)]
        session.ended()


def test_the_hosts_note_is_kept_and_a_resume_can_be_forgotten(tmp_path):
    notes = iter(["first", "second", "third"])
    session = ElasticSession(
        trial="t",
        commits=EveryBoundary(tmp_path),
        resume=Commit("t", "", loop=0, epoch=2, iteration=2, state=b""),
        note=lambda: next(notes),
    )
    session.forget_resume()
    assert session.iteration == 0
    turns = session.epochs(0, 3)
    assert [next(turns) for _ in range(3)] == [0, 1, 2]
    session.close()
    found = store_in(tmp_path).load()
    assert [(each.iteration, each.note) for each in found.pair] == [(1, "first"), (2, "second")]


def test_a_commit_of_another_configuration_is_refused():
    with pytest.raises(ValueError, match="'f', not 'g'"):
        ElasticSession(trial="t", resume=commit(1), fingerprint="g")


def test_an_inner_loop_has_no_boundaries_and_objects_come_back_as_they_are(tmp_path):
    model, optimizer, loader = kept_loops.parts()
    with in_session(commits=EveryBoundary(tmp_path)) as session:
        assert elastic.prepare(model) is model
        given = elastic.prepare(model, optimizer, loader)
        assert all(now is then for now, then in zip(given, (model, optimizer, loader), strict=True))
        assert [list(elastic.epochs(0, 2)) for _ in elastic.epochs(0, 3)] == [[0, 1]] * 3
        assert session.iteration == 3
        with pytest.raises(TypeError, match="got a int"):
            elastic.prepare(3)
        with pytest.raises(TypeError, match="lazy module"):
            elastic.prepare(torch.nn.LazyLinear(2))
        for name in ("state_dict", "load_state_dict"):
            with pytest.raises(TypeError, match="its own method"):
                elastic.state(**{name: 1})
    assert elastic.prepare(model, 3) == (model, 3) and list(elastic.epochs(2, 4)) == [2, 3]


@pytest.mark.parametrize("parameters", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adam])
def test_an_optimizers_state_keeps_its_types(kind, parameters):
    states, optimizers = [], []
    for _ in range(2):
        model = torch.nn.Linear(3, 1).to(parameters)
        optimizers.append(kind(model.parameters(), lr=0.01))
        states.append(state_of(model, optimizers[-1]))
        model(torch.ones(2, 3, dtype=parameters)).sum().backward()
        optimizers[-1].step()
    states[1].load(states[0].capture())
    given, found = (list(optimizer.state.values()) for optimizer in optimizers)
    for ours, theirs in zip(found, given, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name

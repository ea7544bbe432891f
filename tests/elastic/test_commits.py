"""Commits: they are complete or do not exist, are worth their price, and let a trial go on as before."""

from __future__ import annotations

import os
import threading
from itertools import pairwise

import pytest
import torch

from fluidtune import elastic
from fluidtune.elastic import Commit, CommitStore, ElasticSession, GroupLost, LocalFiles
from fluidtune.elastic.data import trial_state
from fluidtune.elastic.transport import trees
from tests.contracts.processes import peer_processes, until

from . import trials
from .driving import Driver, run
from .groups import in_session, lone_session


def commit(iteration, size=10):
    state = {"weights": torch.full((size,), float(iteration))}
    return Commit("t", "f", loop=0, epoch=iteration, iteration=iteration, state=state)


def keep(store, iteration, **more):
    assert store.offer(lambda: commit(iteration), force=True, **more)
    assert store.flush()


def test_the_newest_whole_commit_is_loaded(tmp_path):
    store = CommitStore(str(tmp_path / "deep" / "folder"))
    assert store.load() is None
    for iteration in (1, 2, 3):
        keep(store, iteration)
        found = CommitStore(str(tmp_path / "deep" / "folder")).load()
        assert (found.iteration, found.epoch, found.loop, found.fingerprint) == (iteration, iteration, 0, "f")
        assert found.state["weights"].tolist() == [iteration] * 10
    assert sorted(os.listdir(tmp_path / "deep" / "folder")) == ["commit-0", "commit-1"]


def test_a_store_that_starts_again_keeps_the_newest(tmp_path):
    for iteration in (5, 6, 7, 4):  # also one that went back to an earlier iteration
        keep(CommitStore(str(tmp_path)), iteration)
        assert CommitStore(str(tmp_path)).load().iteration == iteration


@pytest.mark.parametrize("damage", ["cut", "cut in the head", "empty", "one bit", "swapped", "foreign"])
def test_damage_is_found_and_the_one_before_it_taken(tmp_path, damage):
    store = CommitStore(str(tmp_path))
    for iteration in (1, 2, 3):  # 3 went to commit-0
        keep(store, iteration)
    path = tmp_path / "commit-0"
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(
        {
            "cut": data[:middle],
            "cut in the head": data[:20],
            "empty": b"",
            "one bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "swapped": data[:8] + (99).to_bytes(8, "little") + data[16:],
            "foreign": b"another program's file, which is long enough to have a head of its own",
        }[damage]
    )
    store = CommitStore(str(tmp_path))
    assert store.load().iteration == 2
    keep(store, 8)  # takes the place of the damaged one
    assert CommitStore(str(tmp_path)).load().iteration == 8
    (tmp_path / "commit-1").write_bytes(b"")
    assert CommitStore(str(tmp_path)).load().iteration == 8
    path.unlink()
    assert CommitStore(str(tmp_path)).load() is None


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
    store = CommitStore(str(tmp_path), files=files, budget=0.02, clock=files.clock)
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
    assert store.offer(lambda: commit(501), force=True)


def test_a_slow_commit_does_not_delay_later_ones(tmp_path):
    files = Slow()
    store = CommitStore(str(tmp_path), files=files, budget=0.02, clock=files.clock)
    for turn in range(1, 13):
        files.now += 1.0
        files.cost = 5.0 if turn in (1, 5, 9) else 0.01
        assert store.offer(lambda turn=turn: commit(turn)), turn
        store.flush()


def test_never_more_than_one_is_being_written(tmp_path):
    files = Slow()
    files.let = threading.Semaphore(0)
    store = CommitStore(str(tmp_path), files=files, budget=1e9)
    assert store.offer(lambda: commit(1))
    assert not store.offer(lambda: pytest.fail("no snapshot is made in vain"))
    files.let.release(2)
    assert store.offer(lambda: commit(3), force=True)
    assert store.flush()
    assert store.load().iteration == 3


def test_a_write_that_fails_leaves_the_one_before_it(tmp_path):
    files = Slow()
    store = CommitStore(str(tmp_path), files=files, budget=1e9)
    keep(store, 1)
    files.fail = True
    assert store.offer(lambda: commit(2))
    assert not store.flush()
    assert store.load().iteration == 1
    files.fail = False
    keep(store, 3)
    assert store.load().iteration == 3


def test_a_storage_that_cannot_be_read_is_a_commit_that_failed(tmp_path):
    files = Slow()
    keep(CommitStore(str(tmp_path)), 1)
    store, reads = CommitStore(str(tmp_path), files=files, budget=1e9), files.read_bytes

    def failing(path):
        assert threading.current_thread().name == "commit"
        raise PermissionError("no access to the bucket")

    files.read_bytes = failing
    assert store.offer(lambda: commit(2)) and not store.flush()
    files.read_bytes = reads
    keep(store, 3)
    assert CommitStore(str(tmp_path)).load().iteration == 3


def test_a_write_that_fails_is_made_again_in_the_same_file(tmp_path):
    files = Slow()
    store = CommitStore(str(tmp_path), files=files, budget=1e9)
    keep(store, 1)
    keep(store, 2)
    files.fail = True
    assert store.offer(lambda: commit(3), force=True) and not store.flush()
    files.fail = False
    keep(store, 4)
    (tmp_path / "commit-0").unlink()
    assert store.load().iteration == 2


def test_a_snapshot_shares_nothing_with_what_goes_on(tmp_path):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    session = lone_session()
    session.prepare(model, optimizer)
    model(torch.ones(1, 3)).backward()
    optimizer.step()
    state = session._member.state.capture()
    before = state["stateful"][0]["weight"].clone()
    momentum = state["stateful"][1]["state"][0]["momentum_buffer"].clone()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0
    assert torch.equal(state["stateful"][0]["weight"], before)
    assert torch.equal(state["stateful"][1]["state"][0]["momentum_buffer"], momentum)
    assert state["stateful"][1]["param_groups"][0]["lr"] == 0.5
    assert state["stateful"][0]._metadata == model.state_dict()._metadata
    session.close()


@pytest.mark.parametrize("trial", [trials.mlp, trials.normed, trials.unfreezing])
@pytest.mark.parametrize("before, after", [(1, 1), (2, 1), (1, 2)])
def test_a_trial_goes_on_from_its_commit(pool, tmp_path, trial, before, after):
    """Stopped after two turns, at one width, it goes on at another in a new session, as if nothing had been."""
    reports, weights = trials.plain(trial, {})
    config = {"commits": str(tmp_path)}
    driver = Driver(pool, trial, config)
    driver.turn(1)
    if before == 2:
        driver.resize(2)
    pool[0].call(trials.allow)
    driver.turn(2)
    pool[0].call(trials.leave)
    pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome)[0] == "left"
    first = pool[0].call(trials.reports)
    second, (got, *_) = run(pool, trial, {**config, "seed": 77}, [after])
    assert first + second == pytest.approx(reports, rel=1e-4)
    if before == after == 1:
        assert first + second == reports
        assert all(torch.equal(got[name], value) for name, value in weights.items())
    for name, value in weights.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5)
    assert pool[0].call(trials.facts)["iteration"] == 4


def test_a_state_has_every_part_of_a_trial():
    def build(seed):
        torch.manual_seed(seed)
        model, scale = (
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
            torch.nn.Parameter(torch.randn(1)),
        )
        optimizer = torch.optim.Adam([*model.parameters(), scale])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        generator = torch.Generator().manual_seed(seed)
        loader = torch.utils.data.DataLoader(range(9), shuffle=True, generator=generator)
        session = lone_session()
        session.prepare(model, optimizer, scheduler, loader)
        (scale * model(torch.randn(4, 2))).sum().backward()
        for _ in range(seed):
            optimizer.step()
            scheduler.step()
        return session, (model, scale, optimizer, scheduler, generator)

    (first, a), (second, b) = build(3), build(1)
    state = first._member.state.capture()
    expected = torch.rand(1)
    second._member.state.load(state, with_streams=True)
    assert torch.equal(torch.rand(1), expected)
    torch.testing.assert_close(b[0].state_dict(), a[0].state_dict(), rtol=0, atol=0)
    assert torch.equal(a[1], b[1])
    torch.testing.assert_close(b[2].state_dict()["state"], a[2].state_dict()["state"], rtol=0, atol=0)
    assert b[2].param_groups[0]["lr"] == a[2].param_groups[0]["lr"]
    assert b[3].last_epoch == a[3].last_epoch == 3
    assert torch.equal(a[4].get_state(), b[4].get_state())
    first.close(), second.close()


def test_tensors_of_a_loops_own_values_come_back_where_they_were(monkeypatch):
    """No GPU is needed: "meta" stands for one."""
    values = {"kept": [torch.ones(2), torch.zeros(3)], "steps": 4}
    assert trees.on_devices({"a": values["kept"], "b": torch.ones(1, device="meta")}) == [False, False, True]
    monkeypatch.setattr(trial_state, "on_devices", lambda part: [False, True] if "steps" in part else [])
    session = lone_session(device="meta")
    (own,) = session.prepare(elastic.state(**values))
    session._objects.load(session._objects.capture(), with_streams=False)
    assert [each.device.type for each in own.kept] == ["cpu", "meta"] and own.steps == 4
    session.close()


@pytest.mark.gpu
def test_a_tensor_of_a_gpu_trials_state_is_on_the_gpu_after_a_commit():
    session = lone_session(device="cuda")
    (own,) = session.prepare(elastic.state(rates=torch.ones(2, device="cuda"), on_cpu=torch.ones(2)))
    session._objects.load(session._objects.capture(), with_streams=False)
    assert own.rates.is_cuda and not own.on_cpu.is_cuda
    session.close()


def resumed(start, commit_at=2, stop=5):
    """The epochs that run, and the iteration at the end, when the user's start is ``start``."""
    model = torch.nn.Linear(2, 1)
    first = lone_session()
    first.prepare(model)
    state = first._member.state.capture()
    first.close()
    kept = Commit("t", "f", loop=0, epoch=commit_at, iteration=commit_at + 10, state=state)
    other = torch.nn.Linear(2, 1)
    with in_session(resume=kept, fingerprint="f") as session:
        assert session.iteration == commit_at + 10
        elastic.prepare(other)
        epochs = session.run(lambda: list(elastic.epochs(start, stop)))
    return epochs, session.iteration, torch.equal(other.weight, model.weight)


def test_the_newer_of_commit_and_the_users_own_checkpoint_counts():
    assert resumed(0) == ([2, 3, 4], 15, True)
    assert resumed(2) == ([2, 3, 4], 15, True)
    assert resumed(3) == ([3, 4], 15, False)
    assert resumed(0, commit_at=5) == ([], 15, True)


def test_loops_without_a_start_begin_with_what_is_newer_than_the_commit():
    model = torch.nn.Linear(2, 1)
    before = model.weight.clone()
    zero = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}
    state = {"stateful": [zero], "loose": [], "generators": []}
    for begin in (ElasticSession.boundary, ElasticSession.first_boundary):
        kept = Commit("t", "", loop=0, epoch=8, iteration=8, state=state)
        session = lone_session(resume=kept)
        session.prepare(model)
        session.prefer_checkpoint()
        begin(session)
        assert torch.equal(model.weight, before)
        session.close()


def test_a_run_that_does_not_come_to_the_loop_of_its_commit_begins_anew_without_it(tmp_path):
    """The script runs one of its loops only, as its own checkpoint says."""
    store = CommitStore(str(tmp_path))
    model = torch.nn.Linear(2, 1)

    def phase(start):
        elastic.prepare(model)
        return list(elastic.epochs(start, 10))

    with in_session() as session:
        phase(0)
        kept = Commit("t", "", loop=1, epoch=3, iteration=8, state=session._member.state.capture())
    store.offer(lambda: kept, force=True)
    with in_session(resume=store.load(), commits=store) as session, pytest.raises(GroupLost, match="number 2, which"):
        session.run(phase, 3)
    assert store.load() is None
    with in_session() as session:
        assert session.run(phase, 3) == [*range(3, 10)]


def test_a_newer_checkpoint_takes_the_place_of_a_commit_in_whichever_loop_it_is():
    model = torch.nn.Linear(2, 1)
    kept = Commit("t", "", loop=0, epoch=4, iteration=4, state={})
    with in_session(resume=kept) as session:
        session.prefer_checkpoint()
        elastic.prepare(model)
        assert list(elastic.epochs(2, 5)) == [2, 3, 4]


def test_the_hosts_note_is_kept_and_a_resume_can_be_forgotten(tmp_path):
    notes = iter(["first", "second", "third"])
    session = lone_session(
        commits=CommitStore(str(tmp_path), budget=1e9),
        resume=Commit("t", "", loop=0, epoch=2, iteration=2, state={}),
        note=lambda: next(notes),
    )
    session.forget_resume()
    assert session.iteration == 0
    turns = session.epochs(0, 3)
    assert next(turns) == 0
    assert next(turns) == 1
    session.close()
    found = CommitStore(str(tmp_path)).load()
    assert (found.iteration, found.note) == (1, "first")


def test_a_commit_of_something_else_is_refused():
    with pytest.raises(ValueError, match="'f', not 'g'"):
        lone_session(resume=commit(1), fingerprint="g")
    session = lone_session(resume=Commit("t", "", 0, 1, 1, {"stateful": [{}, {}], "loose": [], "generators": []}))
    session.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="same objects in the same order"):
        next(session.epochs(0, 2))
    session.close()


def test_a_killed_leader_leaves_a_commit_that_can_be_loaded(tmp_path):
    config = {"commits": str(tmp_path), "free": True, "stop": 10**6}

    def newest() -> int:
        found = CommitStore(str(tmp_path)).load()
        return 0 if found is None else found.iteration

    reached = 0
    for _ in range(3):
        with peer_processes(1) as (leader,):
            leader.call(trials.start, trials.mlp, config, True, "w0")
            until(lambda leader=leader: len(leader.call(trials.reports)) > 20)
            # On a busy machine twenty iterations may pass before the thread that writes commits has its turn.
            until(lambda reached=reached: newest() > reached)
            leader.kill()
        assert newest() > reached
        reached = newest()
    assert len(os.listdir(tmp_path)) <= 3, "the two commits, and at most one that was being written"


@pytest.mark.parametrize("parameters", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adam])
def test_an_optimizers_state_keeps_its_types(kind, parameters):
    sessions, optimizers = [], []
    for _ in range(2):
        model = torch.nn.Linear(3, 1).to(parameters)
        optimizers.append(kind(model.parameters(), lr=0.01))
        sessions.append(lone_session())
        sessions[-1].prepare(model, optimizers[-1])
        model(torch.ones(2, 3, dtype=parameters)).sum().backward()
        optimizers[-1].step()
    sessions[1]._objects.load(sessions[0]._objects.capture(), with_streams=False)
    given, found = (list(optimizer.state.values()) for optimizer in optimizers)
    for ours, theirs in zip(found, given, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
    for session in sessions:
        session.close()

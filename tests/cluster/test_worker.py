"""A worker process that hosts trials, without Ray's cluster: each test calls its methods as a driver would."""

from __future__ import annotations

import inspect
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ray.tune import Trainable

from fluidtune.cluster.hosting import commit_stores, leader_host
from fluidtune.cluster.hosting.messages import AttachSpec, LoadSpec
from fluidtune.cluster.hosting.worker import Worker
from fluidtune.cluster.sharing.lanes import Eviction, LaneSettings, LaneTicket
from fluidtune.elastic import ElasticSession, current
from fluidtune.elastic.divided import follower as divided_follower
from fluidtune.group_facts import GroupFacts
from fluidtune.ray_compat.trainable import trainable_module
from salus_share.seat_table import FILE, home
from tests.cluster.test_commits import Failing
from tests.contracts.processes import in_a_process, peer_processes
from tests.ray_compat.storage import TrialStorage

pytestmark = [pytest.mark.slow, pytest.mark.core]


@pytest.mark.parametrize("said", [0, -1.0, math.nan, math.inf, "fast", None, True])
def test_an_iteration_takes_time_whatever_its_result_says(said):
    """Seen: a restored job ended with an EngineError where a script reports a `time_this_iter_s` of 0."""
    assert 0 < leader_host.seconds_of({"time_this_iter_s": said}) <= 1
    assert (leader_host.seconds_of({"time_this_iter_s": 2.5}), leader_host.seconds_of({})) == (2.5, 1e-6)


class Counting(Trainable):
    """An elastic class trainable whose only weight is the number of its steps, which it reports and saves."""

    def setup(self, config: dict[str, Any]) -> None:
        import torch

        from fluidtune import elastic

        self.module = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.module.weight)
        self.module = elastic.prepare(self.module)

    def step(self) -> dict[str, Any]:
        self.module.weight.data += 1
        return {"steps": self.module.weight.item(), "iteration_before": self.iteration}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "steps").write_text(str(self.module.weight.item()))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.module.weight.data.fill_(float(Path(checkpoint_dir, "steps").read_text()))


#: The last one in this process.
_worker: list[Worker] = []


def fresh(name: str = "w") -> Worker:
    """A process that serves a trial."""
    from fluidtune.elastic import use

    use(None)
    _worker[:] = [Worker(name, {})]
    return _worker[0]


def spec(folder: str, delivered: int = 0, config: dict[str, Any] | None = None, **more: Any) -> LoadSpec:
    kwargs = {"config": config or {}, "storage": TrialStorage(Path(folder))}
    return LoadSpec("trial", kwargs, delivered=delivered, **more)


def hosting(folder: str, delivered: int = 0, trainable: type = Counting) -> Worker:
    """It has taken the place of one that hosted the trial and died."""
    worker = fresh()
    assert isinstance(worker.load(trainable, spec(folder, delivered)), GroupFacts)
    return worker


def session_here() -> ElasticSession:
    """The session of this process' trial."""
    session = current()
    assert session is not None
    return session


def train(worker: Worker, iterations: int, commits: bool = True) -> list[dict[str, Any]]:
    """The results of ``iterations`` iterations. If ``commits``, a commit goes before each of them."""
    store = session_here()._commits.store
    assert store is not None
    store._budget = 1e9 if commits else -1.0
    results = []
    for _ in range(iterations):
        results.append(worker.train().result)
        store.flush()
    return results


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The trial's."""
    return str(tmp_path)


@pytest.mark.parametrize("saved", [3, 5, 6, 8])
@in_a_process
def test_a_moved_trials_commit_has_what_was_reported_before(folder: str, saved: int) -> None:
    train(hosting(folder), 6)  # the last commit is of iteration 5
    second = hosting(folder, delivered=6)
    train(second, 3)
    # The driver dies; what Tune saved last is older than the worker that was the trial's when it died
    again = hosting(folder, delivered=saved)
    results = train(again, 11 - saved)
    assert [(r["training_iteration"], r["steps"]) for r in results] == [(i, i) for i in range(saved + 1, 12)]
    ran_again = results[-1]["iterations_since_restore"]
    assert ran_again == 3, f"it has results up to 8 in its commit, and ran {ran_again} iterations"


@in_a_process
def test_a_storage_that_is_away_while_a_trial_is_loaded_fails_none_that_has_nothing_there(folder: str) -> None:
    """Seen: the trial failed, as did one with a commit of a class that the script had renamed."""
    train(hosting(folder), 3)  # the last commit is of iteration 2
    commit_stores.insist.__defaults__ = ((0.0, 0.0),)
    found: list[Any] = []
    for fails, delivered in ((3, 3), (2, 3), (3, 0)):
        worker, files, asked = fresh(), Failing(), spec(folder, delivered)
        asked.kwargs["storage"].storage_filesystem, files.fails = files, fails
        try:
            worker.load(Counting, asked)
        except commit_stores.StorageAway:
            found.append("raised")
            continue
        [result] = train(worker, 1)
        found.append((result["training_iteration"], result["steps"], result["iterations_since_restore"]))
    assert found == ["raised", (4, 4.0, 3), (1, 1.0, 1)]


class Stepping(Counting):
    """It says how many steps and episodes each iteration has had."""

    def step(self) -> dict[str, Any]:
        return {**super().step(), "timesteps_this_iter": 10, "episodes_this_iter": 2}


@in_a_process
def test_timesteps_and_episodes_are_counted_on_from_a_commit_and_after_a_proof(folder: str) -> None:
    """Seen: after a move, `timesteps_total` and `episodes_total` began at 0."""
    train(hosting(folder, trainable=Stepping), 3)
    worker = hosting(folder, 3, Stepping)
    results = train(worker, 2)
    leader = worker._leader
    assert leader is not None and leader.reports is not None
    leader.reports.go_on(replace(leader.reports.note(), iteration=2, timesteps_total=20, episodes_total=4))
    results += train(worker, 1)
    counted = [(result["timesteps_total"], result["episodes_total"]) for result in results]
    assert counted == [(40, 8), (50, 10), (60, 12)]


class Splitting(Counting):
    """Its ``setup`` draws from the streams of Python, numpy and torch, and gets no seed."""

    def setup(self, config: dict[str, Any]) -> None:
        import random

        import numpy
        import torch

        kept, _ = torch.utils.data.random_split(range(50), [40, 10])
        self.drawn = [sorted(kept.indices), random.random(), float(numpy.random.rand())]
        super().setup(config)

    def step(self) -> dict[str, Any]:
        return {**super().step(), "drawn": self.drawn}


def drawn(folder: str, delivered: int) -> tuple[Any, Any, Any]:
    """(what a leader's setup has drawn, its initial streams, those that it sends with its next iteration)."""
    worker = hosting(folder, delivered, Splitting)
    worker.train()
    reply = worker.train()
    store = session_here()._commits.store
    assert store is not None and store.flush()
    sent_again = worker.train().facts.streams
    # The pipe moves the streams' tensor into shared memory, under the hands of whoever still writes it into a commit.
    assert store.flush()
    return reply.result["drawn"], session_here().facts().streams, sent_again


def test_all_processes_of_a_trial_draw_alike_before_its_loop(tmp_path: Path) -> None:
    with peer_processes(2) as (leader, later):
        first, _, sent_again = leader.call(drawn, str(tmp_path), 0)
        assert sent_again is None
        assert later.call(drawn, str(tmp_path), 1)[0] == first  # by the commit


class Following(divided_follower.Follower):
    """``how``: what happens when it is attached, and when it runs."""

    how: ClassVar[tuple[Any, Any]] = (None, None)
    closed: ClassVar[int] = 0

    def attach(self, address: Any) -> None:
        assert address == ("here", 1)
        if self.how[0] is not None:
            raise self.how[0]

    def run(self) -> None:
        if self.how[1] is not None:
            raise self.how[1]

    def close(self) -> None:
        Following.closed += 1


@pytest.mark.parametrize(
    ("attached", "ran", "broken", "answers"),
    [
        (None, None, None, (None, None)),
        (divided_follower.Refused("another trial's"), ValueError(), None, ("another trial's", None)),
        (ConnectionRefusedError(), None, None, ("ConnectionRefusedError()", None)),
        (None, ValueError("its own"), None, (None, "ValueError('its own')")),
        (
            None,
            RuntimeError("CUDA"),
            Eviction("it is lost", broken=0),
            (None, Eviction("it is lost", broken=0)),
        ),
    ],
)
@in_a_process
def test_what_a_follower_answers(folder: str, attached: Any, ran: Any, broken: Any, answers: Any) -> None:
    divided_follower.Follower = Following  # type: ignore[misc]
    Following.how = attached, ran
    worker = fresh("f")
    worker._probe.broken = lambda error: broken  # type: ignore[method-assign]
    asked = AttachSpec("trial", ("here", 1), device="gpu" if broken else "cpu")
    assert (worker.attach(asked), worker.follow()) == answers
    assert not worker.unload() and Following.closed == 1


@in_a_process
def test_a_checkpoint_that_is_newer_than_the_commit_is_gone_on_from(folder: str) -> None:
    first = hosting(folder)
    train(first, 5)
    train(first, 2, commits=False)
    checkpoint = first.save(os.path.join(folder, "kept"))
    again = hosting(folder, delivered=7)
    again.restore(checkpoint)
    results = train(again, 2)
    assert [(r["training_iteration"], r["steps"]) for r in results] == [(8, 8), (9, 9)]
    # The next one goes on from the commit of 8 that was made meanwhile
    third = hosting(folder, delivered=9)
    third.restore(checkpoint)
    assert [(r["training_iteration"], r["steps"]) for r in train(third, 1)] == [(10, 10)]


class Keeping(Trainable):
    """A class that can be reset, and keeps what its first trial has read."""

    told: ClassVar[list[str]] = []

    def setup(self, config: dict[str, Any]) -> None:
        self.told.append("read")
        self.x = config["x"]

    def step(self) -> dict[str, Any]:
        return {"x": self.x}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.told.append("reset")
        if new_config["x"] == 5:
            raise ValueError("no further trial")
        self.x = new_config["x"]
        return bool(self.x < 3)

    def cleanup(self) -> None:
        self.told.append(f"cleanup {self.x}")


class NoLogger:
    """What Tune gives a trainable in Ray's older versions."""

    def __init__(self, folder: str) -> None:
        self.logdir = folder

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@in_a_process
def test_a_class_that_can_be_reset_stays_in_its_process_where_that_is_asked_for(folder: str) -> None:
    worker = fresh()
    older = "logger_creator" in inspect.signature(Trainable.__init__).parameters

    def keeping(x: int) -> LoadSpec:
        asked = spec(folder, config={"x": x})
        asked.kwargs.update({"logger_creator": lambda config: NoLogger(folder)} if older else {})
        return asked

    for x in (1, 2, 3):
        assert isinstance(worker.load(Keeping, keeping(x)), GroupFacts)
        result = worker.train().result
        assert (result["x"], result["training_iteration"]) == (x, 1)
        assert worker.unload(keep=True)
    assert isinstance(worker.load(Keeping, keeping(4)), GroupFacts)
    assert worker.unload(keep=True)
    with pytest.raises(ValueError, match="no further trial"):
        worker.load(Keeping, keeping(5))
    # The reset to 3 is refused, and that to 4 too: these trials get an object of their own.
    first = ["read", "reset", "reset", "cleanup 3", "read", "reset", "cleanup 4", "read"]
    # Seen: an object whose reset raises never got its `cleanup()`.
    assert Keeping.told == [*first, "reset", "cleanup 4"]


@pytest.mark.parametrize("keep", [True, False])
@in_a_process
def test_a_trial_that_shared_its_device_to_the_end_leaves_its_lane_and_its_process_ends(
    folder: str, keep: bool
) -> None:
    worker = fresh()
    settings, ticket = LaneSettings(f"test-{os.getpid()}", "HPT", 4 << 30, 1.0), LaneTicket(0, (0.3, 0.1), 10.0, 0)
    try:
        assert isinstance(worker.load(Counting, spec(folder, lanes=settings, ticket=ticket)), GroupFacts)
        worker.train(ticket)
        table = home(settings.device) / FILE
        assert table.exists()
        assert not worker.unload(keep) and not table.exists()
    finally:
        shutil.rmtree(home(settings.device), ignore_errors=True)


def test_no_trial_of_a_worker_imports_ipython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune imports it in each actor. Seen: where IPython is installed no process served a second trial."""
    monkeypatch.setattr(trainable_module, "disable_ipython", trainable_module.disable_ipython)
    monkeypatch.setattr(Trainable, "is_actor", lambda self: True)
    noted = tmp_path / "imported"
    (tmp_path / "IPython").mkdir()
    (tmp_path / "IPython" / "__init__.py").write_text(f"import pathlib; pathlib.Path({str(noted)!r}).touch()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    Trainable({})
    assert noted.exists(), "Tune imports it no more: leave_ipython_out is not needed"
    noted.unlink()
    del sys.modules["IPython"]  # monkeypatch would put this one back for all later tests
    Worker("w", {})
    Trainable({})
    assert not noted.exists()

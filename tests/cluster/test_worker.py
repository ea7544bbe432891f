"""A worker process that hosts trials, without Ray's cluster: each test calls its methods as a driver would."""

from __future__ import annotations

import functools
import inspect
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from pyarrow.fs import LocalFileSystem
from ray.tune import Trainable
from ray.tune.trainable import wrap_function

from benchmarks.salus_jobs import service_status
from fluidtune.cluster.hosting import commit_stores, leader_host
from fluidtune.cluster.hosting import worker as worker_module
from fluidtune.cluster.hosting.messages import LoadSpec
from fluidtune.cluster.hosting.worker import Worker
from fluidtune.cluster.sharing.lanes import LaneSettings, LaneTicket, is_lane_service
from fluidtune.elastic import ElasticSession, Reform, current
from fluidtune.elastic.checks.verdict import Verdict
from fluidtune.ray_compat.trainable import trainable_module
from salus_share.seat_table import home
from tests.cluster.test_commits import Failing
from tests.contracts.processes import peer_processes, until

pytestmark = [pytest.mark.slow, pytest.mark.core]


@pytest.mark.parametrize("said", [0, -1.0, math.nan, math.inf, "fast", None, True])
def test_an_iteration_takes_time_whatever_its_result_says(said):
    """docs/bugs.md, 633"""
    assert 0 < leader_host.seconds_of({"time_this_iter_s": said}) <= 1
    assert (leader_host.seconds_of({"time_this_iter_s": 2.5}), leader_host.seconds_of({})) == (2.5, 1e-6)


class Storage:
    """A trial's directory."""

    def __init__(self, folder: str) -> None:
        self.trial_fs_path = folder
        self.storage_filesystem = LocalFileSystem()


class Counting(Trainable):
    """An elastic class trainable whose only weight is the number of its steps, which it reports and saves."""

    def setup(self, config: dict[str, Any]) -> None:
        import torch

        from fluidtune import elastic

        self.module = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.module.weight)
        self.module = elastic.prepare(self.module)

    def step(self) -> dict[str, Any]:
        if self.config.get("notes"):
            with open(os.path.join(self.config["notes"], str(os.getpid())), "a") as file:
                file.write(f"{self.iteration} ")
        self.module.weight.data += 1
        return {"steps": self.module.weight.item(), "iteration_before": self.iteration}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "steps").write_text(str(self.module.weight.item()))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.module.weight.data.fill_(float(Path(checkpoint_dir, "steps").read_text()))


#: The last one in this process.
_worker: list[Worker] = []


def fresh(folder: str, name: str) -> Worker:
    """A process that serves a trial in this folder."""
    from fluidtune.elastic import use

    use(None)
    worker_module.is_forked = lambda: True  # as a process is that a fork server has made
    worker_module.storage_of = leader_host.storage_of = lambda spec: Storage(folder)
    _worker[:] = [Worker(name, {})]
    return _worker[0]


def hosting(folder: str, delivered: int = 0, **config: Any) -> Worker:
    """It has taken the place of one that hosted the trial and died."""
    worker = fresh(folder, "w")
    assert worker.load(Counting, LoadSpec("trial", {"config": config}, delivered=delivered)) is None
    return worker


def session_here() -> ElasticSession:
    """The session of this process' trial."""
    session = current()
    assert session is not None
    return session


def train(worker: Worker, iterations: int, commits: bool = True) -> list[dict[str, Any]]:
    """The results of ``iterations`` iterations. If ``commits``, a commit goes before each of them."""
    store = session_here()._commits._store
    assert store is not None
    store._budget = 1e9 if commits else -1.0
    results = []
    for _ in range(iterations):
        results.append(worker.train().result)
        store.flush()
    return results


@pytest.fixture
def in_a_process(tmp_path: Path) -> Any:
    """Run a function there, with a folder for the trial."""
    with peer_processes(1) as (process,):

        def call(fn: Callable[..., Any], *args: Any) -> Any:
            return process.call(fn, str(tmp_path), *args)

        yield call


def saved_after_a_loss(folder: str) -> None:
    train(hosting(folder), 5)  # the last commit is of iteration 4
    for delivered in (4, 5):
        again = hosting(folder, delivered)
        kept = again.save(os.path.join(folder, f"kept-{delivered}"))
        assert kept.checkpoint is not None
        steps = Path(kept.checkpoint.path, "steps").read_text()
        assert steps == f"{delivered}.0", steps
        assert train(again, 1)[0]["steps"] == delivered + 1


def test_a_save_that_comes_first_after_a_loss_has_what_was_trained(in_a_process: Any) -> None:
    in_a_process(saved_after_a_loss)


def moved(folder: str, saved: int) -> None:
    train(hosting(folder), 6)  # the last commit is of iteration 5
    second = hosting(folder, delivered=6)
    train(second, 3)
    # The driver dies; what Tune saved last is older than the worker that was the trial's when it died
    again = hosting(folder, delivered=saved)
    results = train(again, 11 - saved)
    assert [(r["training_iteration"], r["steps"]) for r in results] == [(i, i) for i in range(saved + 1, 12)]
    ran_again = results[-1]["iterations_since_restore"]
    assert ran_again == 3, f"it has results up to 8 in its commit, and ran {ran_again} iterations"


@pytest.mark.parametrize("saved", [3, 5, 6, 8])
def test_a_moved_trials_commit_has_what_was_reported_before(in_a_process: Any, saved: int) -> None:
    in_a_process(moved, saved)


def away(folder: str) -> list[Any]:
    """What trials do whose storage fails a number of times while they are loaded, by the iterations that Tune knows.

    The last commit is of iteration 2.
    """
    train(hosting(folder), 3)
    commit_stores.PAUSES_S = (0.0, 0.0)
    found: list[Any] = []
    for fails, delivered in ((3, 3), (2, 3), (3, 0)):
        files = Failing()
        storage = Storage(folder)
        storage.storage_filesystem = files
        worker = fresh(folder, "w")
        leader_host.storage_of = lambda spec, storage=storage: storage
        files.fails = fails
        try:
            worker.load(Counting, LoadSpec("trial", {"config": {}}, delivered=delivered))
        except commit_stores.StorageAway:
            found.append("raised")
            continue
        [result] = train(worker, 1)
        found.append((result["training_iteration"], result["steps"], result["iterations_since_restore"]))
    return found


def test_a_storage_that_is_away_while_a_trial_is_loaded_fails_none_that_has_nothing_there(in_a_process: Any) -> None:
    """docs/bugs.md, 689"""
    assert in_a_process(away) == ["raised", (4, 4.0, 3), (1, 1.0, 1)]


class Stepping(Counting):
    """It says how many steps and episodes each iteration has had."""

    def step(self) -> dict[str, Any]:
        return {**super().step(), "timesteps_this_iter": 10, "episodes_this_iter": 2}


def totals(folder: str) -> list[tuple[int, int]]:
    """What Tune counts in an iteration after a commit, and after a proof."""
    worker = fresh(folder, "w")
    worker.load(Stepping, LoadSpec("trial", {"config": {}}))
    train(worker, 3)
    worker = fresh(folder, "w")
    worker.load(Stepping, LoadSpec("trial", {"config": {}}, delivered=3))
    results = train(worker, 2)
    leader = worker._leader
    assert leader is not None and leader.reports is not None
    leader.reports.go_on(replace(leader.reports.note(), iteration=2, timesteps_total=20, episodes_total=4))
    results += train(worker, 1)
    return [(result["timesteps_total"], result["episodes_total"]) for result in results]


def test_timesteps_and_episodes_are_counted_on_from_a_commit(in_a_process: Any) -> None:
    """docs/bugs.md, 691"""
    assert in_a_process(totals) == [(40, 8), (50, 10), (60, 12)]


def leading(folder: str) -> Any:
    """Address of a leader that has done two iterations, as another worker before it."""
    train(hosting(folder, notes=folder), 3)
    worker = hosting(folder, delivered=2, notes=folder)
    train(worker, 1)
    assert worker._leader is not None and worker._leader.session is not None
    return worker._leader.session.facts().address


def led(reform: Reform, iterations: int) -> None:
    worker = _worker[0]
    session = session_here()
    session.direct(reform)
    until(lambda: session._member._group.joiners_announced(reform.generation, [1]))
    train(worker, iterations)


def following(folder: str) -> Any:
    return fresh(folder, "f").join(Counting, LoadSpec("trial", {"config": {"notes": folder}}))


def entering(reform: Reform) -> str | None:
    return _worker[0].enter(reform)


def test_iterations_have_the_same_number_in_all_workers(tmp_path: Path) -> None:
    with peer_processes(2) as (leader, follower):
        reform = Reform(1, ("w", "f"), leader.call(leading, str(tmp_path)))
        assert follower.call(following, str(tmp_path)) is None
        follower.send(entering, reform)
        leader.call(led, reform, 3)
        assert (tmp_path / str(leader.process.pid)).read_text().split() == ["0", "1", "2", "2", "3", "4", "5"]
        until(lambda: (tmp_path / str(follower.process.pid)).read_text().split() == ["3", "4", "5"])


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
    worker = fresh(folder, "w")
    assert worker.load(Splitting, LoadSpec("trial", {"config": {}}, delivered=delivered)) is None
    worker.train()
    reply = worker.train()
    store = session_here()._commits._store
    assert store is not None and store.flush()
    sent_again = worker.train().facts.streams
    # The pipe moves the streams' tensor into shared memory, under the hands of whoever still writes it into a commit.
    assert store.flush()
    return reply.result["drawn"], session_here().facts().streams, sent_again


def drawn_by_a_joiner(folder: str, streams: Any) -> Any:
    worker = fresh(folder, "f")
    assert worker.join(Splitting, LoadSpec("trial", {"config": {}}, streams=streams)) is None
    assert worker._follower is not None and isinstance(worker._follower.trainable, Splitting)
    return worker._follower.trainable.drawn


def test_all_processes_of_a_trial_draw_alike_before_its_loop(tmp_path: Path) -> None:
    with peer_processes(3) as (leader, follower, later):
        first, streams, sent_again = leader.call(drawn, str(tmp_path), 0)
        assert sent_again is None
        assert follower.call(drawn_by_a_joiner, str(tmp_path), streams) == first
        assert later.call(drawn, str(tmp_path), 1)[0] == first  # by the commit


class Sided(Counting):
    """A trainable with side effects; what it prints and where it writes is read by the test."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        os.mkdir("made")
        print("printed by setup")
        os.system("echo printed by a process")

    def step(self) -> dict[str, Any]:
        with open("made/steps", "a") as file:
            file.write("step ")
        print("printed by step")
        from fluidtune import elastic

        return {**super().step(), "leads": elastic.is_leader()}


class WorkingStorage(Storage):
    """As Ray's: every process of the trial on one machine has the same working directory."""

    @property
    def trial_working_directory(self) -> str:
        return os.path.join(self.trial_fs_path, "work")

    def persist_artifacts(self, force: bool = False) -> None:
        """As Ray's with ``sync_artifacts``: the trial's folder gets what is in the working directory."""
        shutil.copytree(self.trial_working_directory, os.path.join(self.trial_fs_path, "kept"), dirs_exist_ok=True)


class WorkingLogger:
    """What older versions of Ray make a trial's directory with."""

    def __init__(self, config: dict[str, Any], logdir: str) -> None:
        self.logdir = logdir
        os.makedirs(logdir, exist_ok=True)
        os.chdir(logdir)

    def on_result(self, result: dict[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def sided_spec(folder: str) -> LoadSpec:
    """Both log files asked for, as by ``RunConfig(log_to_file=True)``."""
    config = {"__stdout_file__": "stdout", "__stderr_file__": "stderr"}
    kwargs: dict[str, Any] = {"config": config, "storage": WorkingStorage(folder)}
    if "logger_creator" in inspect.signature(Trainable.__init__).parameters:
        kwargs["logger_creator"] = functools.partial(WorkingLogger, logdir=kwargs["storage"].trial_working_directory)
    return LoadSpec("trial", kwargs)


def sided_leader(folder: str) -> Any:
    worker = fresh(folder, "w")
    assert worker.load(Sided, sided_spec(folder)) is None
    worker.train()
    assert worker.train().result["leads"] is True
    assert worker._leader is not None and worker._leader.session is not None
    return worker._leader.session.facts().address


def sided_follower(folder: str) -> tuple[str | None, str]:
    printed = os.open(os.path.join(folder, "printed"), os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    worker = fresh(folder, "f")
    return worker.join(Sided, sided_spec(folder)), os.getcwd()


def unloaded() -> tuple[str | None, str | None]:
    print("printed afterwards", flush=True)
    return _worker[0].unload(), os.environ.get("WANDB_MODE")


def test_a_followers_side_effects_are_not_seen(tmp_path: Path) -> None:
    with peer_processes(2) as (leader, follower):
        reform = Reform(1, ("w", "f"), leader.call(sided_leader, str(tmp_path)))
        answer, place = follower.call(sided_follower, str(tmp_path))
        assert answer is None
        follower.send(entering, reform)
        leader.call(led, reform, 3)
        until(lambda: Path(place, "made", "steps").exists())
        leader.kill()
        follower.result()
        assert follower.call(unloaded) == (None, None)
    assert (tmp_path / "work" / "made" / "steps").read_text() == "step " * 5
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["made", "stderr", "stdout"]
    assert (tmp_path / "work" / "stdout").read_text().count("printed by setup") == 1
    assert not Path(place).exists()
    assert (tmp_path / "kept" / "made" / "steps").read_text() == "step " * 5
    assert "printed by" not in (tmp_path / "printed").read_text()


def without_data(config: dict[str, Any]) -> None:
    raise FileNotFoundError("no data on this node")


def failing(folder: str) -> str | None:
    class WithoutStorage(wrap_function(without_data)):  # type: ignore[misc]
        def setup(self, config: dict[str, Any]) -> None:
            """Ray's would want a place for checkpoints."""

    return fresh(folder, "f").join(WithoutStorage, LoadSpec("trial", {"config": {}}))


def test_a_joiner_that_fails_says_why(in_a_process: Any) -> None:
    assert "no data on this node" in in_a_process(failing)


def restored_past_its_commit(folder: str) -> None:
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


def test_a_checkpoint_that_is_newer_than_the_commit_is_gone_on_from(in_a_process: Any) -> None:
    in_a_process(restored_past_its_commit)


class Classifying(Trainable):
    """An elastic class trainable; with ``weights`` its loss is no mean over the samples."""

    def setup(self, config: dict[str, Any]) -> None:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        from fluidtune import elastic

        x = torch.randn(15, 3, generator=torch.Generator().manual_seed(1))
        self.model, self.loader = (
            torch.nn.Linear(3, 2),
            DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=5),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = elastic.prepare(self.model, self.optimizer, self.loader)[-1]

    def step(self) -> dict[str, Any]:
        import torch

        weight = torch.tensor([1.0, 9.0]) if self.config["weights"] else None
        for x, y in self.loader:
            torch.nn.functional.cross_entropy(self.model(x), y, weight=weight).backward()
            self.optimizer.step()
        return {"done": False}


def classify(config: dict[str, Any]) -> None:
    trainable = Classifying()
    trainable.config = config
    trainable.setup(config)
    from fluidtune import elastic

    for _ in elastic.epochs(0, 3):
        trainable.step()


def rehearsing(folder: str) -> list[tuple[str, str]]:
    class Function(wrap_function(classify)):  # type: ignore[misc]
        def setup(self, config: dict[str, Any]) -> None:
            """Ray's would want a place for checkpoints."""

    found = []
    for trainable in (Classifying, Function):
        for weights in (False, True):
            worker = fresh(folder, "f")
            verdict = worker.join(trainable, LoadSpec("trial", {"config": {"weights": weights}}, rehearse=True))
            assert isinstance(verdict, Verdict), verdict
            worker.unload()
            found.append((verdict.kind, verdict.reason))
    return found


def test_a_new_worker_rehearses_a_step_and_stays_out_if_it_differs(in_a_process: Any) -> None:
    kinds, reasons = zip(*in_a_process(rehearsing), strict=True)
    assert kinds == ("same", "differs") * 2
    assert "gradient of" in reasons[1] and "gradient of" in reasons[3]


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


def kept_between_trials(folder: str) -> list[str]:
    worker = fresh(folder, "w")
    older = "logger_creator" in inspect.signature(Trainable.__init__).parameters
    more = {"logger_creator": lambda config: NoLogger(folder)} if older else {}
    for x in (1, 2, 3):
        assert worker.load(Keeping, LoadSpec("trial", {"config": {"x": x}, **more})) is None
        result = worker.train().result
        assert (result["x"], result["training_iteration"]) == (x, 1)
        assert worker.unload(keep=True) is None
    assert worker.load(Keeping, LoadSpec("trial", {"config": {"x": 4}, **more})) is None
    assert worker.unload() is None
    return Keeping.told


def test_a_class_that_can_be_reset_stays_in_its_process_where_that_is_asked_for(in_a_process: Any) -> None:
    told = in_a_process(kept_between_trials)
    # The reset to 3 is refused, and that to 4 too: these trials get an object of their own.
    assert told == ["read", "reset", "reset", "cleanup 3", "read", "reset", "cleanup 4", "read", "cleanup 4"]


class Unwilling(Keeping):
    """It cannot be reset."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        raise ValueError("no second trial")


def kept_for_one_trial(folder: str) -> list[str]:
    worker = fresh(folder, "w")
    older = "logger_creator" in inspect.signature(Trainable.__init__).parameters
    more = {"logger_creator": lambda config: NoLogger(folder)} if older else {}
    assert worker.load(Unwilling, LoadSpec("trial", {"config": {"x": 1}, **more})) is None
    assert worker.unload(keep=True) is None
    with pytest.raises(ValueError, match="no second trial"):
        worker.load(Unwilling, LoadSpec("trial", {"config": {"x": 2}, **more}))
    return Keeping.told


def test_an_object_whose_reset_raises_is_cleaned_up(in_a_process: Any) -> None:
    """docs/bugs.md, 693"""
    assert in_a_process(kept_for_one_trial) == ["read", "cleanup 1"]


def unload_from_a_lane(folder: str) -> tuple[bool, str | None]:
    """Whether a trial was in a lane of its device when it was unloaded, and why its worker must be replaced."""
    worker = fresh(folder, "w")
    settings, ticket = LaneSettings(f"test-{os.getpid()}", "HPT", 4 << 30, 1.0), LaneTicket((0.3, 0.1), 10.0, 0)
    try:
        assert worker.load(Counting, LoadSpec("trial", {"config": {}}, lanes=settings, ticket=ticket)) is None
        worker.train(None, ticket)
        shared = bool(service_status(home(settings.device))["lanes"])
        return shared, worker.unload()
    finally:
        for process in filter(is_lane_service, psutil.Process().children()):
            process.kill()
        shutil.rmtree(home(settings.device), ignore_errors=True)


def test_a_trial_that_shared_its_device_to_the_end_leaves_a_clean_worker(in_a_process: Any) -> None:
    assert in_a_process(unload_from_a_lane) == (True, None)


def test_no_trial_of_a_worker_imports_ipython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/bugs.md, 474. Tune imports it in each actor, and a worker that has imported it serves one trial only."""
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

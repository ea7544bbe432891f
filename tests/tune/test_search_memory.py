"""A restored driver's algorithm decides as one that was not killed, whichever call it was killed after."""

from __future__ import annotations

import copy
import json
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.tune import Checkpoint
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from fluidtune.tune.search_journal import Entry, SearchJournal, read_entries
from fluidtune.tune.search_memory import SearchMemory
from tests.salus.processes import at_most

#: Iterations after which a trial ends by itself.
LAST = 9
#: Trials that run at a time, and all.
AT_ONCE, TRIALS = 3, 14


def score(trial: Trial, iteration: int) -> float:
    return random.Random(f"{trial.config['x']} {iteration // 2}").random() + trial.config["x"] / 20


class Controller:
    """Tune's loop: who runs, what is decided, and a snapshot now and then. Trials are suggested one after the other."""

    def __init__(self, base: Any, folder: Path, snapshot: dict[str, Any] | None = None) -> None:
        self.memory = SearchMemory(base)
        self.base, self._folder, self._asked = base, folder, False
        self.search_alg: Any = SimpleNamespace(
            searcher=SimpleNamespace(on_pause=lambda trial: None, on_unpause=lambda trial: None)
        )
        self.trials: list[Trial] = []
        self._iteration = 0
        self.decided: dict[str, dict[int, str]] = {}
        if snapshot is None:
            self.memory.start(folder, self._ask)
        else:
            self._iteration = snapshot["iteration"]
            if snapshot["search"] is not None:
                self.memory.recall(json.loads(json.dumps(snapshot["search"])), self._iteration)
            for name, config, status, done in snapshot["trials"]:
                trial = new_trial(name, config)
                trial.status = status if status in (Trial.TERMINATED, Trial.ERROR) else Trial.PENDING
                trial.run_metadata.last_result = {"training_iteration": done} if done else {}
                self.trials.append(trial)
            self.memory.start(folder, self._ask)
            for trial in self.trials:
                self.memory.add(self, trial)

    def _ask(self) -> None:
        self._asked = True

    # --- what an algorithm may call

    def get_trials(self) -> list[Trial]:
        return self.trials

    def get_live_trials(self) -> set[Trial]:
        return {trial for trial in self.trials if not trial.is_finished()}

    def _set_trial_status(self, trial: Trial, status: str) -> None:
        trial.status = status

    def _schedule_trial_save(self, trial: Trial, result: Any = None) -> Any:
        return Checkpoint(f"/nowhere/{trial.trial_id}/{done(trial)}")

    def pause_trial(self, trial: Trial, should_checkpoint: bool = True) -> None:
        trial.status = Trial.PAUSED

    def stop_trial(self, trial: Trial) -> None:
        if trial.status in (Trial.PENDING, Trial.PAUSED):
            self.memory.end("remove", self, trial)
        elif trial.status == Trial.RUNNING:
            self.memory.end("complete", self, trial, dict(trial.run_metadata.last_result))
        trial.status = Trial.TERMINATED
        self.decided.setdefault(trial.trial_id, {})[0] = f"stopped at {done(trial)}"

    # --- its loop

    def snapshot(self) -> dict[str, Any]:
        self._asked = False
        trials = [(t.trial_id, copy.copy(t.config), t.status, done(t)) for t in self.trials]
        kept = {"trials": trials, "search": self.memory.saved(self), "iteration": self._iteration}
        self.memory.state_written()(True)
        return kept

    def steps(self, period: int) -> Iterator[dict[str, Any]]:
        """Each result, or none: yields the newest snapshot then."""
        kept = self.snapshot()
        while True:
            if self._iteration % period == 0 or self._asked:
                kept = self.snapshot()
            self._iteration += 1
            ready = self.memory.ready(self)
            self._start_pending()  # at first those that ran before
            while ready and len(self.trials) < TRIALS and self._count(Trial.PENDING, Trial.RUNNING) < AT_ONCE:
                trial = new_trial(f"t{len(self.trials)}", {"x": len(self.trials)})
                self.trials.append(trial)
                self.memory.add(self, trial)
                kept = self.snapshot()  # as Tune is asked to
            self._start_pending()
            while ready and self._count(Trial.RUNNING) < AT_ONCE:
                with self.memory.asking(self) as handed:
                    chosen = self.base.choose_trial_to_run(handed)
                if chosen is None:
                    break
                chosen.status = Trial.RUNNING
            running = [trial for trial in self.trials if trial.status == Trial.RUNNING]
            if not running and all(trial.is_finished() for trial in self.trials):
                return
            if running:
                self.report(min(running, key=lambda trial: (done(trial), trial.config["x"])))  # as in a restored run
            yield kept

    def _start_pending(self) -> None:
        for trial in self.trials:
            if trial.status == Trial.PENDING and self._count(Trial.RUNNING) < AT_ONCE:
                trial.status = Trial.RUNNING

    def _count(self, *statuses: str) -> int:
        return sum(trial.status in statuses for trial in self.trials)

    def report(self, trial: Trial) -> None:
        iteration = done(trial) + 1
        result = {"training_iteration": iteration, "score": score(trial, iteration), "time_total_s": float(iteration)}
        decision = TrialScheduler.STOP
        if iteration < LAST:
            decision = self.memory.result(self, trial, result)
        trial.run_metadata.last_result = result
        if trial.status != Trial.RUNNING:
            return
        before = self.decided.setdefault(trial.trial_id, {}).setdefault(iteration, decision)
        assert decision in (before, TrialScheduler.CONTINUE), "the decision that an earlier driver made does not hold"
        if decision == TrialScheduler.STOP:
            self.stop_trial(trial)
        elif decision == TrialScheduler.PAUSE:
            trial.status = Trial.PAUSED


def done(trial: Trial) -> int:
    return int(trial.run_metadata.last_result.get("training_iteration", 0))


def new_trial(name: str, config: dict[str, Any]) -> Trial:
    trial = Trial("stub", stub=True, trial_id=name)
    trial.config, trial.evaluated_params = dict(config), {}
    trial.run_metadata.last_result = {}
    return trial


def pb2() -> Any:
    from ray.tune.schedulers.pb2 import PB2

    return PB2(**COUNTED, perturbation_interval=3, hyperparam_bounds={"lr": [1, 3]}, log_config=False)


COUNTED = {"metric": "score", "mode": "max", "time_attr": "training_iteration"}
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "asha": lambda: ASHAScheduler(**COUNTED, max_t=9, reduction_factor=2),
    "asha, brackets": lambda: ASHAScheduler(**COUNTED, max_t=9, reduction_factor=2, brackets=2),
    "median": lambda: MedianStoppingRule(**COUNTED, grace_period=2, min_samples_required=2),
    "hyperband": lambda: HyperBandScheduler(**COUNTED, max_t=8, reduction_factor=2),
    "bohb": lambda: HyperBandForBOHB(**COUNTED, max_t=8, reduction_factor=2),
    "pbt": lambda: PopulationBasedTraining(
        **COUNTED, perturbation_interval=3, hyperparam_mutations={"lr": [1, 2, 3]}, log_config=False
    ),
    "pb2": pb2,
    "pbt, synchronous": lambda: PopulationBasedTraining(
        **COUNTED, perturbation_interval=3, hyperparam_mutations={"lr": [1, 2, 3]}, log_config=False, synch=True
    ),
}


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)


def played(kind: str, folder: Path, kills: set[int], period: int) -> tuple[dict[str, dict[int, str]], int]:
    """The decisions of a search that is killed after so many steps, and how many it has in all."""
    seed(1)
    controller = Controller(SCHEDULERS[kind](), folder)
    steps, count, decided = controller.steps(period), 0, controller.decided
    while True:
        try:
            kept = next(steps)
        except StopIteration:
            return decided, count
        count += 1
        assert count < 3000, "the search does not end"
        if count in kills:
            seed(count)
            controller = Controller(SCHEDULERS[kind](), folder, kept)
            steps = controller.steps(period)
            controller.decided = decided


@pytest.mark.parametrize("period", [1, 7, 10_000])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.pb2) if kind == "pb2" else kind for kind in SCHEDULERS]
)
def test_a_killed_search_decides_as_one_that_is_not(kind: str, period: int, tmp_path: Path) -> None:
    expected, count = played(kind, tmp_path, set(), period)
    assert sum(map(len, expected.values())) > 30
    for attempt in range(1 if kind == "pb2" else 12):  # its models take a second
        kills = set(random.Random(attempt).sample(range(1, count), 1 + attempt % 3))
        found, _ = played(kind, tmp_path, kills, period)
        assert found == expected, kills


class Exploiting(PopulationBasedTraining):
    """Gives the trial another one's state at iteration 4, where the trial then begins at iteration 2."""

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if self._num_perturbations or result["training_iteration"] < 4:
            return TrialScheduler.CONTINUE
        self._num_perturbations += 1
        tune_controller.pause_trial(trial)
        return TrialScheduler.NOOP


def test_a_trial_that_was_exploited_before_the_kill_hears_no_answer_of_its_life_before(tmp_path: Path) -> None:
    """Seen: it reported iteration 4 again, heard that it was acted on, and stood still."""
    make = lambda: Exploiting(**COUNTED, hyperparam_mutations={"lr": [1, 2]}, log_config=False)  # noqa: E731
    controller = Controller(make(), tmp_path)
    trial = new_trial("t0", {"x": 0})
    controller.trials.append(trial)
    controller.memory.add(controller, trial)
    trial.status = Trial.RUNNING
    for _ in range(4):
        controller.report(trial)
    later = Controller(make(), tmp_path, controller.snapshot())
    assert later.memory.ready(later)
    again = [later.memory.result(later, later.trials[0], {"training_iteration": n, "score": 0.0}) for n in (3, 4, 5)]
    assert again == ["CONTINUE"] * 3
    assert later.memory.turn_of(later.trials[0]) == controller.memory.turn_of(trial) == 2, "it was added, and left"


class Unpicklable(ASHAScheduler):
    """Has a lock, as a scheduler that writes a log may."""

    def __init__(self) -> None:
        super().__init__(**COUNTED)
        self.lock = threading.Lock()


def restored(kept: dict[str, Any], folder: Path, base: Any, caplog: pytest.LogCaptureFixture) -> str:
    """What a restored driver says, whose search then runs to its end."""
    caplog.clear()
    for _ in Controller(base, folder, kept).steps(5):
        pass
    return "\n".join(record.getMessage() for record in caplog.records if "FluidTune" in record.getMessage())


def test_what_cannot_be_used_is_said_in_one_line_and_the_search_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asha = SCHEDULERS["asha"]
    steps = Controller(asha(), tmp_path).steps(5)
    kept = [next(steps) for _ in range(20)][-1]
    assert restored(kept, tmp_path, asha(), caplog) == ""
    search = kept["search"]
    for change, said in (
        ({"version": 99}, "format 99"),
        ({"ray": "3.0"}, "Ray 3.0"),
        ({"turn": -1}, "another driver"),
        ({"state": search["state"][:100]}, "rror"),
        ({"settings": {**search["settings"], "_max_t": 27}}, "_max_t=9, which holds"),
    ):
        line = restored({**kept, "search": {**search, **change}}, tmp_path, asha(), caplog)
        assert said in line and "\n" not in line
    line = restored(kept, tmp_path, SCHEDULERS["median"](), caplog)
    assert "MedianStoppingRule, which holds" in line and "\n" not in line
    assert restored({**kept, "search": None}, tmp_path, asha(), caplog) == ""


def test_a_scheduler_that_cannot_be_pickled_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Controller(Unpicklable(), tmp_path).steps(5)
    assert [next(steps) for _ in range(20)][-1]["search"] is None
    lines = [record.getMessage() for record in caplog.records if "cannot be pickled" in record.getMessage()]
    assert len(lines) == 1 and "Unpicklable" in lines[0]


def test_a_journal_is_read_up_to_where_it_is_whole(tmp_path: Path) -> None:
    journal = SearchJournal(tmp_path, 0)
    entries = [Entry("result", f"t{i}", {"score": float(i)}, "CONTINUE", {}) for i in range(6)]
    for entry in entries[:4]:
        journal.append(entry)
    stored = journal.begin()  # a snapshot that never comes into the storage
    for entry in entries[4:]:
        journal.append(entry)
    journal.end()
    assert read_entries(tmp_path, 0) == entries and read_entries(tmp_path, 3) == entries[3:]
    first, last = sorted(tmp_path.iterdir())
    last.write_bytes(last.read_bytes()[:-1])
    assert read_entries(tmp_path, 0) == entries[:5]
    changed = bytearray(first.read_bytes())
    changed[-3] ^= 1
    first.write_bytes(changed)
    assert read_entries(tmp_path, 0) == entries[:3]
    stored(True)
    assert list(tmp_path.iterdir()) == [last]
    assert read_entries(tmp_path, 0) == []


def test_a_full_disk_ends_the_journal_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that may get no longer stands for it: a write takes a part of an entry, and the next one raises."""
    journal, entry = SearchJournal(tmp_path, 0), Entry("remove", "t0")
    journal.append(entry)
    (path,) = tmp_path.iterdir()
    with at_most(resource.RLIMIT_FSIZE, path.stat().st_size + 9):
        for _ in range(3):
            journal.append(entry)
    assert len(caplog.records) == 1 and read_entries(tmp_path, 0) == [entry]
    journal.begin()(True)
    journal.append(entry)
    assert read_entries(tmp_path, 1) == [entry], "it goes on with the next snapshot"

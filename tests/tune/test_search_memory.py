"""A restored driver's algorithm decides as one that was not killed, whichever call it was killed after."""

from __future__ import annotations

import copy
import json
import pickle
import random
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

#: Iterations after which a trial ends by itself.
LAST = 9
#: Trials that run at a time, and all.
AT_ONCE, TRIALS = 3, 14


def score(trial: Trial, iteration: int) -> float:
    return random.Random(f"{trial.config['x']} {iteration // 2}").random() + trial.config["x"] / 20


class Controller:
    """Tune's loop: who runs, what is decided, and a snapshot now and then. Trials are suggested one after the other."""

    def __init__(self, base: Any, folder: Path, seed: int, snapshot: dict[str, Any] | None = None) -> None:
        self.memory = SearchMemory(base)
        self.base, self._folder, self._asked = base, folder, False
        self.search_alg: Any = SimpleNamespace(
            searcher=SimpleNamespace(on_pause=lambda trial: None, on_unpause=lambda trial: None)
        )
        self.trials: list[Trial] = []
        self.turns = random.Random(seed)
        self._iteration = 0
        self.decided: dict[str, dict[int, str]] = {}
        if snapshot is None:
            self.memory.recall(None, 0)
            self.memory.start(folder, self._ask)
        else:
            self._iteration = snapshot["iteration"]
            self.memory.recall(snapshot["search"] and json.loads(json.dumps(snapshot["search"])), self._iteration)
            for name, config, status, done in snapshot["trials"]:
                trial = new_trial(name, config)
                trial.status = status if status in (Trial.TERMINATED, Trial.ERROR) else Trial.PENDING
                trial.run_metadata.last_result = {"training_iteration": done} if done else {}
                self.trials.append(trial)
            self.memory.start(folder, self._ask)
            for trial in self.trials:
                self.memory.add(self, trial)
            self.turns.setstate(snapshot["turns"])

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
            self.memory.remove(self, trial)
        elif trial.status == Trial.RUNNING:
            self.memory.complete(self, trial, dict(trial.run_metadata.last_result))
        trial.status = Trial.TERMINATED
        self.decided.setdefault(trial.trial_id, {})[done(trial)] = TrialScheduler.STOP

    # --- its loop

    def snapshot(self) -> dict[str, Any]:
        self._asked = False
        trials = [(t.trial_id, copy.copy(t.config), t.status, done(t)) for t in self.trials]
        kept = {"trials": trials, "search": self.memory.saved(self), "iteration": self._iteration}
        kept["turns"] = self.turns.getstate()
        self.memory.state_written()(True)
        return pickle.loads(pickle.dumps(kept))

    def steps(self, period: int) -> Iterator[dict[str, Any]]:
        """Each result, or none: yields the newest snapshot then."""
        kept = self.snapshot()
        while True:
            if self._iteration % period == 0 or self._asked:
                kept = self.snapshot()
            self._iteration += 1
            ready = self.memory.ready(self)
            self._start_pending()  # at first those that ran before
            while ready and len(self.trials) < TRIALS and self._count(Trial.PENDING) == 0 and self._count(Trial.RUNNING) < AT_ONCE:
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

    def _count(self, status: str) -> int:
        return sum(trial.status == status for trial in self.trials)

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
    "pbt, synchronous": lambda: PopulationBasedTraining(
        **COUNTED, perturbation_interval=3, hyperparam_mutations={"lr": [1, 2, 3]}, log_config=False, synch=True
    ),
}


def played(kind: str, folder: Path, kills: set[int], period: int) -> tuple[dict[str, dict[int, str]], int]:
    """The decisions of a search that is killed after so many steps, and how many it has in all."""
    random.seed(1), np.random.seed(1)
    controller = Controller(SCHEDULERS[kind](), folder, 3)
    steps, count, decided = controller.steps(period), 0, controller.decided
    while True:
        try:
            kept = next(steps)
        except StopIteration:
            return decided, count
        count += 1
        assert count < 3000, "the search does not end"
        if count in kills:
            random.seed(count), np.random.seed(count)
            controller = Controller(SCHEDULERS[kind](), folder, 3, kept)
            steps = controller.steps(period)
            controller.decided = decided


@pytest.mark.parametrize("period", [1, 7, 10_000])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_killed_search_decides_as_one_that_is_not(kind: str, period: int, tmp_path: Path) -> None:
    expected, count = played(kind, tmp_path, set(), period)
    assert sum(map(len, expected.values())) > 30
    ends = {name: max(found) for name, found in expected.items()}
    for seed in range(12):
        kills = set(random.Random(seed).sample(range(1, count), 1 + seed % 3))
        found, _ = played(kind, tmp_path, kills, period)
        assert {name: max(each) for name, each in found.items()} == ends, kills
        assert found == expected, kills

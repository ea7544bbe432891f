"""What acts do to trials, without a cluster: parameters, a kept trial after a restore, and a search beside clones."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.tune import register_trainable
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, TrialScheduler

from fluidtune.steering.acts import Act, State
from fluidtune.steering.steering_files import SteeringFiles
from fluidtune.tune.scheduler import FluidScheduler
from fluidtune.tune.steered_run import ACTS, SteeredRun, parameters_of, with_values
from tests.ray_compat.storage import TrialStorage

#: Where Tune's controller has the search algorithm.
SEARCH = "_search_alg"
#: And its trials, and those that have not ended.
TRIALS, LIVE = "_trials", "_live_trials"
#: And the run's storage.
STORAGE = "_storage"
NAMES = st.sampled_from(["a", "b", "a/b", "b/a", "a/b/a", 1])
CONFIGS = st.recursive(
    st.dictionaries(NAMES, st.integers(), min_size=1),
    lambda inner: st.dictionaries(NAMES, st.integers() | inner, min_size=1),
    max_leaves=6,
)


@given(CONFIGS, st.data())
@settings(max_examples=50, deadline=None)
def test_a_clone_differs_in_exactly_what_is_set(config: dict[str, Any], data: Any) -> None:
    names = parameters_of(config)
    values = {name: f"new {name}" for name in data.draw(st.lists(st.sampled_from(list(names)), unique=True))}
    before = pickle.dumps(config)
    changed = with_values(config, values)
    assert pickle.dumps(config) == before
    assert parameters_of(changed) == names
    now, then = ({name: reduce(getitem, keys, each) for name, keys in names.items()} for each in (changed, config))
    assert now == then | values


def trial_with(kind: Any, state: State, earlier: bool = False) -> Trial:
    """A trial that Tune has saved with an act; ``earlier``: by an earlier version, which kept the state beside it."""
    trial = Trial("t", stub=True)
    act = Act(kind, kind, trial.trial_id, "ann", "page", clone=trial.trial_id if kind == "clone" else "")
    kept = {"act": asdict(act), "state": state} if earlier else asdict(replace(act, state=state))
    setattr(trial.run_metadata, ACTS, [kept])
    return trial


def restored(base: TrialScheduler, *trials: Trial, search: Any = None) -> tuple[FluidScheduler, Any]:
    """A scheduler to which a restored run's trials were added. They are left to Ray."""
    scheduler, controller = FluidScheduler(base), SimpleNamespace(**{SEARCH: search})
    scheduler.set_search_properties("score", "max")
    scheduler._left_to_ray = True
    for trial in trials:
        scheduler.on_trial_add(controller, trial)
    return scheduler, controller


def asha() -> ASHAScheduler:
    return ASHAScheduler(grace_period=1, reduction_factor=2)


def result(iteration: int, score: float) -> dict[str, Any]:
    return {"training_iteration": iteration, "score": score}


@pytest.mark.parametrize("earlier", [False, True])
def test_after_a_restore_a_kept_trial_is_still_outside_its_algorithm(earlier: bool) -> None:
    """ASHA does not know the trial, and would fail at any of its results."""
    kept = trial_with("keep", "done", earlier)
    scheduler, controller = restored(asha(), kept)
    assert scheduler.on_trial_result(controller, kept, result(1, 0.0)) == TrialScheduler.CONTINUE
    scheduler.on_trial_complete(controller, kept, result(2, 0.0))
    assert scheduler.debug_string() == restored(asha())[0].debug_string()


def test_after_a_restore_a_stop_and_a_keep_that_had_not_come_still_come() -> None:
    stopped, kept, strong = trial_with("stop", "taken"), trial_with("keep", "taken"), Trial("t", stub=True)
    scheduler, controller = restored(asha(), stopped, kept, strong)
    assert scheduler.on_trial_result(controller, stopped, result(1, 9.0)) == TrialScheduler.STOP
    assert scheduler.on_trial_result(controller, strong, result(1, 5.0)) == TrialScheduler.CONTINUE
    assert scheduler.on_trial_result(controller, kept, result(1, 1.0)) == TrialScheduler.CONTINUE
    assert [kept["state"] for kept in getattr(kept.run_metadata, ACTS)] == ["done"]
    before = scheduler.debug_string()
    for iteration in range(2, 9):
        assert scheduler.on_trial_result(controller, kept, result(iteration, 1.0)) == TrialScheduler.CONTINUE
    scheduler.on_trial_complete(controller, kept, result(9, 1.0))
    assert scheduler.debug_string() == before and "Iter 1.000: 3.0" in before, "a kept trial changed a rung"


def test_after_a_restore_a_search_algorithm_hears_of_its_own_trials_only() -> None:
    heard: list[str] = []
    own = SimpleNamespace(on_trial_complete=lambda trial_id, result, error: heard.append(trial_id))
    clone = trial_with("clone", "done")
    _, controller = restored(asha(), clone, search=own)
    for name in (clone.trial_id, "own"):
        vars(controller)[SEARCH].on_trial_complete(name)
    assert heard == ["own"]


class Tried:
    """A run of two trials that wait, asked by ``served``. Trials are Tune's own, the controller is not."""

    def __init__(self, path: Path, **of_a_trial: Any) -> None:
        self.path = path
        config = {"lr": 0.1, "n": np.int64(3), "act": "relu", "fn": print}
        register_trainable("trained", trained)
        self.trials = [Trial("trained", config=config, storage=TrialStorage(path), **of_a_trial) for _ in range(2)]
        for trial in self.trials:
            trial.create_placement_group_factory()
        self.saved: list[Any] = []
        self.raised: Exception | None = None
        #: What the upload of Tune's state raises.
        self.upload: Exception | None = None
        storage = SimpleNamespace(syncer=SimpleNamespace(wait=self.uploaded))
        vars(self).update({TRIALS: self.trials, LIVE: set(self.trials), STORAGE: storage})

    def get_trials(self) -> list[Trial]:
        return self.trials

    def add_trial(self, trial: Trial) -> None:
        self.trials.append(trial)
        vars(self)[LIVE].add(trial)
        if self.raised is not None:
            raise self.raised

    def _mark_trial_to_checkpoint(self, trial: Trial) -> None:
        self.saved.append(trial)

    def uploaded(self) -> None:
        if self.upload is not None:
            raise self.upload

    def checkpoint(self, force: bool) -> None:
        assert all(trial in self.trials for trial in self.saved)

    def asked(self, kind: Any, trial: str, parameters: dict[str, Any] | None = None, no_keep: str = "") -> str:
        """What the driver answers."""
        steered = SteeredRun(no_keep)
        steered._files = SteeringFiles(self.path)
        act = Act("1", kind, trial, "ann", "page", parameters or {})
        (self.path / "steer" / "1.ask").write_text(json.dumps(asdict(act)))
        steered.serve(self)
        answer = json.loads((self.path / "steer" / "1.answer").read_text())
        shutil.rmtree(self.path / "steer")
        return str(answer["words"])


def trained(config: dict[str, Any]) -> None:
    raise NotImplementedError


@pytest.mark.parametrize("text", ["x" * 300, "\N{SNOWMAN}" * 130, "a\0b", "../..", "a\nb"])
def test_a_clones_directory_has_nothing_of_a_value(text: str, tmp_path: Path) -> None:
    run = Tried(tmp_path)
    source = run.trials[0].trial_id
    assert "is a clone of" in run.asked("clone", source, {"act": text})
    *_, clone = run.trials
    assert clone.config["act"] == text and run.saved == [clone]
    assert f"clone_of_{source}" in Path(clone.local_path).name and Path(clone.local_path).is_dir()
    assert Path(clone.local_path).name.isascii() and len(Path(clone.local_path).name) < 255


def raises(trial: Trial) -> str:
    if trial.config["lr"] == 0.5:
        raise KeyError("no\nname")
    return f"named_{trial.trial_id}"


@pytest.mark.parametrize(
    ("of_a_trial", "why"),
    [
        ({"trial_name_creator": raises}, "KeyError: 'no\\nname'"),
        ({"trial_dirname_creator": raises}, "KeyError"),
        ({"trial_dirname_creator": lambda trial: "x" * int(600 * trial.config["lr"])}, "too long"),
        ({}, "RuntimeError: the algorithm breaks"),
    ],
)
def test_a_clone_that_cannot_be_made_is_refused_and_leaves_nothing(
    of_a_trial: dict[str, Any], why: str, tmp_path: Path
) -> None:
    run = Tried(tmp_path, **of_a_trial)
    run.raised = RuntimeError("the algorithm\nbreaks")
    before, there = list(run.trials), set(tmp_path.rglob("*"))
    said = run.asked("clone", before[0].trial_id, {"lr": 0.5})
    assert said.startswith(f"trial {before[0].trial_id} cannot be cloned: ") and why in said and "\n" not in said
    assert (run.trials, vars(run)[LIVE], run.saved) == (before, set(before), [])
    assert {path.name for path in set(tmp_path.rglob("*")) - there} <= {"session", "driver_artifacts"}


@pytest.mark.parametrize("kind", ["stop", "clone"])
def test_what_tune_cannot_save_is_done_and_the_answer_says_so(kind: str, tmp_path: Path) -> None:
    """Tune would only log it. Seen: `fluidtune trial stop` said that the act holds."""
    run = Tried(tmp_path)
    run.upload = OSError("the disk is full")
    said = run.asked(kind, run.trials[0].trial_id)
    assert "ends at its next result" in said or "is a clone of" in said
    assert said.endswith("may not know of it, as Tune cannot save its state: OSError: the disk is full")
    assert len(run.trials) == (3 if kind == "clone" else 2)


def test_hyperband_keeps_no_trial_and_says_why(tmp_path: Path) -> None:
    run, hyperband = Tried(tmp_path), FluidScheduler(HyperBandScheduler())
    for no_keep, said in (
        (hyperband.adapter.no_keep, "cannot be kept: HyperBand "),
        ("", "goes on when the algorithm"),
    ):
        assert said in run.asked("keep", run.trials[0].trial_id, no_keep=no_keep)


def test_a_value_of_another_kind_is_refused(tmp_path: Path) -> None:
    run = Tried(tmp_path)
    name = run.trials[0].trial_id
    assert run.asked("clone", name, {"n": "4"}).endswith('has a number as its n, and "4" is none')
    assert "no JSON value" in run.asked("clone", name, {"fn": 1})
    assert "is a clone of" in run.asked("clone", name, {"n": 4, "lr": 1})


def test_a_trial_that_tune_has_not_begun_is_found_by_its_name_or_the_beginning_of_its_id(tmp_path: Path) -> None:
    run = Tried(tmp_path)
    first, second = run.trials
    second.trial_id, second.custom_trial_name = "zz_1", "the second"
    for wanted in ("zz", "the second", "zz_1"):
        setattr(second.run_metadata, ACTS, [])
        assert run.asked("stop", wanted) == "trial zz_1 ends at its next result"
        assert len(getattr(second.run_metadata, ACTS)) == 1
    assert run.saved == [second] * 3
    assert "there is no trial 'x'; the run has 2" in run.asked("stop", "x")
    second.trial_id = f"{first.trial_id}_1"
    assert "may be any of 2 trials" in run.asked("stop", first.trial_id[:3])

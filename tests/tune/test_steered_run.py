"""What acts do to trials, without a cluster: parameters, a kept trial after a restore, and a search beside clones."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, TrialScheduler

from fluidtune.ray_compat.cloning import SearchBeside, hide_from_search
from fluidtune.steering.acts import Act, State
from fluidtune.tune.groups import adapter_for
from fluidtune.tune.scheduler import FluidScheduler
from fluidtune.tune.steered_run import ACTS, SteeredRun, names_in, with_values

#: Where Tune's controller has the search algorithm.
SEARCH = "_search_alg"
CONFIGS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(), min_size=1),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.integers() | inner, min_size=1),
    max_leaves=8,
)


@given(CONFIGS, st.data())
def test_a_clone_differs_in_exactly_what_is_set(config: dict[str, Any], data: Any) -> None:
    names = list(names_in(config))
    values = {name: f"new {name}" for name in data.draw(st.lists(st.sampled_from(names), unique=True))}
    before = pickle.dumps(config)
    changed = with_values(config, values)
    assert pickle.dumps(config) == before
    assert list(names_in(changed)) == names

    def value(where: Any, name: str) -> Any:
        for part in name.split("/"):
            where = where[part]
        return where

    assert {name: value(changed, name) for name in names} == {name: value(config, name) for name in names} | values


def trial_with(kind: Any, state: State) -> Trial:
    trial = Trial("t", stub=True)
    act = Act(kind, kind, trial.trial_id, "ann", "page")
    setattr(trial.run_metadata, ACTS, [{"act": asdict(act), "state": state}])
    return trial


def restored(base: TrialScheduler, *trials: Trial) -> tuple[FluidScheduler, Any]:
    """A scheduler to which a restored run's trials were added. They are left to Ray."""
    scheduler, controller = FluidScheduler(base), SimpleNamespace(**{SEARCH: None})
    scheduler.set_search_properties("score", "max")
    scheduler._left_to_ray = True
    for trial in trials:
        scheduler.on_trial_add(controller, trial)
    return scheduler, controller


def asha() -> ASHAScheduler:
    return ASHAScheduler(grace_period=1, reduction_factor=2)


def result(iteration: int, score: float) -> dict[str, Any]:
    return {"training_iteration": iteration, "score": score}


def test_after_a_restore_a_kept_trial_is_still_outside_its_algorithm() -> None:
    """ASHA does not know the trial, and would fail at any of its results."""
    kept = trial_with("keep", "done")
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


def test_hyperband_keeps_no_trial_and_says_why() -> None:
    assert "bracket" in adapter_for(HyperBandScheduler()).no_keep
    assert adapter_for(ASHAScheduler()).no_keep == ""


def test_a_steered_run_is_pickled_without_what_goes_on() -> None:
    steered = SteeredRun("why")
    steered.add(SimpleNamespace(**{SEARCH: None}), trial_with("stop", "taken"))
    assert pickle.loads(pickle.dumps(steered))._trials == {}


def test_a_search_algorithm_hears_of_its_own_trials_only() -> None:
    heard: list[Any] = []
    own = SimpleNamespace(
        on_trial_result=lambda trial_id, result: heard.append(trial_id),
        on_trial_complete=lambda trial_id, result, error: heard.append((trial_id, error)),
        is_finished=lambda: True,
    )
    controller, clone = SimpleNamespace(**{SEARCH: own}), Trial("t", stub=True)
    for _ in range(2):
        hide_from_search(controller, clone)  # type: ignore[arg-type]
    search = vars(controller)[SEARCH]
    assert isinstance(search, SearchBeside) and search.is_finished() and search._made is own
    for name in ("own", clone.trial_id):
        search.on_trial_result(name, {})
        search.on_trial_complete(name, error=True)
    assert heard == ["own", ("own", True)]


@pytest.mark.parametrize("state", ["taken", "done"])
def test_a_clone_of_an_earlier_driver_is_hidden_from_the_search(state: State) -> None:
    clone, controller = Trial("t", stub=True), SimpleNamespace(**{SEARCH: None})
    act = Act("1", "clone", "source", "ann", "page", clone=clone.trial_id)
    setattr(clone.run_metadata, ACTS, [{"act": asdict(act), "state": state}])
    SteeredRun("").add(controller, clone)
    assert vars(controller)[SEARCH].others == {clone.trial_id}

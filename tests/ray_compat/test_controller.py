"""Tune's controller and our actor manager still fit. Needs no running Ray."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
from ray.tune.execution import tune_controller
from ray.tune.experiment import Trial
from ray.tune.utils import serialization
from ray.util import debug

from fluidtune.ray_compat import controller as compat
from fluidtune.tune.manager import FluidActorManager
from tests.ray_compat.inspecting import attributes_of


def manager_uses(module: ModuleType) -> Iterator[tuple[str, ast.Call | None]]:
    """Every ``self._actor_manager.NAME`` in Tune's controller, with the call if it is one."""
    tree = ast.parse(inspect.getsource(module))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "_actor_manager"
        ):
            yield node.attr, calls.get(id(node))


USES = sorted(manager_uses(tune_controller), key=lambda use: use[0])


def test_the_controller_still_uses_an_actor_manager() -> None:
    names = {name for name, _ in USES}
    assert {"add_actor", "remove_actor", "schedule_actor_task", "next", "cleanup"} <= names
    assert "update_max_pending_trials" in attributes_of(compat.TuneController)


def test_how_many_trials_tune_lets_be_pending_is_its_own_number_after_a_restore(monkeypatch) -> None:
    """Seen: `Tuner.restore` let more be pending, and a searcher was asked for up to 28 suggestions at once."""
    monkeypatch.setattr(tune_controller, "_get_max_pending_trials", lambda search_alg: 1)
    made = compat.TuneController.__new__(compat.TuneController)
    made._search_alg, made._max_pending_trials = None, 28  # as it was saved
    assert compat.max_pending_trials(made) == 1 == made._max_pending_trials


@pytest.mark.parametrize("name, call", USES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(USES)])
def test_our_manager_has_all_that_the_controller_uses(name: str, call: ast.Call | None) -> None:
    assert name in attributes_of(FluidActorManager), (
        f"Ray {ray.__version__}'s TuneController uses _actor_manager.{name}, which ActorManager lacks"
    )
    if call is not None:
        signature = inspect.signature(getattr(FluidActorManager, name))
        # Raises TypeError when the controller passes what ours does not take.
        signature.bind(None, *[None for _ in call.args], **{k.arg: None for k in call.keywords if k.arg})


def test_only_the_interface_knows_ray_s_names() -> None:
    rays = {name for name, _ in USES} | {"num_live_actors", "resolve_future"}
    assert rays & set(vars(FluidActorManager)) == set(), "what Tune calls belongs into ActorManager"


def test_a_controller_says_that_it_cleans_up_and_saves_no_more_than_before() -> None:
    from ray.tune import tune

    assert "runner.cleanup()" in inspect.getsource(tune)

    class Controller:
        def cleanup(self) -> None:
            done.append("cleaned up")

    done: list[str] = []
    controller: Any = Controller()
    compat.extend_controller(controller, lambda: done.append("told"), str)
    controller.cleanup()
    assert done == ["told", "cleaned up"]
    assert isinstance(controller, Controller) and vars(controller) == {}


class Extended:
    """A controller without trials, extended by a status line."""

    def __init__(self) -> None:
        compat.extend_controller(self, lambda: None, lambda: "the status line")  # type: ignore[arg-type]
        self.scheduler_alg = SimpleNamespace(debug_string=lambda: "what the scheduler says")

    def get_trials(self) -> list[Any]:
        return []

    def _used_resources_string(self) -> str:
        return "the used resources"


@pytest.mark.parametrize("kind", ["JupyterNotebookReporter", "CLIReporter"])
def test_a_notebook_and_the_old_output_show_our_status_line_once(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.tune import progress_reporter, tune

    monkeypatch.setattr(progress_reporter, "IS_NOTEBOOK", True)
    # It needs IPython to display anything.
    monkeypatch.setattr(progress_reporter.JupyterNotebookReporter, "display", lambda self, shown: print(shown))
    reporter = getattr(progress_reporter, kind)()
    reporter.setup(start_time=0.0, total_samples=1)
    tune._report_progress(Extended(), reporter, done=True)
    assert capsys.readouterr().out.count("the status line") == 1


def test_futures_are_resolved_through_the_same_path() -> None:
    source = inspect.getsource(tune_controller)
    assert "self._actor_manager._actor_task_events.resolve_future(future)" in source
    assert list(inspect.signature(FluidActorManager.resolve_future).parameters) == ["self", "future"]


class Controller(compat.TuneController):
    """What of a controller has to do with a trial's checkpoints."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self._iteration, self._trials, self._trials_to_cache = 1, [], set()
        self._callbacks = SimpleNamespace(on_checkpoint=lambda **named: self.heard.append(named["checkpoint"]))
        self._checkpoint_manager = SimpleNamespace(on_trial_checkpoint=self.heard.append)
        self._cached_trial_decisions = {"a": "PAUSE"}


def test_a_checkpoint_that_tune_has_not_asked_for_is_kept_as_one_that_it_has() -> None:
    """Callbacks hear of it, and the next snapshot has it. Seen: a restored trial's checkpoint had been deleted."""

    class Trial(SimpleNamespace):
        __hash__ = object.__hash__

    controller = Controller()
    waiting = SimpleNamespace(saving_to="a save")
    trial = Trial(trial_id="a", temporary_state=waiting, on_checkpoint=controller.heard.append)
    saved = SimpleNamespace(checkpoint="its files")
    compat.keep_checkpoint(controller, trial, saved)
    assert controller.heard == ["its files", saved, trial] and controller._trials_to_cache == {trial}
    assert controller._cached_trial_decisions == {"a": "PAUSE"} and trial.temporary_state.saving_to == "a save"


def test_tunes_encoder_keeps_nothing_of_what_it_has_encoded(monkeypatch) -> None:
    """Seen: the driver's memory grew with each checkpoint, by the text of its result and configuration."""
    noted: set[str] = set()
    monkeypatch.setattr(debug, "_logged", noted)
    monkeypatch.setattr(serialization, "log_once", debug.log_once)
    json.dumps(Trial, cls=serialization.TuneFunctionEncoder)
    assert len(noted) == 1
    compat.note_no_encoded_objects()
    json.dumps([Trial, compat.ActorManager], cls=serialization.TuneFunctionEncoder)
    assert len(noted) == 1


@pytest.mark.parametrize("result, config", [({}, {"x": 1}), ({"training_iteration": 1}, None)])
def test_what_the_process_of_a_trial_without_a_result_has_said_stays(result: dict[str, Any], config: Any) -> None:
    """Seen: `Result.config` was None for a trial that reports nothing."""
    trial = Trial("any", stub=True)
    trial.run_metadata.last_result = result
    assert trial.last_result["trial_id"] == trial.trial_id  # a reporter looks before the process has said anything
    trial._default_result_or_future = {"config": {"x": 1}}
    compat.let_go(trial)
    assert trial.last_result.get("config") == config

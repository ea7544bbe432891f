"""Fails when a Ray release changes one of the things that compat.py lists; needs no running Ray."""

from __future__ import annotations

import ast
import inspect
import queue
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
from ray.tune import Trainable, Tuner
from ray.tune.execution import tune_controller
from ray.tune.impl.tuner_internal import TunerInternal
from ray.tune.schedulers import (
    ASHAScheduler,
    AsyncHyperBandScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
)
from ray.tune.schedulers import hyperband as hyperband_module
from ray.tune.stopper import CombinedStopper, MaximumIterationStopper, TimeoutStopper
from ray.tune.trainable import FunctionTrainable

from fluidtune.errors import FluidTuneError
from fluidtune.tune import compat
from fluidtune.tune.manager import FluidActorManager

ROOT = Path(__file__).parents[2]


def attributes_set(cls: type) -> set[str]:
    """Names assigned to ``self`` anywhere in a class or its bases, with what the class body defines."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        names |= set(vars(base))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


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
    assert "_actor_manager" in attributes_set(compat.TuneController)
    assert "_reuse_actors" in attributes_set(compat.TuneController)
    assert "_set_trial_status" in attributes_set(compat.TuneController)
    assert "_storage" in attributes_set(compat.TuneController)
    assert {"_max_pending_trials", "update_max_pending_trials"} <= attributes_set(compat.TuneController)
    assert "_pending_trials" in attributes_set(compat.TuneController)


@pytest.mark.parametrize("name, call", USES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(USES)])
def test_our_manager_has_all_that_the_controller_uses(name: str, call: ast.Call | None) -> None:
    assert name in attributes_set(FluidActorManager), (
        f"Ray {ray.__version__}'s TuneController uses _actor_manager.{name}, which FluidActorManager lacks"
    )
    if call is not None:
        signature = inspect.signature(getattr(FluidActorManager, name))
        # Raises TypeError when the controller passes what ours does not take.
        signature.bind(None, *[None for _ in call.args], **{k.arg: None for k in call.keywords if k.arg})


def test_a_controller_says_that_it_cleans_up_and_saves_no_more_than_before() -> None:
    from ray.tune import tune

    assert "runner.cleanup()" in inspect.getsource(tune)

    class Controller:
        def cleanup(self) -> None:
            done.append("cleaned up")

    done: list[str] = []
    controller: Any = Controller()
    compat.before_cleanup(controller, lambda: done.append("told"))
    controller.cleanup()
    assert done == ["told", "cleaned up"]
    assert isinstance(controller, Controller) and vars(controller) == {}


def test_a_changed_call_would_be_seen() -> None:
    signature = inspect.signature(FluidActorManager.add_actor)
    with pytest.raises(TypeError):
        signature.bind(None, surprise=None)
    assert "get_actor_resources_of_the_moon" not in attributes_set(FluidActorManager)


def test_futures_are_resolved_through_the_same_path() -> None:
    source = inspect.getsource(tune_controller)
    assert "self._actor_manager._actor_task_events.resolve_future(future)" in source
    assert list(inspect.signature(FluidActorManager.resolve_future).parameters) == ["self", "future"]


def test_schedulers_are_handed_a_wrapper_with_its_controller() -> None:
    from ray.tune.execution.tune_controller import TrialRunnerWrapper

    assert "_tune_controller" in attributes_set(TrialRunnerWrapper) or "_tune_controller" in inspect.getsource(
        TrialRunnerWrapper
    )

    class Wrapper:
        _tune_controller = "the controller"

    assert compat.controller_of(Wrapper()) == "the controller"
    assert compat.controller_of("bare") == "bare"


def test_the_ticket_is_made_as_we_make_it() -> None:
    ticket: Any = compat.TrackedActor(7, on_start=len, on_stop=len, on_error=len)
    assert (ticket.actor_id, ticket._on_start, ticket._on_stop, ticket._on_error) == (7, len, len, len)
    assert ticket in {ticket: 1}


def test_hyperbands_rungs_are_where_we_read_them() -> None:
    assert {"_hyperbands", "_time_attr", "_metric_op"} <= attributes_set(HyperBandScheduler)
    bracket = attributes_set(hyperband_module._Bracket)
    assert {"_live_trials", "_cumul_r", "_halves", "trials_to_unpause", "current_trials"} <= bracket


def test_ashas_limit_is_where_we_read_it() -> None:
    scheduler = ASHAScheduler(max_t=17)
    assert (scheduler._max_t, scheduler._time_attr) == (17, "training_iteration")
    assert ASHAScheduler is AsyncHyperBandScheduler, "groups.adapter_for knows the class by one of these names"


def test_the_environment_that_trials_get_is_where_we_read_it() -> None:
    old = {"RAY_CHDIR_TO_TRIAL_DIR", "RAY_TRAIN_V2_ENABLED"}
    assert old | {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(compat.ENV_VARS_TO_PROPAGATE)


def test_a_trainable_counts_where_we_continue_it() -> None:
    assert {"_iteration", "_time_total", "_storage", "iteration"} <= attributes_set(Trainable)
    assert {"_last_training_result", "_trainable_func"} <= attributes_set(FunctionTrainable)


def test_a_followers_session_is_muted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        told = 0

        def report(self, *args: Any, **kwargs: Any) -> None:
            self.told += 1

    session = Session()
    monkeypatch.setattr(compat, "get_session", lambda: session)
    compat.mute_session()
    session.report({"loss": 1}, checkpoint=None)
    assert session.told == 0
    monkeypatch.setattr(compat, "get_session", lambda: None)
    compat.mute_session()


def test_tunes_report_goes_through_the_session_that_is_muted() -> None:
    source = inspect.getsource(inspect.unwrap(ray.tune.report))
    assert "get_session().report(" in source
    assert "training_thread" in attributes_set(type(_any_session()))


def _any_session() -> Any:
    from ray.train._internal.session import _TrainSession

    return _TrainSession.__new__(_TrainSession)


def test_a_restored_tuner_keeps_its_configuration_where_we_read_it() -> None:
    assert "_local_tuner" in attributes_set(Tuner)
    assert "_tune_config" in attributes_set(TunerInternal)


def test_a_result_that_says_a_function_is_done_has_its_key() -> None:
    assert isinstance(compat.RESULT_DUPLICATE, str) and isinstance(compat.TRIAL_INFO, str)
    source = inspect.getsource(tune_controller)
    assert "RESULT_DUPLICATE" in source


@pytest.mark.parametrize("version", ["2.44.0", "2.44.1", "2.50.0", "2.60.0", "2.60.3"])
def test_versions_in_the_range_are_accepted(version: str) -> None:
    compat.check_ray_version(version)


@pytest.mark.parametrize("version", ["2.30.0", "2.43.9", "2.61.0", "2.99.0", "3.0.0"])
def test_versions_outside_are_one_clear_line(version: str) -> None:
    with pytest.raises(FluidTuneError) as raised:
        compat.check_ray_version(version)
    message = str(raised.value)
    assert version in message and "pip install" in message and "\n" not in message


def test_pyproject_claims_the_versions_that_are_checked() -> None:
    minor = int(compat.NEWEST_RAY.split(".")[1])
    assert f'"ray[tune]>={compat.OLDEST_RAY},<2.{minor + 1}"' in (ROOT / "pyproject.toml").read_text()


def private_ray_imports(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [n for n in names if n.split(".")[0] == "ray" and any(p.startswith("_") for p in n.split("."))]
    return found


def test_nothing_but_compat_imports_rays_private_modules() -> None:
    assert private_ray_imports("from ray.air._internal import x\nimport ray._private.worker") != []
    for package in ("fluidtune", "themis_bridge", "salus_share"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "compat.py":
                assert private_ray_imports(path.read_text()) == [], f"{path} must ask compat.py for it"


def test_pbts_intervals_are_where_we_read_them() -> None:
    pbt = PopulationBasedTraining("training_iteration", perturbation_interval=4, hyperparam_mutations={"x": [1]})
    assert (pbt._time_attr, pbt._perturbation_interval, pbt._next_perturbation_sync, pbt._synch) == (
        "training_iteration",
        4,
        4,
        False,
    )


def test_the_stoppers_iterations_are_where_we_read_them() -> None:
    stopper = CombinedStopper(MaximumIterationStopper(7), TimeoutStopper(60))
    assert stopper._stoppers[0]._max_iter == 7
    assert "_stopper" in attributes_set(compat.TuneController)
    assert MedianStoppingRule(time_attr="epochs")._time_attr == "epochs"


def test_a_loop_that_writes_its_last_commit_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, writes, written = threading.Semaphore(0), threading.Event(), []

    def loop() -> None:
        lock.acquire()
        writes.set()
        time.sleep(0.3)
        written.append(True)
        writes.clear()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    session = SimpleNamespace(
        training_thread=thread, continue_lock=lock, result_queue=queue.Queue(), error_queue=queue.Queue()
    )
    monkeypatch.setattr(compat, "get_session", lambda: session)
    compat.let_go_on(timeout=0.1, busy=writes.is_set)
    assert written

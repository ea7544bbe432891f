"""Trials that FluidTune does not host run by the controller's own actor manager. Needs no running Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from ray._private import worker
from ray.air.execution._internal import RayActorManager

from fluidtune.ray_compat import cluster_state
from fluidtune.ray_compat import controller as compat
from fluidtune.ray_compat.trainable import TRIAL_INFO


class Hosting(compat.ActorManager):
    """Hosts every trial but "left", and notes what it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def hosts(self, trial_id: str) -> bool:
        return trial_id != "left"

    def add_trial(self, tracked: Any, trial_id: str, kwargs: Any) -> None:
        self.heard.append(trial_id)
        self.set_live(tracked, f"actor of {trial_id}")

    def release_trial(self, tracked: Any) -> bool:
        self.heard.append("release")
        return self.unset_live(tracked)

    def call_trainable(self, tracked: Any, method: str, *rest: Any) -> Any:
        self.heard.append(method)
        return "our future"

    def drop_calls(self, tracked: Any) -> None:
        self.heard.append("drop")

    def drop_failure(self, tracked: Any) -> None:
        self.heard.append("forget")

    def answer_call(self, future: Any) -> None:
        self.heard.append(future)

    def step(self, timeout: float | None) -> bool:
        self.heard.append(timeout)
        return False

    def close(self) -> None:
        self.heard.append("close")

    def resources_in_use(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def count_pending(self) -> int:
        return 1

    def count_unfinished(self) -> int:
        return 2

    def count_calls(self) -> int:
        return 3


@pytest.fixture
def both() -> tuple[Any, Any, dict[str, Any]]:
    """A manager of ours with the trial "host" before one of Ray's with the trial "left"; what Tune tracks, by trial."""
    solved: list[Any] = []
    rays = create_autospec(RayActorManager, instance=True)
    rays._live_actors_to_ray_actors_resources = {}
    rays._actor_task_events = SimpleNamespace(get_futures=lambda: {"ray's future"}, resolve_future=solved.append)
    rays.solved = solved
    rays.num_pending_actors, rays.num_total_actors, rays.num_actor_tasks = 10, 20, 30
    rays.get_live_actors_resources.return_value = {"CPU": 2.0, "GPU": 1.0}
    rays.is_actor_failed.return_value = rays.next.return_value = False
    ours = Hosting()
    controller: Any = SimpleNamespace(_actor_manager=rays, _reuse_actors=False)
    compat.replace_actor_manager(controller, ours)
    assert controller._actor_manager is ours and ours.stands_before_ray
    assert ours.num_total_actors == 2 and not ours.next(0.1) and not rays.next.called
    rays.add_actor.return_value = compat.TrackedActor(7)
    actors = {
        name: ours.add_actor("class", {"config": {TRIAL_INFO: SimpleNamespace(trial_id=name)}}, "request", on_stop=len)
        for name in ("host", "left")
    }
    ours.heard.clear()
    return ours, rays, actors


def test_what_the_controller_asks_of_a_trial_goes_to_the_manager_that_runs_it(
    both: tuple[Any, Any, dict[str, Any]],
) -> None:
    ours, rays, tracked_actors = both
    left, host = tracked_actors["left"], tracked_actors["host"]
    rays.add_actor.assert_called_once()
    assert left.actor_id == 7
    rays._live_actors_to_ray_actors_resources[left] = ("actor of left", None)  # it has started
    actors = [ours._live_actors_to_ray_actors_resources[tracked][0] for tracked in (host, left)]
    assert actors == ["actor of host", "actor of left"] and ours.num_live_actors == 2
    ours.schedule_actor_task(left, "stop", _return_future=True)  # which our own trials have no use for
    rays.schedule_actor_task.assert_called_once_with(left, "stop", None, None, None, None, True)
    ours.is_actor_started(left)
    rays.is_actor_started.assert_called_once_with(left)
    assert not ours.is_actor_failed(left) and ours.is_actor_started(host)
    ours.clear_actor_task_futures(left)
    rays.clear_actor_task_futures.assert_called_once_with(left)
    ours.resolve_future("ray's future")
    assert rays.solved == ["ray's future"]
    ours.remove_actor(left, kill=False, stop_future="future")
    rays.remove_actor.assert_called_once_with(left, kill=False, stop_future="future")
    assert ours.heard == []
    ours.resolve_future("our future")
    assert ours.schedule_actor_task(host, "train", _return_future=True) == "our future"
    ours.clear_actor_task_futures(host)
    ours.remove_actor(host)
    assert ours.heard == ["our future", "train", "drop", "release"]


def test_the_controller_counts_the_trials_of_both(both: tuple[Any, Any, dict[str, Any]]) -> None:
    ours, rays, _ = both
    assert (ours.num_pending_actors, ours.num_total_actors, ours.num_actor_tasks) == (11, 22, 33)
    assert ours.get_live_actors_resources() == {"CPU": 3.0, "GPU": 1.0}
    ours.cleanup()
    rays.cleanup.assert_called_once_with()
    assert ours.heard == ["close"]


def test_both_managers_are_asked_for_events_in_turn(both: tuple[Any, Any, dict[str, Any]]) -> None:
    ours, rays, _ = both
    rays.next.side_effect = lambda timeout: ours.heard.append(("ray", timeout)) or False
    assert not ours.next(0.1) and not ours.next(0.1)
    assert ours.heard == [("ray", 0.0), 0.1, 0.0, ("ray", 0.1)]
    ours.heard.clear()
    rays.next.side_effect = lambda timeout: True
    assert ours.next(0.1) and ours.heard == []
    rays.num_total_actors = 0
    assert not ours.next(0.1) and ours.heard == [0.1]


def test_local_mode_is_known_by_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(worker, "LOCAL_MODE", 2) == 2 and not cluster_state.in_local_mode()
    monkeypatch.setattr(worker.global_worker, "mode", 2)
    assert cluster_state.in_local_mode()

"""A worker answers, or dies, while it is waited for or unloads its trial. No Ray runs here."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from fluidtune.cluster.pool import PooledWorker
from fluidtune.trials import messages as life
from fluidtune.tune import worker_answers
from fluidtune.tune.ray_calls import DeviceRevoked
from fluidtune.tune.worker_dispatch import WorkerRequest
from tests.tune.tried_manager import Tried

JOINER, DIED = PooledWorker("w1", 1, None, 0.0), RayActorError()


def test_a_device_that_is_taken_away_while_it_is_asked_which_gpu_it_is(tried: Tried) -> None:
    # Seen: the search ended with Ray's exception, and its driver stood still meanwhile.
    tried.manager.step(0.0)
    got: list[PooledWorker] = []
    tried.pool.unknown_gpus = lambda device, others: [1] if 1 in tried.devices.nodes else []
    tried.pool.start_probe = lambda device: tried.pool.add_worker("probe", device)
    tried.manager._dispatch.request_worker(WorkerRequest(0, (1,), got.append, lambda: True))
    tried.devices.lose(1)
    tried.answer_newest(DeviceRevoked())
    tried.manager.step(0.0)
    assert not tried.job.engine.has_device(1) and not tried.pool.workers
    assert not got, "the engine gives the trial other devices"


def unloaded(tried: Tried, answer: object) -> list[str]:
    """The only worker answers this when it is to unload its trial."""
    then: list[str] = []
    worker = tried.pool.add_worker("old", 1)
    tried.manager._dispatch.unload_trial(worker, 30.0, then=lambda: then.append("unloaded"))
    tried.answer_newest(answer)
    assert not tried.pool.workers
    return then


def test_after_a_process_whose_trial_cannot_end_in_a_fork_no_more_are_forked(tried: Tried) -> None:
    # Seen: with Ray 2.44 a trial whose `stop` imported torch ended its process without a word of why.
    named, plain = "fluidtune.cluster.forks.plain_process.NeedsPlainProcess", list[str]()
    tried.pool.stop_forking = plain.append
    unloaded(tried, RuntimeError(f"{named}: torch was imported\nof it, the rest"))
    assert plain == ["torch was imported"] and "worker_lost" not in tried.written()


def test_a_worker_that_is_dead_when_it_is_to_unload_its_trial_is_lost_and_not_replaced(tried: Tried) -> None:
    # The followers of a killed leader say first that their group broke. Seen: `worker_lost` was not logged.
    assert unloaded(tried, RayActorError(error_msg="killed")) == ["unloaded"]
    assert [lost["reason"] for lost in tried.logged("worker_lost")] == ["killed"]


@pytest.mark.parametrize(
    ("value", "event"),
    [
        (None, life.Attached(JOINER)),
        (DIED, life.NotAttached(JOINER, "died", str(DIED))),
        ("another trial's", life.NotAttached(JOINER, "refused", "another trial's")),
        (
            RayTaskError("attach", "Traceback", ValueError("no")),
            life.NotAttached(JOINER, "refused", "ValueError('no')"),
        ),
    ],
)
def test_what_a_worker_answers_that_is_to_follow(value: Any, event: life.Event) -> None:
    assert worker_answers.attached(JOINER, value, there=True) == event
    assert worker_answers.attached(JOINER, DIED, there=False) == life.NotAttached(JOINER, "over", str(DIED))

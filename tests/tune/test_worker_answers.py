"""What workers' answers mean for a trial's life; tests/trials/test_lifecycle.py says what follows. No Ray runs here."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from fluidtune.cluster.hosting.messages import IterationReply
from fluidtune.cluster.pool import PooledWorker
from fluidtune.cluster.sharing.lanes import Lack
from fluidtune.group_facts import GroupFacts
from fluidtune.ray_compat.trainable import RESULT_DUPLICATE
from fluidtune.trials import messages as m
from fluidtune.tune import worker_answers

WORKER = PooledWorker("w1", 1, None, 0.0)
CALL = m.Call("train")
DIED = RayActorError()
LAST = IterationReply({RESULT_DUPLICATE: True}, "plain", 0.0)
FIRST = IterationReply({"training_iteration": 100}, "plain", 1.0, 1)
FULL = IterationReply({}, "plain", 0.0, lack=Lack("no room", (0.5, 0.1)))


@pytest.mark.parametrize(
    ("value", "event"),
    [
        (FIRST, m.IterationDone(CALL, FIRST, 100)),
        (LAST, m.IterationDone(CALL, LAST, 0, final=True)),
        (
            IterationReply({}, "elastic", 0.0, anew="its counter differs"),
            m.CannotStay(CALL, "it begins anew: its counter differs"),
        ),
        (FULL, m.RoomLacking(CALL, "no room", (0.5, 0.1))),
        (IterationReply({}, "plain", 0.0, lack=Lack("few", devices=3)), m.RoomLacking(CALL, "few", devices=3)),
        ("saved", m.Answered(CALL, "saved")),
    ],
)
def test_what_a_leader_answers(value: Any, event: m.Event) -> None:
    assert worker_answers.called(CALL, value) == event


@pytest.mark.parametrize(
    ("value", "event"),
    [
        (None, m.Attached(WORKER)),
        (DIED, m.NotAttached(WORKER, "died", str(DIED))),
        ("another trial's", m.NotAttached(WORKER, "refused", "another trial's")),
        (RayTaskError("attach", "Traceback", ValueError("no")), m.NotAttached(WORKER, "refused", "ValueError('no')")),
    ],
)
def test_what_a_worker_answers_that_is_to_follow(value: Any, event: m.Event) -> None:
    assert worker_answers.attached(WORKER, value) == event


def test_a_loaded_leader_says_what_is_known_of_its_trial() -> None:
    facts = GroupFacts(address=("n", 1))
    assert worker_answers.loaded(WORKER, facts) == m.Loaded(WORKER, facts)
    assert worker_answers.loaded(WORKER, Lack("no room")) == m.RoomLacking(WORKER, "no room")


@pytest.mark.parametrize(
    ("value", "how", "why"),
    [
        (None, "over", ""),
        (Lack("its GPU is lost", broken=0), "over", "its GPU is lost"),
        ("ValueError('its own')", "error", "ValueError('its own')"),
        (DIED, "died", ""),
    ],
)
def test_how_a_follower_has_ended(value: Any, how: str, why: str) -> None:
    event = worker_answers.followed(WORKER, value)
    assert isinstance(event, m.FollowerEnded)
    assert (event.how, event.why) == (how, why)

"""What an actor has created in Ray ends with it, and so does what that has created in turn."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from fluidtune.ray_compat.descent import end_made_by
from tests.conftest import assert_nothing_left

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=0)
class Creator:
    """Creates a placement group, and then another actor of its kind for each of ``more``: its lifetime."""

    def __init__(self, *more: str | None) -> None:
        self.group = placement_group([{"CPU": 1}], lifetime=more[0] if more else None)
        self.actors = [Creator.options(name=each, lifetime=each, max_restarts=-1).remote() for each in more]

    def made(self) -> list[Any]:
        return [self.group, *(each for actor in self.actors for each in ray.get(actor.made.remote()))]


def living() -> set[str]:
    return {name for name, row in placement_group_table().items() if row["state"] != "REMOVED"}


def test_what_an_actor_has_created_is_gone_with_it(ray4: None) -> None:
    other = Creator.remote(None)
    kept = {group.id.hex() for group in ray.get(other.made.remote())}
    trial = Creator.remote(None, None)
    assert len(ray.get(trial.made.remote())) == 3 and len(living()) == 5
    ray.kill(trial)
    end_made_by(trial)
    assert living() == kept
    ray.kill(other)
    end_made_by(other)
    assert_nothing_left()


def test_detached_things_stay_with_what_they_have_created(ray4: None) -> None:
    trial = Creator.remote("detached")
    own, others = ray.get(trial.made.remote())
    ray.kill(trial)
    end_made_by(trial)
    assert living() == {own.id.hex(), others.id.hex()}
    for group in own, others:
        remove_placement_group(group)
    ray.kill(ray.get_actor("detached"))

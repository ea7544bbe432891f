"""What a process creates in Ray is noticed, by whichever of Ray's functions it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from fluidtune.ray_compat import ownership

pytestmark = pytest.mark.ray


class Counter:
    """An actor that a trial creates."""

    def add(self) -> int:
        return 1


def one() -> int:
    return 1


def ask_another() -> None:
    other = ray.get_actor("not a trial's")
    ray.get(other.add.remote())


def of(name: str) -> Callable[[], Any]:
    """What a trial does."""
    options = dict(num_cpus=0, max_restarts=0)
    return {
        "remote": lambda: ray.remote(Counter).remote(),
        "named": lambda: ray.remote(Counter).options(name="a counter", **options).remote(),
        "task": lambda: ray.get(ray.remote(one).remote()),
        "task with options": lambda: ray.get(ray.remote(one).options(num_cpus=0).remote()),
        "placement group": lambda: remove_placement_group(placement_group([{"CPU": 1}])),
        "an object": lambda: ray.get(ray.put(1)),
        "another's actor": ask_another,
    }[name]


class Trial:
    """A process in which a trial does something."""

    def __init__(self) -> None:
        ownership.watch()

    def run(self, name: str) -> bool:
        """Whether it creates no more after its end, because it has created something."""
        made = of(name)()
        ownership.end_owned()
        try:
            ray.get(ray.remote(one).options(num_cpus=0).remote())
        except RuntimeError:
            return True
        finally:
            if isinstance(made, ray.actor.ActorHandle):
                ray.kill(made)
        return False


_MAKES = ("remote", "named", "task", "task with options")


@pytest.mark.parametrize(
    "name, owned",
    [*((each, True) for each in (*_MAKES, "placement group")), ("an object", False), ("another's actor", False)],
)
def test_what_a_process_creates_is_noticed(ray2: None, name: str, owned: bool) -> None:
    others = ray.remote(Counter).options(name="not a trial's", num_cpus=0).remote()
    ray.get(others.add.remote())
    trial = ray.remote(Trial).options(num_cpus=0).remote()
    try:
        assert ray.get(trial.run.remote(name)) == owned
    finally:
        ray.kill(trial)
        ray.kill(others)

"""Ray's random numbers in a process that others are forked from.

Ray's compiled part draws ids of objects, tasks and workers from a generator that takes its seed from the system once a
process (Abseil's ``RandenPool``), and not again in a fork: "this is not fork-safe" (src/ray/util/random.h). If it has
been drawn from before a fork, two forks give two objects one id, and one trial gets what another has put.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import ray.actor
from ray import ActorClassID


class _OfTheSystem:
    """Stands for the class of ids that Ray draws one of wherever an actor's class is written in a module."""

    @staticmethod
    def from_random() -> ActorClassID:
        return ActorClassID(os.urandom(ActorClassID.size()))


@contextmanager
def undrawn() -> Iterator[None]:
    """What is imported meanwhile may define actors, and Ray's generator is not drawn from."""
    ray.actor.ActorClassID = _OfTheSystem
    try:
        yield
    finally:
        ray.actor.ActorClassID = ActorClassID

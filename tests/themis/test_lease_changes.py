"""The arbiter's process over many lease changes: it keeps no object of a lease that is over."""

from __future__ import annotations

import gc
import types
from typing import Any

from tests.themis.cluster import Job
from tests.themis.shell_world import World
from themis_bridge.shell import actor

#: Not part of what the arbiter keeps: code, and the stand-in of Ray.
APART = (type, World, *(getattr(types, f"{kind}Type") for kind in ("Module", "Function", "Method", "BuiltinFunction")))


def kept(root: Any) -> int:
    """How many objects are reachable from ``root``."""
    seen: dict[int, Any] = {}
    todo = [root]
    while todo:
        one = todo.pop()
        if id(one) not in seen and not isinstance(one, (*APART, types.SimpleNamespace, types.CodeType)):
            seen[id(one)] = one
            todo += gc.get_referents(one)
    return len(seen)


def test_nothing_is_kept_of_a_lease_that_is_over(monkeypatch, tmp_path) -> None:
    # The durations of the last ticks are kept on purpose.
    monkeypatch.setattr(actor, "TICKS", 1)
    world = World(monkeypatch, tmp_path, gpus=8, gives_back=True)
    for name in ("a", "b"):
        world.join(name, Job(8, 1e9))

    def after(changes: int) -> int:
        """The largest number of objects in a moment of the next lease changes."""
        most, until = 0, world.actor._arbiter.state.leases.token + changes
        while world.actor._arbiter.state.leases.token < until:
            world.run(5.0)
            most = max(most, kept(list(vars(world.actor).values())))
            # Ray keeps removed groups, and the arbiter must not need that.
            world.table = {id: group for id, group in world.table.items() if group["state"] != "REMOVED"}
        return most

    first = after(100)
    # Less than one object for every third change: what the arbiter holds for a moment differs by about 100.
    assert after(300) < first + 100

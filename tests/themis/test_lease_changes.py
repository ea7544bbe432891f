"""The arbiter's process over many lease changes: it keeps no object of a lease that is over."""

from __future__ import annotations

import gc
import itertools
import types
from typing import Any

from tests.themis.cluster import Job
from tests.themis.shell_world import World
from themis_bridge.arbiter_state import MOST_DOUBTS, ArbiterState

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


def test_apps_that_come_and_go_for_ever_leave_nothing_behind(monkeypatch, tmp_path) -> None:
    world = World(monkeypatch, tmp_path, (4,))
    numbers = itertools.count()

    def after(apps: int) -> tuple[int, int]:
        """The objects that the arbiter reaches, and the length of its books, after ``apps`` more apps, long silent."""
        for number in itertools.islice(numbers, apps):
            name = f"app{number}"
            world.join(name, Job(2, 1e4))
            world.run(1.0)
            if number % 3 == 0:
                world.leave(name)  # it says so
            else:
                job = world.tenants.pop(name)
                if number % 3 == 1:
                    world.end_driver(job)  # else it stands still for ever
        world.run(100.0)
        world.table = {id: group for id, group in world.table.items() if group["state"] != "REMOVED"}
        assert not world.there()
        return kept(list(vars(world.actor).values())), len(world.books.read_text())

    objects, length = after(20)
    later = after(60)
    assert later[0] < objects + 20 and later[1] < length + 20


def test_doubts_about_ever_new_users_are_bounded() -> None:
    state = ArbiterState()
    for number in range(MOST_DOUBTS + 10):
        app = state.add(f"app{number}", "")
        app.doubt, app.served, app.useful = 2.0, 10.0, 1
        state.forget(f"app{number}")
    assert len(state.doubts) == MOST_DOUBTS
    assert "app0" not in state.doubts and f"app{MOST_DOUBTS + 9}" in state.doubts

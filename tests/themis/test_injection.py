"""A call that fails, at each place in turn, and a disk that is full: no GPU is lost, no instruction is dropped."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.themis.cluster import Job
from tests.themis.shell_world import SETTINGS, World

#: Virtual seconds after a fault within which every GPU that an app wants must be used.
RECOVERY_S = 60.0


def two_apps(world: World) -> World:
    for name in ("a", "b"):
        world.join(name, Job(3, 500.0))
    return world


def assert_all_used(world: World) -> None:
    """Within a moment (GPUs change hands all the time) every GPU is used, and no group is left that nobody holds."""
    for _ in range(50):
        world.run(0.2)
        if not world.unused() and len(world.there()) == sum(world.cores.values()):
            break
    assert not world.unused(), f"unused GPUs; {world.actor.status()}"
    live = [each for each in world.table.values() if each["name"] and each["state"] != "REMOVED"]
    assert len(live) == sum(world.cores.values()), f"groups that nobody holds: {live}"


@pytest.mark.parametrize(
    ("error", "remedy"), [("ENOSPC", "make room"), ("EROFS", "let this user write"), ("EACCES", "let this user write")]
)
def test_a_full_disk_or_one_that_is_read_only_stops_nothing_for_longer(error, remedy, monkeypatch, tmp_path, caplog):
    world = two_apps(World(monkeypatch, tmp_path))
    world.run(8)
    assert_all_used(world)
    held = world.there()
    number = getattr(errno, error)
    world.disk = OSError(number, os.strerror(number))
    world.run(60)
    status = world.actor.status()
    assert os.strerror(number) in status["trouble"][0] and status["waiting"]
    assert sorted(world.there()) == sorted(held), "leases go on"
    assert remedy in caplog.text
    assert len([line for line in caplog.messages if "cannot be written" in line]) < 30, "writing backs off"
    world.disk = None
    world.run(RECOVERY_S)
    assert_all_used(world)
    assert not world.actor.status()["trouble"]


def test_an_arbiter_starts_and_stops_where_nothing_can_be_written(monkeypatch, tmp_path, caplog):
    world = two_apps(World(monkeypatch, tmp_path))
    world.run(8)
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))

    def fail(*args, **kwargs):
        raise read_only

    world.disk = read_only
    for name in ("replace", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, fail)
    held = world.there()
    world.start()
    world.run(5)
    assert sorted(world.there()) == sorted(held) and "let this user write" in world.actor.status()["trouble"][0]
    world.actor.close()
    assert not world.there() and "cannot be deleted" in caplog.text
    # Books that cannot even be read.
    world.books.write_text("{")
    world.start()
    assert f"they stay as {world.books}" in caplog.text


@pytest.mark.parametrize("asked_s", [8.0, 3.0])
def test_what_waits_makes_way_for_the_heir_of_another_gpu_of_its_machine(asked_s, monkeypatch, tmp_path):
    # Seen: Ray gave the room of the promised GPU to the group that waited on that machine, and the heir had to wait.
    world, first = World(monkeypatch, tmp_path, (3,), {**SETTINGS, "weights": {"c": 1e6}}), set()
    world.outside["0"] = 1
    for name, jobs, seconds in (("b", 2, 8.0), ("a", 1, asked_s), ("c", 1, 0.0)):
        world.join(name, Job(jobs, 1e5))
        world.run(seconds)
    while not first and world.now < 60:
        world.run(0.1)
        first = {name for name in "ac" if world.agents[name].leases}
    assert first == {"c"}
    while not world.agents["a"].leases and world.now < 120:
        world.run(0.1)
    assert world.agents["a"].leases, "asked for again"


def test_the_whole_table_is_read_only_at_the_start(monkeypatch, tmp_path):
    world = two_apps(World(monkeypatch, tmp_path))
    world.run(100)
    assert sum(each["state"] == "REMOVED" for each in world.table.values()) > 5
    assert world.calls["whole table"] == 1

"""Folders that a lock holds, in a place where other users write, too."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluidtune.cluster import held_folders
from fluidtune.cluster.forks.fork_server import PREFIX, ForkServer
from salus_share import private_files

LOCK = "lock"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Iterator[Path]:
    """The place for temporary files."""
    found = tmp_path / "tmp"
    found.mkdir()
    monkeypatch.setattr(held_folders.tempfile, "tempdir", str(found))
    yield found


def folder_of(place: Path, name: str) -> Path:
    """A folder that was made a minute ago."""
    folder = place / f"{PREFIX}{name}"
    folder.mkdir(mode=0o700)
    os.utime(folder, (time.time() - 60,) * 2)
    return folder


def as_another_user(monkeypatch) -> None:
    """What this process has made is another user's from now on, for the code under test."""
    mine = os.geteuid()
    monkeypatch.setattr(private_files.os, "geteuid", lambda: mine + 4242)


def test_folders_that_nobody_holds_are_removed_and_those_being_made_are_not(place):
    held, left = folder_of(place, "held"), folder_of(place, "left")
    young = place / f"{PREFIX}young"
    young.mkdir()
    with held_folders.hold(str(held), LOCK):
        held_folders.sweep(PREFIX, LOCK)
        assert (held.exists(), left.exists(), young.exists()) == (True, False, True)
    held_folders.sweep(PREFIX, LOCK)
    assert not held.exists() and young.exists()


def test_a_link_or_a_pipe_in_the_place_of_a_lock_is_neither_followed_nor_waited_for(place, tmp_path):
    (folder_of(place, "link") / LOCK).symlink_to(tmp_path / "new")
    os.mkfifo(folder_of(place, "pipe") / LOCK)
    (place / f"{PREFIX}linked").symlink_to(tmp_path)
    held_folders.sweep(PREFIX, LOCK)
    assert not (tmp_path / "new").exists() and (place / f"{PREFIX}linked").exists()


def test_another_users_folder_is_left_as_it_is(place, monkeypatch):
    folder = folder_of(place, "theirs")
    as_another_user(monkeypatch)
    held_folders.sweep(PREFIX, LOCK)
    assert list(place.iterdir()) == [folder] and not list(folder.iterdir())


@pytest.mark.parametrize("what", ["link", "theirs"])
def test_a_server_that_is_told_such_a_folder_does_not_start_and_says_why(place, monkeypatch, tmp_path, what):
    folder, letter = place / f"{PREFIX}told", tmp_path / "letter"
    letter.write_text("of ours")
    real = tmp_path / "real" if what == "link" else folder
    real.mkdir()
    (real / "log").symlink_to(letter)
    if what == "link":
        folder.symlink_to(real)
    else:
        as_another_user(monkeypatch)
    state = ForkServer(["json"], dict(os.environ), str(folder)).finish([], {})
    assert state.command is None and str(folder) in str(state.why)
    assert letter.read_text() == "of ours"

"""Folders that a lock holds, in a place where other users write, too."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from salus_share.held_folders import open_in, sweep
from tests.salus.processes import as_another_user

PREFIX, LOCK = "ft-slurm-", "lock"


def folder_of(tmp_path: Path, name: str) -> Path:
    """A folder that was made a minute ago."""
    folder = tmp_path / f"{PREFIX}{name}"
    folder.mkdir(mode=0o700)
    os.utime(folder, (time.time() - 60,) * 2)
    return folder


def test_folders_that_nobody_holds_are_removed_and_those_being_made_are_not(tmp_path):
    held, left = folder_of(tmp_path, "held"), folder_of(tmp_path, "left")
    young = tmp_path / f"{PREFIX}young"
    young.mkdir()
    with open_in(str(held), LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(PREFIX, LOCK, str(tmp_path))
        assert (held.exists(), left.exists(), young.exists()) == (True, False, True)
    sweep(PREFIX, LOCK, str(tmp_path))
    assert not held.exists() and young.exists()


def test_a_link_or_a_pipe_in_the_place_of_a_lock_is_neither_followed_nor_waited_for(tmp_path):
    (folder_of(tmp_path, "link") / LOCK).symlink_to(tmp_path / "new")
    os.mkfifo(folder_of(tmp_path, "pipe") / LOCK)
    (tmp_path / f"{PREFIX}linked").symlink_to(tmp_path)
    sweep(PREFIX, LOCK, str(tmp_path))
    assert not (tmp_path / "new").exists() and (tmp_path / f"{PREFIX}linked").exists()


def test_another_users_folder_is_left_as_it_is(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, "theirs")
    as_another_user(monkeypatch)
    with pytest.raises(PermissionError, match="belongs to"):
        open_in(str(folder), LOCK)
    sweep(PREFIX, LOCK, str(tmp_path))
    assert list(tmp_path.iterdir()) == [folder] and not list(folder.iterdir())

"""The arbiter reads no books that another user has made."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from themis_bridge import ThemisError
from themis_bridge.shell.books_file import Books, books_path, write_books


def read_books(path: Path) -> str | None:
    return Books(path, time.monotonic).text()


@pytest.mark.parametrize("mode", [None, 0o777, 0o755])
def test_books_are_for_their_owner_only(mode: int | None, tmp_path: Path) -> None:
    path = tmp_path / "themis-me" / "head.json"
    if mode is not None:  # Seen: a directory that others could write to stayed so.
        path.parent.mkdir()
        path.parent.chmod(mode)
    assert read_books(path) is None
    for text in ("first", "second"):
        write_books(path, text)
        assert read_books(path) == text
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]


def test_books_have_one_place_whatever_tmpdir_a_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/a/place/of/the/job")
    assert books_path("h" * 56) == Path("/tmp") / f"themis-{os.getuid()}" / f"{'h' * 16}.json"


@pytest.mark.parametrize("use", [read_books, lambda path: write_books(path, "{}")])
def test_books_of_another_user_are_refused_in_one_line(use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "themis-me" / "head.json"
    write_books(path, "{}")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 4242)
    with pytest.raises(ThemisError, match=r"^\S+themis-me belongs to user \d+ and not to user \d+: have .* remove it"):
        use(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    write_books(tmp_path / "elsewhere" / "head.json", "{}")
    (tmp_path / "themis-me").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ThemisError, match="symbolic link"):
        read_books(tmp_path / "themis-me" / "head.json")

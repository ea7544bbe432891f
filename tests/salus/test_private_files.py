"""What another user has put where every user may write is refused, before anything of it is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from salus_share import mps, seat_table
from salus_share.errors import SalusError
from salus_share.gate import Gate
from salus_share.private_files import open_own, own_directory
from salus_share.seat_table import FILE, SeatTable
from tests.contracts.processes import needs_root
from tests.salus.processes import as_another_user


def test_directories_and_files_are_for_their_owner_only(tmp_path) -> None:
    device = tmp_path / "salus-1" / "gpu-0"
    own_directory(device)
    device.chmod(0o755)  # as an older version has made it
    Gate(device, "t", "FAIR")
    for path in (device.parent, device, device / FILE, device / "lock"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize("use", [lambda directory: Gate(directory, "t", "FAIR"), SeatTable])
def test_a_directory_of_another_user_is_refused_in_one_line(use, tmp_path, monkeypatch) -> None:
    device = tmp_path / "gpu-0"
    Gate(device, "t", "FAIR")
    before = sorted(path.name for path in device.iterdir())
    seat_table._locks.clear()
    as_another_user(monkeypatch)
    with pytest.raises(
        SalusError, match=r"^\S+ belongs to \S+ and not to user \d+: have .* remove it, it is not used$"
    ):
        use(device)
    assert sorted(path.name for path in device.iterdir()) == before


@needs_root
def test_a_directory_that_really_is_another_users_is_refused(tmp_path) -> None:
    device = tmp_path / "gpu-0"
    Gate(device, "t", "FAIR")
    os.chown(device / FILE, 65534, -1)
    with pytest.raises(SalusError, match=f"{device / FILE} belongs to"):
        SeatTable(device)
    os.chown(device, 65534, -1)
    with pytest.raises(SalusError, match=f"{device} belongs to"):
        Gate(device, "t", "FAIR")


def test_a_link_is_not_followed(tmp_path) -> None:
    elsewhere, device = tmp_path / "elsewhere", tmp_path / "gpu-0"
    Gate(elsewhere, "t", "FAIR")
    device.symlink_to(elsewhere)
    with pytest.raises(SalusError, match="is not a directory"):
        Gate(device, "t", "FAIR")
    device.unlink()
    device.mkdir()
    (device / FILE).symlink_to(elsewhere / FILE)
    with pytest.raises(SalusError, match="no seat table"):
        SeatTable(device)
    (device / "log").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        open_own(device / "log", os.O_WRONLY | os.O_CREAT)
    assert not (tmp_path / "target").exists()


def planted(tmp_path) -> Path:
    """Where `Mps` has its directories, made by another user: a name of this process that leads to a file of ours."""
    homes, letter = tmp_path / "salus-1", tmp_path / "letter"
    letter.write_text("of ours")
    (homes / "x" / mps.CLIENTS).mkdir(parents=True)
    (homes / "x" / mps.CLIENTS / f"{os.getpid()}-{seat_table.started(os.getpid())}").symlink_to(letter)
    return homes


def test_a_link_in_another_users_directory_leads_to_no_file_of_ours(tmp_path, monkeypatch) -> None:
    homes = planted(tmp_path)
    mps.end_client(os.getpid(), homes, "no-such-program")
    as_another_user(monkeypatch)
    mps.end_client(os.getpid(), homes, "no-such-program")
    assert (tmp_path / "letter").read_text() == "of ours"

"""A log that grows in any pieces, is replaced, deleted, or none at all, and a page that has slept."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.report.events import EVENT_LOG_NAME, EventDict
from fluidtune.view import followed_run, service_figures
from fluidtune.view.followed_run import QUIET_S, FollowedRun
from fluidtune.view.run_list import RunList
from tests.contracts.processes import until
from tests.report.makers import added, begin, ev, random_run, written
from tests.report.test_summary import by_hand
from tests.view.pages import Page, lines_of


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.lists(st.integers(0, 20_000), max_size=8), st.integers(1, 3000))
def test_any_pieces_of_a_log_give_the_same_page(seed: int, cuts: list[int], piece: int) -> None:
    """Cut within a line too. One page asks each time, one sleeps until the end, and one opens then."""
    data = lines_of(random_run(seed, devices=2, trials=6, iterations=4))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    followed_run.PIECE, before = piece, followed_run.PIECE
    try:
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory, EVENT_LOG_NAME)
            log.touch()
            run, page, cursor = FollowedRun(log), Page(), ""
            sleeper, slept = Page(), ""
            for number, (start, end) in enumerate(pairwise(places)):
                with log.open("ab") as file:
                    file.write(data[start:end])
                found = run.look(cursor)
                cursor = found["cursor"]
                page.take(found)
                if number == 1:
                    sleeper.take(run.look())
                    slept = cursor
            whole = Page().take(FollowedRun(log).look())
            assert page.shown == whole.shown == sleeper.take(run.look(slept)).shown
    finally:
        followed_run.PIECE = before


def test_a_log_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    """A second run of the same name has kept the first one's log beside its own."""
    log = written(tmp_path, by_hand())
    run = FollowedRun(log)
    page = Page().take(found := run.look())
    log.rename(tmp_path / "kept.jsonl")
    written(tmp_path, [begin(0, 1), added(1, "x")])
    changed = run.look(found["cursor"])
    assert changed["whole"] and list(page.take(changed).trials) == ["x"]
    log.write_bytes(lines_of([begin(0, 1)]) + b'{"t": 12, "ev\n')  # the same file, shorter; a driver was killed
    again = run.look(changed["cursor"])
    assert again["whole"] and again["unreadable"] == 1


def test_a_run_that_is_deleted_stays_as_it_was(tmp_path: Path) -> None:
    log = written(tmp_path, by_hand())
    run = FollowedRun(log)
    page = Page().take(found := run.look())
    log.unlink()
    gone = run.look(found["cursor"])
    assert gone["trouble"].endswith("was deleted: this is what it had") and not gone["whole"]
    assert len(page.take(gone).trials) == 3 and run.curve("c")["iterations"] == [1, 2, 3]
    assert run.story("c")["head"].endswith("paused")
    written(tmp_path, by_hand()[:3])
    assert run.look(gone["cursor"])["trouble"] == ""


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path: Path) -> None:
    log = written(tmp_path, by_hand())
    run = FollowedRun(log)
    run.look()
    log.unlink()
    os.mkfifo(log)
    found = []
    threading.Thread(target=lambda: found.extend([run.look(), run.story("c")]), daemon=True).start()
    until(lambda: len(found) == 2, 20)
    assert found[0]["trouble"].endswith("was deleted: this is what it had")


def test_a_foreign_file_and_none(tmp_path: Path) -> None:
    log = tmp_path / EVENT_LOG_NAME
    run = FollowedRun(log)
    assert "No such file" in run.look()["trouble"]
    log.write_text("\n" * followed_run.PIECE + "no event\n")
    found = run.look()
    assert f"is not a FluidTune event log: line {followed_run.PIECE + 1} is" in found["trouble"]
    assert run.look(found["cursor"])["trouble"] == found["trouble"]
    log.unlink()
    log.write_bytes(b"")
    assert run.look()["trouble"] == ""


def test_a_cursor_of_another_server_gets_everything(tmp_path: Path) -> None:
    log = written(tmp_path, by_hand())
    cursor = FollowedRun(log).look()["cursor"]
    for odd in (cursor, "", "x", "1.2.3", "0.999999"):
        assert FollowedRun(log).look(odd)["whole"]
    run = FollowedRun(log)
    assert run.look(run.look()["cursor"] + "0")["whole"]


def test_a_run_goes_on_until_it_ends_is_silent_for_long_or_is_deleted(tmp_path: Path) -> None:
    log = written(tmp_path, by_hand()[:3])
    run = FollowedRun(log)
    run.look()
    assert run.goes_on()
    os.utime(log, (time.time() - QUIET_S - 1,) * 2)
    assert not run.goes_on()
    written(tmp_path, by_hand())
    assert run.goes_on()  # as far as it was read
    assert run.look()["over"] and not run.goes_on()
    written(tmp_path, by_hand()[:3])
    run.look()
    log.unlink()
    assert not run.goes_on()


def served(answered: int) -> list[EventDict]:
    """The events of a service that has answered so many requests."""
    common = {"run": "r", "ray": "2", "fluidtune": "0", "python": "3", "machine": "m", "kind": "cpu", "devices": []}
    counts = {"requests": {"c": {"answered": answered}}, "batches": {"c": {"4": 2}}, "waited": {"c": 0.08}}
    start = ev(20, "serving_started", **common, slo=0.2, starts="eager", trials=[])
    return [start, ev(30, "served", seconds=10.0, busy=5.0, devices=1, **counts)]


def test_the_services_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: one with a name of its own was on no page; then each look listed all files of the run's directory.

    Seen: the services of another run of that name, which has none at first, were never shown.
    """
    monkeypatch.setattr(service_figures, "LOOK_S", float("inf"))
    log = written(tmp_path / "run", by_hand())
    run = FollowedRun(log)
    (log.parent / "serving-folder" / EVENT_LOG_NAME).mkdir(parents=True)
    (log.parent / "serving-pipe").mkdir()
    os.mkfifo(log.parent / "serving-pipe" / EVENT_LOG_NAME)  # what has a log's name and is no file is no service
    assert run.look()["services"] == []
    named, service = (written(tmp_path / "run" / where, served(8)) for where in ("serving-digits", "serving"))
    assert run.look()["services"] == []
    monkeypatch.setattr(service_figures, "LOOK_S", 0.0)
    found, other = run.look()["services"]
    assert found["state"] == "answers requests" and found["rows"][0][:3] == ["c", "0.8", "8"]
    assert other == {**found, "name": "digits"} and RunList(named.parent).logs() == {"run": log}
    with service.open("ab") as file:
        file.write(lines_of([ev(31, "serving_ended", seconds=11.0)]))
    assert run.look()["services"] == [{**found, "state": "was stopped"}, other]
    shutil.rmtree(tmp_path / "run")
    assert len(run.look()["services"]) == 2  # what was deleted stays as it was
    written(tmp_path / "run", by_hand()[:3])
    assert run.look()["services"] == []
    for answered in (3, 5):
        service = written(tmp_path / "run" / "serving", served(answered))
        assert run.look()["services"][0]["rows"][0][2] == str(answered)
        service.unlink()

"""Which runs a page shows."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from fluidtune.report.events import EventDict, NoEventLogError
from fluidtune.report.run_logs import find_log
from fluidtune.view import run_list
from fluidtune.view.run_list import KEPT, RunList
from tests.report.makers import added, begin, over, random_run, written
from tests.report.test_summary import by_hand
from tests.view.pages import lines_of


def storage(path: Path, names: str) -> Path:
    for age, name in enumerate(names):
        log = written(path / name, random_run(age, devices=2, trials=3, iterations=2))
        os.utime(log, (1000 - age, 1000 - age))
    return path


def test_the_run_of_a_directory_of_a_log_and_of_its_service(tmp_path: Path) -> None:
    log = written(tmp_path / "run", by_hand())
    (tmp_path / "run" / "serving").mkdir()
    for where in (log.parent, log, log.parent / "serving"):
        assert RunList(where).logs() == {"run": log}
    assert RunList(log).run("").look()["now"] == 12
    assert RunList(log).run("../run") is None


def test_the_runs_of_a_storage_beside_each_other(tmp_path: Path) -> None:
    runs = RunList(storage(tmp_path, "abcdef"))
    assert list(runs.logs()) == list("abcdef")
    glances = runs.glances()
    # Seen: a page of thousands of runs kept each of them, and its open log, for ever.
    assert sum(each.path.startswith(str(tmp_path)) for each in psutil.Process().open_files()) == KEPT
    assert [each["key"] for each in glances] == list("abcdef") and all(each["over"] for each in glances)
    assert glances[0]["run"] == "random 0" and glances[0]["trials"] == 3
    assert abs(time.time() - glances[0]["origin"] - glances[0]["seconds"] - glances[0]["silence"]) < 60
    first = runs.run("a")
    assert runs.run("a") is first
    # What has not changed is not read again; what has, is.
    logs = runs.logs()
    times = logs["e"].stat()
    logs["e"].write_bytes(bytes(times.st_size))
    os.utime(logs["e"], ns=(times.st_atime_ns, times.st_mtime_ns))
    with logs["f"].open("ab") as file:
        file.write(lines_of([added(5000, "x")]))
    assert [each["trials"] for each in runs.glances()] == [4, 3, 3, 3, 3, 3]


def test_runs_that_go_on_are_read_on(tmp_path: Path) -> None:
    """However many they are, they are not read anew whenever they grow. Seen: of more than four, each was."""
    long = {**added(1000, "x"), "name": "x" * 1_000_000}
    logs = [written(tmp_path / name, [begin(1000, 1), long]) for name in "abcdef"]
    runs, process = RunList(tmp_path), psutil.Process()

    def read_after(event: EventDict) -> int:
        """How many bytes are read after one more event came of each run."""
        for log in logs:
            with log.open("ab") as file:
                file.write(lines_of([event]))
        before = process.io_counters().read_chars
        assert len(runs.glances()) == 6
        return process.io_counters().read_chars - before

    runs.glances()
    assert read_after(added(1001, "y")) + read_after(added(1002, "z")) < 1_000_000
    kept = runs.run("a")
    assert runs.run("a") is kept
    assert read_after(over(1003)) < 1_000_000
    for name in "bcdef":
        runs.run(name).look()  # type: ignore[union-attr]
    assert runs.run("a") is not kept  # what has ended is let go of


def test_what_has_a_logs_name_and_is_no_file_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = RunList(storage(tmp_path, "ab"))
    for name in ("pipe", "folder", "nothing"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "fluid_events.jsonl")
    (tmp_path / "folder" / "fluid_events.jsonl").mkdir()
    (tmp_path / "nothing" / "fluid_events.jsonl").symlink_to("nowhere")
    assert list(runs.logs()) == list("ab")
    assert find_log(str(tmp_path), newest=True).parent.name == "a"
    assert find_log(str(tmp_path / "b"), newest=True).parent.name == "b"
    assert [each["key"] for each in runs.glances()] == list("ab")
    monkeypatch.setattr(run_list, "driver_state", Mock(side_effect=OSError("too many files")))
    with pytest.raises(OSError, match="too many files"):  # Seen: the run was left out.
        runs.glances()


def test_where_there_are_no_runs_a_line_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NoEventLogError, match=r"ray_results.*; give the directory of a run$"):
        find_log(None, newest=True)

"""A run's files in its storage are whole whenever the driver is killed. Needs no running Ray."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
from ray.train._internal.storage import StorageContext, _FilesystemSyncer

from fluidtune import FluidScheduler
from fluidtune.ray_compat import whole_files
from tests.ray_compat.storage import TrialStorage
from tests.salus.processes import at_most

HERE = pyarrow.fs.LocalFileSystem()


def stored(folder: Path, files: Any = HERE, **more: Any) -> Any:
    """A run's storage, whose syncer is ours. ``folder``: what the driver writes. ``more``: for `store_whole_files`."""
    storage = TrialStorage(folder)
    storage.syncer = _FilesystemSyncer(files)
    whole_files.store_whole_files(SimpleNamespace(_storage=storage), **more)  # type: ignore[arg-type]
    return storage


def written(folder: Path, content: str, files: int = 1, state: str | None = None) -> None:
    for number in range(files):
        trial = folder / f"trial_{number}"
        trial.mkdir(parents=True, exist_ok=True)
        (trial / "result.json").write_text(content)
    if state is not None:
        (folder / "experiment_state-1.json").write_text(state)


def brought(syncer: Any, folder: Path, to: str) -> None:
    syncer.sync_up(str(folder), to)
    syncer.wait()


#: Brings a run's files again and again, which all have the same letter, and the state that of the time before.
DRIVER = """
import sys
from pathlib import Path
from tests.ray_compat.test_whole_files import brought, stored, written
folder = Path(sys.argv[1])
syncer = stored(folder).syncer
print("begins", flush=True)
while True:
    for letter in "abcdefgh":
        written(folder / "here", letter * 200_000, 20, letter * 1000)
        brought(syncer, folder / "here", str(folder / "there"))
"""


def test_a_driver_that_is_killed_at_any_moment_leaves_whole_files(tmp_path: Path) -> None:
    # Seen: a run could not be restored, as `tuner.pkl` was empty.
    draw = random.Random(4)
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        ) as driver:
            assert driver.stdout is not None and driver.stdout.readline()
            time.sleep(draw.uniform(0.05, 0.5))
            driver.send_signal(signal.SIGKILL)
        found = [path.read_text() for path in (tmp_path / "there").glob("trial_*/result.json")]
        assert found and all(len(each) == 200_000 and len(set(each)) == 1 for each in found)
        for state in (tmp_path / "there").glob("experiment_state-*"):
            assert len(state.read_text()) == 1000
    (tmp_path / "there" / ".left.partial").write_text("half")
    whole_files.remove_partial(tmp_path / "there")
    assert not list((tmp_path / "there").rglob(".*"))


def test_the_state_comes_last_as_it_was_when_tune_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    copy, order = whole_files.copy_whole, []

    def copied(local: str, files: Any, path: str) -> None:
        # Meanwhile the driver goes on.
        written(here, "3 results", state="knows of 3")
        copy(local, files, path)
        order.append((there / "experiment_state-1.json").exists())

    monkeypatch.setattr(whole_files, "copy_whole", copied)
    syncer = stored(tmp_path).syncer
    written(here, "2 results", state="knows of 2")
    brought(syncer, here, str(there))
    assert order == [False]
    assert (there / "experiment_state-1.json").read_text() == "knows of 2"
    assert (there / "trial_0" / "result.json").read_text() == "3 results"


def test_a_state_is_not_stored_before_the_logs_it_knows_of(tmp_path: Path) -> None:
    """And who asked hears whether a state that Tune has written is stored."""
    here, there = tmp_path / "here", tmp_path / "there"
    state, heard = there / "experiment_state-1.json", list[Any]()
    syncer = stored(tmp_path, on_state=lambda: lambda done: heard.append(done and state.read_text())).syncer
    written(here, "1 result")
    brought(syncer, here, str(there))
    assert not heard, "there are files of trials only"
    written(here, "2 results", state="knows of 2")
    brought(syncer, here, str(there))
    written(here, "33 results", state="knows of 33")
    with at_most(resource.RLIMIT_FSIZE, 0), pytest.raises(OSError, match="File too large"):
        brought(syncer, here, str(there))
    assert state.read_text() == "knows of 2"
    written(here, "33 results", state="knows of 33")
    brought(syncer, here, str(there))
    assert heard == ["knows of 2", False, "knows of 33"]


def test_the_newest_state_has_the_searchers_and_comes_last_where_older_ones_are(tmp_path: Path) -> None:
    """Seen: after a restore, which brings all states, an older one was taken for the run's."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    for session in "231":
        (here / f"experiment_state-{session}.json").write_text(f'{{"run": {session}}}')
        (here / f"searcher-state-{session}.pkl").write_text(session)
    brought(stored(tmp_path).syncer, here, str(there))
    states = [json.loads((there / f"experiment_state-{session}.json").read_text()) for session in "123"]
    assert [sorted(each) for each in states] == [["run"], ["run"], ["fluidtune_beside", "run"]]
    assert not [each for each in here.iterdir() if each.name.startswith(".")]


def test_what_has_not_changed_is_not_copied_again(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    syncer = stored(tmp_path).syncer
    written(here, "1", files=3, state="1")
    brought(syncer, here, str(there))
    before = {path: path.stat().st_ino for path in there.rglob("*.json")}
    (here / "trial_1" / "result.json").write_text("12")
    brought(syncer, here, str(there))
    changed = there / "trial_1" / "result.json"
    assert [path for path, file in before.items() if path.stat().st_ino != file] == [changed]
    assert changed.read_text() == "12"


def test_a_syncer_that_is_sent_or_saved_has_no_file_in_it(tmp_path: Path) -> None:
    """Tune's state has it, and would grow with each save. Nor has it who is to hear of a state."""
    syncer = stored(tmp_path, on_state=lambda: lambda done: None).syncer
    before = len(pickle.dumps(syncer))
    written(tmp_path / "here", "1", state="x" * 100_000)
    brought(syncer, tmp_path / "here", str(tmp_path / "there"))
    assert len(pickle.dumps(syncer)) == before
    assert syncer._current_cmd[1]["state"] == {}, "the driver need not keep it either"


@pytest.mark.parametrize("kind", ["a part of this machine's", "another"])
def test_other_file_systems_get_the_same_files(kind: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (tmp_path / "there").mkdir()
    other = kind == "another"
    files = pyarrow.fs._MockFileSystem() if other else pyarrow.fs.SubTreeFileSystem(str(tmp_path / "there"), HERE)
    assert whole_files.is_here(files) is not other
    written(here, "1", files=2, state="1")
    brought(stored(tmp_path, files).syncer, here, "run")
    found = files.get_file_info(pyarrow.fs.FileSelector("run", recursive=True))
    names = {os.path.relpath(each.path, "run"): each.size for each in found if each.is_file}
    assert names == {"trial_0/result.json": 1, "trial_1/result.json": 1, "experiment_state-1.json": 1}


def test_two_experiments_of_one_name_that_begin_in_one_second_share_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: two drivers of one cluster had each other's trials in their storages."""
    monkeypatch.setattr("ray.tune.utils.date_str", lambda: "2026-11-29_10-00-00")
    monkeypatch.setattr("ray.train._internal.storage._get_ray_train_session_dir", lambda: str(tmp_path))
    FluidScheduler()
    runs = [StorageContext(str(tmp_path / name), "fluid") for name in "ab"]
    folders = {run.experiment_driver_staging_path for run in runs}
    assert len(folders) == 2 and all("/2026-11-29_10-00-00_" in folder for folder in folders)

"""A job's event log and report come into the experiment's storage, whatever filesystem that is."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
from ray import tune

from fluidtune import FluidExecutor
from fluidtune.report import EVENT_LOG_NAME
from fluidtune.tune.experiment_folder import ExperimentFolder
from tests.tune.running import fit
from tests.tune.test_result_logs import Away
from tests.tune.trainables import score, without_checkpoints


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of an experiment in a filesystem that is handed in. It is in the folder "root", and the driver elsewhere."""
    (tmp_path / "root" / "bucket" / "run").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return SimpleNamespace(
        storage_filesystem=pyarrow.fs.SubTreeFileSystem(str(tmp_path / "root"), pyarrow.fs.LocalFileSystem()),
        experiment_fs_path="bucket/run",
        experiment_driver_staging_path=str(tmp_path / "staging"),
    )


def begun(storage: Any, restored: bool) -> ExperimentFolder:
    folder = ExperimentFolder(storage, restored)
    folder.begin()
    return folder


def test_what_is_written_after_tunes_last_upload_is_uploaded(storage: Any, tmp_path: Path) -> None:
    folder = begun(storage, restored=True)
    assert folder.path == tmp_path / "staging"
    for name in (EVENT_LOG_NAME, "summary.json", "timeline.png", "of-tune.json"):
        (folder.path / name).write_text(name)
    folder.close()
    stored = {path.name: path.read_text() for path in (tmp_path / "root" / "bucket" / "run").iterdir()}
    assert stored == {name: name for name in (EVENT_LOG_NAME, "summary.json", "timeline.png")}
    assert not list((tmp_path / "here").iterdir())


def test_a_new_driver_goes_on_with_the_stored_log_and_the_same_one_with_its_own(storage: Any, tmp_path: Path) -> None:
    (tmp_path / "root" / "bucket" / "run" / EVENT_LOG_NAME).write_text("of the former driver\n")
    own = begun(storage, restored=True).path / EVENT_LOG_NAME
    assert own.read_text() == "of the former driver\n"
    own.write_text("longer than what is stored\n")
    again = begun(storage, restored=True)
    assert (again.path / EVENT_LOG_NAME).read_text() == "longer than what is stored\n"


def test_a_storage_that_is_away_ends_no_job(storage: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Seen: a job ended where a filesystem of fsspec raised something else than `OSError`."""
    storage.storage_filesystem = Away()
    folder = begun(storage, restored=True)
    (folder.path / "summary.json").write_text("{}")
    folder.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all("bucket/run" in line and "could not resolve host" in line for line in told)


@pytest.mark.parametrize("local", [False, True])
def test_the_log_of_a_former_run_of_that_name_is_kept_beside_the_new_one(
    storage: Any, tmp_path: Path, local: bool
) -> None:
    # Seen: a second run of one name went on with the log of the first, and its report added both up.
    run = tmp_path / "root" / "bucket" / "run"
    if local:
        storage.storage_filesystem, storage.experiment_fs_path = pyarrow.fs.LocalFileSystem(), str(run)
    # Seen: the new run's page showed the former one's service. Seen: and a service of another name went on.
    for service in ("serving", "serving-digits"):
        (run / service).mkdir()
        (run / service / EVENT_LOG_NAME).write_text(f"of {service}")
    begun(storage, restored=True).close()
    ExperimentFolder(storage, restored=False).close()  # Seen: a run that was refused took the former one's log away
    assert (run / "serving" / EVENT_LOG_NAME).exists()
    for text in ("first", "second"):
        folder = begun(storage, restored=False)
        assert not (folder.path / EVENT_LOG_NAME).exists()
        (folder.path / EVENT_LOG_NAME).write_text(text)
        folder.close()
        time.sleep(0.01)
    begun(storage, restored=False).close()
    logs = [path for path in run.rglob("*") if path.is_file()]
    assert local != (tmp_path / "staging").exists()
    assert sorted(path.read_text() for path in logs) == ["first", "of serving", "of serving-digits", "second"]
    assert all(path.name.startswith("fluid_events-") and path.suffix == ".jsonl" for path in logs)


@pytest.mark.ray
@pytest.mark.newest
@pytest.mark.usefixtures("ray2")
def test_a_log_that_cannot_be_written_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a full disk. Seen: the first event that could not be written ended the job."""
    (tmp_path / "fluid").mkdir()
    (tmp_path / "fluid" / EVENT_LOG_NAME).symlink_to("/dev/full")
    space = {"x": tune.grid_search([1, 2, 3]), "n": 1}
    results = fit("fluid", without_checkpoints, space, tmp_path, executor=FluidExecutor(devices="emulated:2"))
    assert [one.metrics["score"] for one in results] == [score(x, 1) for x in (1, 2, 3)]
    said = [each.getMessage() for each in caplog.records if "event log lacks events" in each.getMessage()]
    assert len(said) == 1 and "No space left" in said[0]

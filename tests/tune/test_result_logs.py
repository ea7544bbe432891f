"""Under a new driver a trial's log files hold what Tune knows to be reported, whatever the last driver left."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
from fsspec.implementations.local import LocalFileSystem

from fluidtune.tune import result_logs


def log(iterations: int) -> dict[str, str]:
    numbers = range(1, iterations + 1)
    return {
        "result.json": "".join(json.dumps({"training_iteration": i, "note": "a,b"}) + "\n" for i in numbers),
        "progress.csv": "training_iteration,note\n" + "".join(f'{i},"a,b"\n' for i in numbers),
    }


def write(folder: Path, iterations: int, torn: str = "") -> None:
    folder.mkdir()
    for name, text in log(iterations).items():
        (folder / name).write_text(text + torn)


@pytest.fixture
def trial(tmp_path: Path) -> SimpleNamespace:
    storage = SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(),
        trial_fs_path=str(tmp_path / "storage"),
    )
    return SimpleNamespace(local_path=str(tmp_path / "local"), storage=storage)


def logged(folder: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in Path(folder).glob("*")}


@pytest.mark.parametrize("stored", [None, 5, 8])
def test_a_driver_on_the_same_ray_forgets_what_tune_never_saved(trial: SimpleNamespace, stored: int | None) -> None:
    # Tune's last save knew nothing of the trial, but the driver that died had logged eight iterations.
    write(Path(trial.local_path), 8)
    if stored is not None:
        write(Path(trial.storage.trial_fs_path), stored)
    result_logs.take_over(trial, 0)
    assert logged(trial.local_path) == {}


@pytest.mark.parametrize("local, stored", [(8, 6), (8, 3), (8, None), (2, 6), (None, 6)])
def test_the_log_goes_up_to_what_tune_saved(trial: SimpleNamespace, local: int | None, stored: int | None) -> None:
    if local is not None:
        write(Path(trial.local_path), local, torn='{"training_iter')
    if stored is not None:
        write(Path(trial.storage.trial_fs_path), stored)
    result_logs.take_over(trial, 5)
    assert logged(trial.local_path) == logged(trial.storage.trial_fs_path) == log(5)


def test_the_log_of_a_trial_with_numbers_of_its_own_and_a_retry_keeps_every_result(trial: SimpleNamespace) -> None:
    numbers = [100, 200, 300, 100, 200, 300, 400]
    text = "".join(json.dumps({"training_iteration": number}) + "\n" for number in numbers)
    Path(trial.local_path).mkdir()
    Path(trial.local_path, "result.json").write_text(text)
    result_logs.take_over(trial, 6)
    kept = Path(trial.local_path, "result.json").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in kept] == numbers[:6]


@pytest.mark.parametrize("torn", ["", '6,"one', '6,"one\r\n', "6,on"])
def test_values_with_line_breaks_and_quotes_are_kept_whole(trial: SimpleNamespace, torn: str) -> None:
    """Seen: `Tuner.restore` cut `progress.csv` in the middle of a row where a value has a line break."""
    values = ["one\ntwo\r\n\nthree", 'a "b"\n"', "x\x0b\x0c\x85\u2028y", '"', "plain", "later\n" * 3, "last"]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["training_iteration", "report"])
    writer.writeheader()
    lengths = []
    for number, value in enumerate(values, 1):
        writer.writerow({"training_iteration": number, "report": value})
        lengths.append(len(text.getvalue()))
    Path(trial.local_path).mkdir()
    file = Path(trial.local_path, "progress.csv")
    for reported in (1, 3, 5, 6):
        file.write_bytes(text.getvalue().encode())
        result_logs.take_over(trial, reported)
        assert file.read_bytes().decode() == text.getvalue()[: lengths[reported - 1]]
        Path(trial.storage.trial_fs_path, "progress.csv").unlink()
    file.write_bytes((text.getvalue()[: lengths[4]] + torn).encode())
    result_logs.take_over(trial, 6)
    assert file.read_bytes().decode() == text.getvalue()[: lengths[4]]


class Away:
    """A storage that cannot be reached. The filesystems of fsspec raise errors of their own then, as gcsfs does."""

    type_name = "py::fsspec+gcs"

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("could not resolve host")


def test_a_trial_starts_while_the_storage_is_away(trial: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Seen: a job whose storage was away for a moment ended when a paused trial went on."""
    trial.trial_id = "t1"
    write(Path(trial.local_path), 8)
    trial.storage.storage_filesystem = Away()
    result_logs.upload(trial)
    assert logged(trial.local_path) == log(8)
    result_logs.take_over(trial, 5)
    assert logged(trial.local_path) == log(5)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4 and all("could not resolve host" in line and "t1" in line for line in told)


def test_a_log_that_could_not_be_read_is_not_written_over(trial: SimpleNamespace) -> None:
    """The driver's own folder has less than the storage, which can be written again when the log was cut."""
    write(Path(trial.local_path), 2)
    write(Path(trial.storage.trial_fs_path), 6)
    trial.trial_id = "t1"

    class Unreadable(LocalFileSystem):
        def open(self, path: str, mode: str = "rb", **rest: Any) -> Any:
            if mode == "rb":
                raise OSError("connection reset")
            return super().open(path, mode, **rest)

    trial.storage.storage_filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(Unreadable()))
    result_logs.take_over(trial, 5)
    assert logged(trial.local_path) == log(2)
    assert logged(trial.storage.trial_fs_path) == log(6)

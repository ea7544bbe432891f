"""Where a job's event log and report are written, and how they come into the experiment's storage.

One driver at a time has the folder (`driver_lock`).

On a local filesystem they are written where they belong. For any other storage they are written into the folder of the
driver that Tune uploads. Tune uploads it for the last time before the job ends, so the job does it once more.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.fs

from fluidtune.driver_lock import hold
from fluidtune.ray_compat.whole_files import remove_partial, write_whole
from fluidtune.report.events import EVENT_LOG_NAME, service_of
from fluidtune.report.pictures import REPORT_FILES

logger = logging.getLogger(__name__)

_HERE = pyarrow.fs.LocalFileSystem()
#: What FluidTune writes into an experiment's folder.
_FILES = (EVENT_LOG_NAME, *REPORT_FILES)


class ExperimentFolder:
    """The folder of one experiment. ``storage``: its `StorageContext`. ``path``: where the driver writes.

    ``restored``: the run goes on from an earlier driver's, and so does its event log. The log of another run of that
    name is kept beside the new one from `begin` on, with the time of its end in its name, as are its services'.

    Raises:
        FluidTuneError: another driver has the folder. A restored run waits for no end: Tune has read its state by now.
    """

    def __init__(self, storage: Any, restored: bool) -> None:
        self._restored = restored
        self._files = storage.storage_filesystem
        self._remote = str(storage.experiment_fs_path)
        # A filesystem within another one has type "subtree", also if that is a local one: its paths begin elsewhere.
        self.is_local = self._files.type_name == "local"
        self.path = Path(self._remote if self.is_local else storage.experiment_driver_staging_path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = hold(self.path, waits=not restored)

    def begin(self) -> None:
        """Make the folder ready for this driver's event log, once nothing can refuse the job."""
        if not self._restored:
            for folder, files in {str(self.path): _HERE, self._remote: self._files}.items():
                _set_aside(files, folder)
        elif self.is_local:
            remove_partial(self.path)
        elif not (log := self.path / EVENT_LOG_NAME).exists():
            stored = f"{self._remote}/{EVENT_LOG_NAME}"
            try:
                with suppress(FileNotFoundError), self._files.open_input_stream(stored) as file:  # a new experiment
                    write_whole(file.readall(), _HERE, str(log))
            except Exception as error:  # the filesystems of fsspec raise errors of their own kinds
                logger.warning("FluidTune: %s could not be read, so a new one begins: %s", stored, error)

    def close(self) -> None:
        """The files are complete: bring them into the experiment's storage. If that fails, a warning says so."""
        self.lock.close()
        if self.is_local:
            return
        for name in _FILES:
            local = self.path / name
            if local.exists():
                try:
                    write_whole(local.read_bytes(), self._files, f"{self._remote}/{name}")
                except Exception as error:
                    logger.warning("FluidTune: %s was not uploaded to %s: %s", local, self._remote, error)


def _set_aside(files: Any, folder: str) -> None:
    """Keep the logs of a former run and of its services, if there are any, under other names."""
    try:
        inside = files.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True))
        services = [f"/{one.base_name}" for one in inside if service_of(one.base_name) is not None]
        for found in files.get_file_info([f"{folder}{one}/{EVENT_LOG_NAME}" for one in ("", *services)]):
            if found.type == pyarrow.fs.FileType.File:
                ended = found.mtime.astimezone().strftime("%Y-%m-%d_%H-%M-%S.%f")
                files.move(found.path, f"{found.path.removesuffix('.jsonl')}-{ended}.jsonl")
    except Exception as error:  # the filesystems of fsspec raise errors of their own kinds
        logger.warning("FluidTune: logs in %s of a former run could not be kept under other names: %s", folder, error)

"""What a job says of itself to its Ray cluster."""

from __future__ import annotations

import getpass
import os

from ray._private.worker import global_worker


def user_of_job(named: str | None = None) -> str:
    """Whose this driver's job is: ``named``, else what the job's metadata says, else the Unix user of the driver."""
    try:
        return named or job_metadata().get("user") or getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        return f"uid-{os.geteuid()}"


def job_metadata() -> dict[str, str]:
    """The metadata of the Ray job of this driver; empty without any, and in a client of Ray Client.

    It is what the script gives (``ray.init(job_config=JobConfig(metadata={...}))``) or the submission of the job (``ray
    job submit --metadata-json``). Ray's public functions tell it only where the cluster has a dashboard.
    """
    core = getattr(global_worker, "core_worker", None)
    return {} if core is None else dict(core.get_job_config().metadata)

"""Which versions of Ray are accepted. Needs no running Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

import fluidtune
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat import versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.44.0", "2.44.1", "2.50.0", "2.60.0", "2.60.3"])
def test_versions_in_the_range_are_accepted(version: str) -> None:
    versions.check_ray_version(version)


@pytest.mark.parametrize("version", ["2.30.0", "2.43.9", "2.61.0", "2.99.0", "3.0.0"])
def test_versions_outside_the_range_are_refused_in_one_clear_line(version: str) -> None:
    with pytest.raises(FluidTuneError) as raised:
        versions.check_ray_version(version)
    message = str(raised.value)
    assert version in message and "pip install" in message and "\n" not in message


def test_a_job_on_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.__version__", "2.30.0")
    with pytest.raises(FluidTuneError, match=r"Ray 2\.30\.0 is outside the versions"):
        fluidtune.FluidScheduler()


def test_pyproject_claims_the_versions_that_are_checked() -> None:
    minor = int(versions.NEWEST_RAY.split(".")[1])
    assert f'"ray[tune]>={versions.OLDEST_RAY},<2.{minor + 1}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "file, version", [("constraints-oldest.txt", versions.OLDEST_RAY), ("constraints.txt", versions.NEWEST_RAY)]
)
def test_the_constraints_pin_the_ends_of_the_range(file: str, version: str) -> None:
    assert f"\nray=={version}." in "\n" + (ROOT / file).read_text()

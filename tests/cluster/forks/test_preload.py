"""What a fork server imports, and how it knows that an import has started CUDA."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from fluidtune.cluster.forks.preload import listed_modules
from fluidtune.device_kinds import cuda_started, loaded_library


def module(name: str, file: str | None) -> ModuleType:
    made = ModuleType(name)
    made.__file__ = file
    return made


def test_only_modules_of_listed_packages_are_imported_where_those_are_installed(tmp_path):
    site = next(each for each in sys.path if each.endswith("site-packages"))
    named = {
        "numpy": f"{site}/numpy/__init__.py",
        "numpy.part": f"{site}/numpy/part.py",
        "pandas": str(tmp_path / "pandas.py"),
        "json": os.__file__,
        "execnet": f"{site}/execnet/__init__.py",
    }
    modules = {name: module(name, file) for name, file in named.items()}
    modules["alias"] = modules["numpy"]
    assert listed_modules(modules) == ["numpy", "numpy.part"]


@pytest.mark.parametrize(("answer", "started"), [(3, False), (0, True), (201, True)])
def test_an_import_may_load_cudas_driver_but_not_start_it(answer, started):
    # Seen on an H200: torch's import loads the driver, and no machine with a GPU had forks.
    assert cuda_started(SimpleNamespace(cuCtxGetCurrent=lambda context: answer)) is started


def test_a_driver_that_is_not_loaded_is_not_loaded_to_be_asked():
    assert loaded_library("libc.so.6") is not None
    assert loaded_library("libanl.so.1") is None and not cuda_started(None)

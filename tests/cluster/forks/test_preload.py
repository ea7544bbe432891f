"""What a fork server imports, and how it knows that CUDA was opened: played files of /proc."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fluidtune.cluster.forks.preload import cuda_opened, listed_modules


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


def played(tmp_path: Path, maps: str, *files: str) -> str:
    (tmp_path / "fd").mkdir()
    for number, target in enumerate(files):
        (tmp_path / "fd" / str(number)).symlink_to(target)
    (tmp_path / "maps").write_text(maps)
    return str(tmp_path)


LINE = "7f00-7f01 r-xp 00000000 08:01 123   {}\n"


@pytest.mark.parametrize(
    ("maps", "files", "said"),
    [
        (LINE.format("/usr/lib/libc.so.6"), ["/dev/null", "socket:[1]"], None),
        (LINE.format("/usr/lib/x86_64-linux-gnu/libcuda.so.1"), [], "libcuda"),
        (LINE.format("/site-packages/torch/lib/libcudart.so.12"), [], None),
        ("", ["/dev/null", "/dev/nvidia0"], "/dev/nvidia0"),
        ("", ["/dev/nvidiactl"], "/dev/nvidiactl"),
    ],
)
def test_cuda_that_was_opened_is_seen(tmp_path, maps, files, said):
    found = cuda_opened(played(tmp_path, maps, *files))
    assert (found is None) if said is None else said in found

"""What a fork server imports, and how it knows that CUDA was opened: played files of /proc."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fluidtune.cluster.forks.preload import Notes, cuda_opened, fill, installed_modules
from fluidtune.cluster.forks.shelf import NeedsPlainProcess, Shelf
from fluidtune.ray_compat import random_ids


def module(name: str, file: str | None) -> ModuleType:
    made = ModuleType(name)
    made.__file__ = file
    return made


def test_only_modules_of_installed_packages_are_imported(tmp_path):
    site = next(each for each in sys.path if each.endswith("site-packages"))
    named = {
        "installed": f"{site}/installed/__init__.py",
        "installed.part": f"{site}/installed/part.py",
        "script": str(tmp_path / "script.py"),
        "json": os.__file__,
        "execnet": f"{site}/execnet/__init__.py",
    }
    modules = {name: module(name, file) for name, file in named.items()}
    modules["alias"] = modules["installed"]
    assert installed_modules(modules) == ["installed", "installed.part"]


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


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(random_ids, "draw", lambda: os.urandom(8))  # here Ray has run, in which it draws
    before, finders = set(sys.modules), list(sys.meta_path)
    yield folder
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        del sys.modules[name]


def shelf_of(*names: str) -> Shelf:
    before, notes, environment = set(sys.modules), Notes(), dict(os.environ)
    fill(notes, names, {}, False)
    shelf = Shelf(notes.entries({k: v for k, v in sys.modules.items() if k not in before}), environment)
    shelf.in_server = False
    sys.meta_path.insert(0, shelf)
    return shelf


def test_a_compiled_package_is_not_imported_twice(site, monkeypatch):
    (site / "fast.py").write_text("import os\nVALUE = os.environ.get('FAST_VALUE')\n")
    shelf = shelf_of("fast")
    shelf._compiled.add("fast")
    monkeypatch.setenv("FAST_VALUE", "2")
    with pytest.raises(NeedsPlainProcess, match="FAST_VALUE was not set when fast was imported"):
        import fast
    monkeypatch.delenv("FAST_VALUE")
    import fast

    assert fast.VALUE is None


def test_a_copy_of_the_whole_environment_counts_as_no_reading(site, monkeypatch):
    (site / "copies.py").write_text(
        "import os\nCOPY = dict(os.environ), os.environ.copy()\nHOME = os.environ['HOME']\n"
    )
    shelf_of("copies")
    monkeypatch.setenv("SOMETHING_ELSE", "2")
    monkeypatch.setenv("PATH", "/other")
    import copies

    assert copies.COPY[0]["PATH"] != "/other"


def test_a_submodule_is_no_attribute_of_its_package_before_it_is_imported(site):
    package = site / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("from pack import near\n")
    (package / "near.py").write_text("")
    (package / "far.py").write_text("import pack.near\nVALUE = 1\n")
    shelf_of("pack", "pack.far")
    import pack

    assert hasattr(pack, "near") and not hasattr(pack, "far") and "pack.far" not in sys.modules
    from pack import far

    assert far.VALUE == 1 and pack.far is far


def test_a_module_that_a_package_makes_without_an_import_comes_with_it(site):
    (site / "maker.py").write_text(
        "import sys, types\nsys.modules['maker.made'] = made = types.ModuleType('maker.made')\n"
    )
    shelf_of("maker")
    assert "maker.made" not in sys.modules
    import maker

    assert sys.modules["maker.made"] is maker.made


def test_modules_that_import_each_other_are_shown_together(site):
    (site / "one.py").write_text("import two\n")
    (site / "two.py").write_text("import one\n")
    shelf_of("one")
    import two  # noqa: F401

    assert "one" in sys.modules


def test_a_variable_of_compiled_code_counts_where_the_users_code_sets_it(site, monkeypatch):
    (site / "fast.py").write_text("VALUE = 1\n")
    (site / "fast_part.py").write_text("VALUE = 1\n")
    shelf = shelf_of("fast", "fast_part")
    for name in ("fast", "fast_part"):
        shelf._entries[name].compiled = True
    monkeypatch.setenv("OMP_SOMETHING", "2")
    with pytest.raises(NeedsPlainProcess, match="OMP_SOMETHING was not set when fast was loaded"):
        shelf._compiled.add("fast"), importlib.import_module("fast")
    shelf.set_by_package("OMP_SOMETHING")
    assert importlib.import_module("fast").VALUE == 1

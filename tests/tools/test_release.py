"""What `make release-check` looks for, without building anything."""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

import pytest

from tools.house_rules import PACKAGES
from tools.release import PAGES, ROOT, cut, misplaced, tracked

#: What users have who install fluidtune alone: the packages of pyproject.toml's dependencies, as they are imported, and
#: the last two, which `ray[tune]` asks for.
INSTALLED = {"ray", "torch", "numpy", "matplotlib", "click", "rich", "psutil", "pynvml", "highspy", "tomli"}
INSTALLED |= {"packaging", "pyarrow"}
#: Rooms that need an extra, and say so.
EXTRAS = tuple(f"fluidtune/{room}" for room in ("client", "serving", "testing", "view"))


def imported(tree: ast.AST) -> set[str]:
    """The packages that a module imports as soon as it is imported."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ClassDef | ast.With | ast.Try):
            found |= imported(node)
    return found


def test_nothing_is_imported_that_users_do_not_have():
    found = {
        (name, package)
        for name in tracked(*PACKAGES)
        if name.endswith(".py") and not name.startswith(EXTRAS)
        for package in imported(ast.parse((ROOT / name).read_text()))
        if package not in {*INSTALLED, *PACKAGES, *sys.stdlib_module_names}
    }
    assert not found


def wheel(path: Path, without: str = "", extra: str = "") -> Path:
    pages = [f"fluidtune/docs/{page}.md" for page in PAGES]
    names = [*tracked(*PACKAGES), *pages, "fluidtune-0.dist-info/METADATA", extra]
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            if name and name != without and not (ROOT / name).is_symlink():
                file.writestr(name, "")
    return path


def test_a_wheel_has_what_git_tracks_and_the_pages_and_nothing_else(tmp_path: Path):
    assert misplaced(wheel(tmp_path / "good")) == []
    for lost in ("fluidtune/view/static/view.js", "fluidtune/py.typed", "fluidtune/docs/questions.md"):
        assert misplaced(wheel(tmp_path / "lacks", without=lost)) == [f"lacks {lost}"]
    assert misplaced(wheel(tmp_path / "more", extra="tests/test_cli.py")) == ["should not have tests/test_cli.py"]


def test_a_release_is_cut_from_the_changelog(tmp_path: Path):
    (tmp_path / "fluidtune").mkdir()
    log, package = tmp_path / "CHANGELOG.md", tmp_path / "fluidtune/__init__.py"
    log.write_text("# Changelog\n\n## 0.2.0 - unreleased\n\n- new\n\n## 0.1.0 - 2026-01-01\n")
    package.write_text('"""x"""\n__version__ = "0.1.0"\n')
    for version, said in (("0.1.0", "not above"), ("2", "is no version")):
        with pytest.raises(SystemExit, match=said):
            cut(version, tmp_path, "2026-11-29")
    cut("0.3.0", tmp_path, "2026-11-29")
    assert "\n## 0.3.0 - 2026-11-29\n\n- new\n" in log.read_text() and '__version__ = "0.3.0"' in package.read_text()
    with pytest.raises(SystemExit, match="nothing to release"):
        cut("0.4.0", tmp_path, "2026-11-29")

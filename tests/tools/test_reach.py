"""What `tools.reach` calls unreached, and that the project ships hardly any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.house_rules import PACKAGES
from tools.reach import ENTRY_POINTS, ROOT, Walk, modules_of, unreached

CLI = "fluidtune/cli.py"


def left(root: Path, files: dict[str, str], entry: str = "fluidtune.cli:main") -> set[str]:
    """What is unreached from the entry point in a tree of these files: "module" or "module:name"."""
    for package in PACKAGES:
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    modules = modules_of(root)
    walk = Walk(modules)
    walk.begin(entry)
    outside = {name for name in modules if name not in {Path(file).with_suffix("").as_posix() for file in files}}
    found = {f"{each.module}:{each.name}".rstrip(":") for each in unreached(modules, walk, root)}
    return found - (outside & set(PACKAGES))


@pytest.mark.parametrize(
    ("main", "unused"),
    [
        ("pass", {"fluidtune.other"}),
        ("import fluidtune.other", {"fluidtune.other:used", "fluidtune.other:Thing"}),
        ("from fluidtune.other import used; used()", {"fluidtune.other:Thing"}),
        ("import fluidtune.other as o; o.used()", {"fluidtune.other:Thing"}),
        ("from fluidtune import other; hand_on(other); thing().used()", {"fluidtune.other:Thing"}),
        ("from fluidtune.other import Thing; Thing()", {"fluidtune.other:used", "fluidtune.other:Thing.work"}),
        ("from fluidtune.other import Thing; getattr(Thing(), 'work')()", {"fluidtune.other:used"}),
        ("command = ['-m', 'fluidtune.other']", {"fluidtune.other:used"}),
        ("place = 'fluidtune.other:used'", set()),
    ],
)
def test_what_a_command_uses_is_reached(main: str, unused: set[str], tmp_path: Path) -> None:
    other = """
def used():
    pass

class Thing:
    def __init__(self):
        pass

    def work(self):
        pass

if __name__ == "__main__":
    Thing().work()
"""
    files = {CLI: f"def main():\n    {main}\n", "fluidtune/other.py": other}
    assert left(tmp_path, files) == unused


def test_the_pages_name_the_entry_points() -> None:
    for entry, page in ENTRY_POINTS.items():
        module, _, name = entry.partition(":")
        text = (ROOT / page).read_text()
        spoken = {module, module.removeprefix("fluidtune.elastic."), module.partition(".")[0]}
        assert any(each in text for each in spoken) and (name in ("", "*", "main") or name in text), entry

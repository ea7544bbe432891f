"""That `tools.size` refuses more lines, lowers its book where there are fewer, and lint asks it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.house_rules import PACKAGES
from tools.size import BOOK, ROOT, turn


@pytest.mark.parametrize(
    ("book", "errors", "after"),
    [((10, 5), 0, (4, 2)), ((4, 2), 0, (4, 2)), ((3, 2), 1, (3, 2)), ((3, 1), 2, (3, 1)), ((3, 9), 1, (3, 2))],
)
def test_turn(tmp_path: Path, book: tuple[int, int], errors: int, after: tuple[int, int]) -> None:
    (tmp_path / PACKAGES[0] / "room").mkdir(parents=True)
    (tmp_path / PACKAGES[0] / "room" / "a.py").write_text("1\n\n3\n4")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("1\n2\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / BOOK).write_text(json.dumps(dict(zip(("shipped", "tests"), book, strict=True))))
    assert len(turn(tmp_path)) == errors
    assert tuple(json.loads((tmp_path / BOOK).read_text()).values()) == after


def test_lint_asks() -> None:
    assert "-m tools.size" in (ROOT / "Makefile").read_text().partition("lint:")[2].partition("\n\n")[0]

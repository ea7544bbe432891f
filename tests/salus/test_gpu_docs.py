"""The table of docs/gpu.md: each row names a test that is there, and says whether a GPU has shown it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.common import ROOT

PAGE = ROOT / "docs" / "gpu.md"
#: A file that a row names without its folder.
SHORT = re.compile(r"`(test_\w+\.py)")


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the first table, without its head."""
    lines = text.split("| subject |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def with_folders(text: str) -> str:
    def path_of(found: re.Match[str]) -> str:
        (path,) = ROOT.joinpath("tests").rglob(found[1])
        return f"`{path.relative_to(ROOT)}"

    return SHORT.sub(path_of, text)


def selects(place: Path, term: str) -> bool:
    """Whether each word of a -k term is in the file, or in one that it imports: a name, or the id of a parameter."""
    text = place.read_text()
    for module in re.findall(r"^from (tests[\w.]+) import", text, re.MULTILINE):
        text += ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()
    return all(word in text for word in term.strip('"').split(" or "))


@pytest.mark.parametrize("row", rows(PAGE.read_text()), ids=lambda row: row[0][:40])
def test_a_row_names_tests_that_are_there(row: list[str]) -> None:
    assert len(row) == 4
    assert row[3] == "no" or row[3].startswith("yes"), "whether a GPU has shown it"
    spans = re.findall(r"`([^`]+)`", with_folders(row[2]))
    assert spans and all(span.startswith("tests/") for span in spans), row[2]
    for span in spans:
        path, _, term = span.partition(" -k ")
        assert selects(ROOT / path, term), span


def test_a_term_that_selects_nothing_is_found() -> None:
    assert not selects(ROOT / "tests/salus/test_memory.py", '"framework or no_such_test"')

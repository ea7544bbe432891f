"""`fluidtune docs`: the list of pages, one page, and a search."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fluidtune.cli import cli
from fluidtune.commands import docs
from fluidtune.errors import FluidTuneError
from tests.tools.test_pages import DOCS, page


@pytest.fixture
def pages(tmp_path):
    (tmp_path / "how-to").mkdir()
    toctree = ":caption: First\n:maxdepth: 1\n\nhow-to/a\nleft-out\n"
    (tmp_path / "index.md").write_text(f"# Us\n\n```{{toctree}}\n{toctree}```\n")
    page = ["# To cook\n\n[Water](../b.md#x), [oil](c.md).", "## Eggs\n\n```\n# hot water\n```", "## Salt\n\nEggs.\n"]
    (tmp_path / "how-to" / "a.md").write_text("\n\n".join(page))
    return tmp_path


def test_the_list_has_the_pages_of_the_package_under_their_captions(pages):
    assert docs.told((), pages).splitlines()[1:] == ["", "## First", "", "- `how-to/a`: To cook"]


@pytest.mark.parametrize("name", ["a", "how-to/a", "how-to/a.md", "docs/how-to/a.md", "docs/how-to/a.md#eggs"])
def test_a_page_has_the_name_that_messages_give_it(pages, name):
    assert docs.told((name,), pages).startswith("# To cook\n\n[Water](b#x), [oil](how-to/c).")


def test_a_search_finds_the_sections_with_all_words_and_the_best_heading_first(pages):
    lines = docs.told(("EGGS",), pages).splitlines()
    assert lines == ["- `fluidtune docs how-to/a`: Eggs", "- `fluidtune docs how-to/a`: Salt"]
    assert docs.told(("hot", "water"), pages) == "- `fluidtune docs how-to/a`: Eggs"


@pytest.mark.parametrize("word", ["nowhere", "../secret", "", 256 * "x", "a/" * 3000, "a\0b"])
def test_what_no_page_has_is_refused_in_a_line(pages, word, tmp_path):
    (tmp_path.parent / "secret.md").touch()
    if word:
        with pytest.raises(FluidTuneError, match="no page has"):
            docs.told((word,), pages)
    else:
        assert "how-to/a" in docs.told((word,), pages)


def test_the_command_shows_a_page_of_this_project_and_lists_all_that_the_index_has():
    done = CliRunner().invoke(cli, ["docs", "start"])
    assert done.exit_code == 0 and "Five minutes" in done.output and (DOCS / "start.md").exists()
    listed = docs.told(())
    assert page("index.md").count(":caption:") == listed.count("\n## ")

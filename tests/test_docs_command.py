"""`fluidtune docs`: the list of pages, one page, and a search."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fluidtune.cli import cli
from fluidtune.commands import docs
from fluidtune.errors import FluidTuneError
from tests.tools.test_pages import page


@pytest.fixture
def pages(tmp_path):
    (tmp_path / "how-to").mkdir()
    toctree = ":caption: First\n:maxdepth: 1\n\nhow-to/a\nleft-out\n"
    (tmp_path / "index.md").write_text(f"# Us\n\n```{{toctree}}\n{toctree}```\n")
    page = ["# To cook\n\n[Water](../b.md#x), [oil](c.md).", "## Eggs\n\n```\n# hot water\n```", "## Salt\n\nEggs.\n"]
    (tmp_path / "z.md").write_text("# All\n\n## Salt\n\nEggs, eggs, eggs.\n")
    page[0] += " {download}`pan\n<../d>` ![egg](e.png)"
    (tmp_path / "how-to" / "a.md").write_text("\n\n".join(page))
    return tmp_path


def test_the_list_has_the_pages_of_the_package_under_their_captions(pages):
    assert docs.told((), pages).splitlines()[1:] == ["", "## First", "", "- `how-to/a`: To cook"]


@pytest.mark.parametrize("name", ["a", "how-to/a", "how-to/a.md", "docs/how-to/a.md", "docs/how-to/a.md#eggs"])
def test_a_page_has_the_name_that_messages_give_it(pages, name):
    begins = "# To cook\n\n[Water](b#x), [oil](how-to/c). pan"
    assert docs.told((name,), pages).startswith(f"{begins} (`{pages}/d`) (A picture: egg)\n\n## Eggs")


def test_a_search_finds_sections_with_all_words_by_their_headings_and_then_in_the_order_of_the_index(pages):
    lines = docs.told(("EGGS",), pages).splitlines()
    assert lines == [f"- `fluidtune docs {each}" for each in ("how-to/a`: Eggs", "how-to/a`: Salt", "z`: Salt")]
    assert docs.told(("hot", "water"), pages) == "- `fluidtune docs how-to/a`: Eggs"


@pytest.mark.parametrize("word", ["nowhere", "../secret", "", 256 * "x", "a/" * 3000, "a\0b"])
def test_what_no_page_has_is_refused_in_a_line(pages, word, tmp_path):
    (tmp_path.parent / "secret.md").touch()
    if word:
        with pytest.raises(FluidTuneError, match="no page has"):
            docs.told((word,), pages)
    else:
        assert "how-to/a" in docs.told((word,), pages)


def test_the_command_lists_all_pages_of_this_project_and_cuts_no_word_of_a_table():
    """Seen: in 80 columns rich cut what is to be copied, as in "NCCL_SOCKET_I…"."""
    done = CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["docs", "security"])
    assert done.exit_code == 0 and "Who can reach what" in done.output and "…" not in done.output
    listed = docs.told(())
    assert page("index.md").count(":caption:") == listed.count("\n## ")

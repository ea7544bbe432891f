"""`fluidtune docs`: the pages that are in the package, so that a question has its answer where there is no network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.table import Table

from fluidtune.errors import FluidTuneError

PAGES = Path(__file__).parents[1] / "docs"
#: Sections that a search shows at most. Judgement: a screen.
MOST = 20


def told(words: tuple[str, ...], pages: Path = PAGES) -> str:
    """Markdown: the list of ``pages`` without words, the page that is named, or the sections that have all words.

    Raises FluidTuneError if no section has them.
    """
    if not words:
        return _contents(pages)
    # A message, or a link of another page, names docs/how-to/serve.md#3-ask.
    page = re.sub(r"^docs/|(\.md)?(#.*)?$", "", words[0])
    named = [name for name in _names(pages) if page in (name, name.rpartition("/")[2])]
    if len(words) == 1 and named:
        return _page(pages, page if page in named else named[0])
    wanted = [word.lower() for word in " ".join(words).split()]
    # The index has the pages for users first, and those on how it works later.
    places = {name: place for place, (_, names) in enumerate(_lists(pages)) for name in names}
    found = [
        (
            -sum(word in heading.lower() for word in wanted),
            places.get(name, len(places)),
            -sum(map(text.lower().count, wanted)),
            name,
            heading,
        )
        for name in _names(pages)
        for heading, text in _sections(pages, name)
        if all(word in text.lower() for word in wanted)
    ]
    if not found:
        raise FluidTuneError(f"no page has {' '.join(words)!r}; `fluidtune docs` lists the pages")
    lines = [f"- `fluidtune docs {name}`: {heading}" for *_, name, heading in sorted(found)[:MOST]]
    return "\n".join([*lines, *([f"\n{len(found) - MOST} more"] if len(found) > MOST else [])])


class Page(Markdown):
    """A page in a terminal, which cuts nothing."""

    class _Table(TableElement):
        """Rich cuts a word that is longer than its column; here it goes on in the next line."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for table in super().__rich_console__(console, options):
                assert isinstance(table, Table)
                for column in table.columns:
                    column.overflow = "fold"
                yield table

    elements = {**Markdown.elements, "table_open": _Table}  # noqa: RUF012


def _page(pages: Path, name: str) -> str:
    """The page without what only a site can show. A link to another page is that one's name, a file has its path."""
    text = (pages / f"{name}.md").read_text()
    text = re.sub(r"^```\{.*?^```\n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[([^]]*)\]\([^)]*\)", r"(A picture: \1)", text)
    text = re.sub(r"\{download\}`([^<]*)\s<(.*?)>`", lambda at: f"{at[1]} (`{_beside(pages / name, at[2])}`)", text)
    return re.sub(r"(?<=\]\()([\w./-]+)\.md", lambda found: _beside(name, found[1]), text)


def _beside(name: Path | str, path: str) -> str:
    return os.path.normpath(f"{name}/../{path}")


def _contents(pages: Path) -> str:
    """The lists of the index, with each page's title."""
    lines = ["`fluidtune docs PAGE` shows a page, `fluidtune docs WORD ...` finds sections."]
    for caption, names in _lists(pages):
        lines += [f"\n## {caption}\n", *(f"- `{name}`: {next(_sections(pages, name), (name,))[0]}" for name in names)]
    return "\n".join(lines)


def _lists(pages: Path) -> Iterator[tuple[str, list[str]]]:
    """The caption of each list of the index, and the names of its pages."""
    index = (pages / "index.md").read_text()
    for caption, body in re.findall(r"```\{toctree\}\n:caption: (.+)\n.*\n\n([^`]+)```", index):
        yield caption, [name for name in body.split() if (pages / f"{name}.md").is_file()]


def _names(pages: Path) -> list[str]:
    """The names of all pages, as in `how-to/serve`."""
    found = (page.relative_to(pages).with_suffix("") for page in pages.glob("**/*.md"))
    return sorted(str(name) for name in found if not name.parts[0].startswith("_"))


def _sections(pages: Path, name: str) -> Iterator[tuple[str, str]]:
    """Each heading of a page, and the heading with the text below it."""
    page = (pages / f"{name}.md").read_text()
    # Comments in a block of code are no headings.
    page = re.sub(r"^```.*?^```", lambda block: block[0].replace("\n#", "\n #"), page, flags=re.DOTALL | re.MULTILINE)
    for section in re.split(r"^(?=#)", page, flags=re.MULTILINE):
        if section.startswith("#"):
            yield section.partition("\n")[0].lstrip("# "), section

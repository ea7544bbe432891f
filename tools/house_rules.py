"""`python -m tools.house_rules`: the rules of CONTRIBUTING.md that no other linter checks.

Markdown:

- A line has at most 100 columns. Tables, code blocks, and the URLs in a line do not count.
- A relative link and a path such as `docs/events.md` in a code span lead to a file or directory of the repository, and
  to a heading of it if they name one. A path without a suffix may be that of a module. A path may begin inside
  `fluidtune`, as in `engine/speed.py`.

Python, in the packages that users install:

- A file is one idea: it begins with a docstring, whose first sentence names the idea.
- A class of its own (one without bases other than ABC and Protocol) with more than a dozen public methods has a
  sentence in its docstring that begins with "One thing:" and says why it is one.
- No function is called `_`: a traceback and a search must find it by its name.
- No two modules of one package tree have the same name, except `__init__`, `__main__`, `messages` and `errors`.

Python, in `tests`:

- The marks `core`, `ray`, `faults` and `slow` stand in files of tests (`test_*.py`): the Makefile finds the files to
  run by these words.

Prints one line per finding, "path:line: what is wrong", and exits with status 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

#: The packages that users install.
PACKAGES = ("fluidtune", "themis_bridge", "salus_share", "symphony_serve")
#: Where Markdown lies, besides the repository's root.
DOCS = ("docs", "benchmarks", "tests", "examples")
#: The limits are judgement. This is the width at which two pages fit side by side on a screen.
MARKDOWN_COLUMNS = 100
#: Issue O: a class with more public methods than this says why.
MOST_METHODS = 12
#: In a docstring, this begins the sentence that says why a class with many methods is one.
EXPLANATION = "One thing:"
#: Bases of which a class inherits no methods.
_OWN = {"ABC", "abc.ABC", "Protocol"}
#: Modules that may occur several times in one package tree: their place says whose messages or errors they hold.
REPEATED_NAMES = {"__init__", "__main__", "messages", "errors"}

#: The first part of a path that must exist.
ROOTS = (*PACKAGES, "benchmarks", "docs", "examples", "tests", "tools")

_MARK = re.compile(r"\bmark\.(core|ray|faults|slow)\b")
_URL = re.compile(r"<?https?://\S+|(?<=\])\([^)\s]+\)")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_LINK = re.compile(r"\]\(([^)\s]+)")
_HEADING = re.compile(r"#{1,6} +(.+)")
_INCLUDE = re.compile(r"```\{include\} (\S+)")
_SPAN = re.compile(r"`([^`]+)`")
_PATH = re.compile(rf"(?<![\w./])(?:{'|'.join(ROOTS)})/[\w./-]*\w")
_INNER_PATH = re.compile(r"(?<![\w./])\w+/[\w/]+\.py\b")


class Finding(NamedTuple):
    """One broken rule."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page that are in no code block."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


def check_columns(path: Path, text: str) -> Iterator[Finding]:
    """Lines of a page that are too wide."""
    for number, line in _prose(text):
        columns = len(_URL.sub("", line))
        if columns > MARKDOWN_COLUMNS and not line.startswith("|"):
            yield Finding(path, number, f"{columns} columns; wrap at {MARKDOWN_COLUMNS}")


def check_paths(path: Path, text: str, root: Path) -> Iterator[Finding]:
    """Links and paths of a page that lead nowhere."""
    for number, line in _prose(text):
        for target in _LINK.findall(line):
            place, _, heading = target.partition("#")
            page = path.parent / place if place else path
            if ":" in target:
                continue
            if place and not page.exists():
                yield Finding(path, number, f"the link to {target} leads nowhere")
            elif heading and page.suffix == ".md" and heading not in _anchors(page, text, path):
                yield Finding(path, number, f"the link to {target}: that page has no such heading")
        for span in _SPAN.findall(line):
            for name in {*_PATH.findall(span), *_INNER_PATH.findall(span)}:
                if not any(place.exists() for place in (root / name, root / f"{name}.py", root / "fluidtune" / name)):
                    yield Finding(path, number, f"there is no {name}")


def _anchors(page: Path, text: str, path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them. ``text``: that of the page ``path``."""
    text = text if page == path else page.read_text()
    text += "".join((page.parent / name).read_text() for name in _INCLUDE.findall(text))
    headings = [match[1].lower() for _, line in _prose(text) if (match := _HEADING.match(line))]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def check_python(path: Path, text: str) -> Iterator[Finding]:
    """Files without a first sentence, classes with many methods, and functions without a name."""
    tree = ast.parse(text)
    if tree.body and not ast.get_docstring(tree):
        yield Finding(path, 1, "has no docstring; its first sentence names the one idea of the file")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "_":
            yield Finding(path, node.lineno, "a function is called `_`; give it a name")
        elif isinstance(node, ast.ClassDef) and not {ast.unparse(base) for base in node.bases} - _OWN:
            methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
            public = sum(not each.name.startswith(("_", "test_")) for each in methods)
            if public > MOST_METHODS and EXPLANATION not in (ast.get_docstring(node) or ""):
                remedy = f"split it, or say in its docstring why not ({EXPLANATION!r})"
                text = f"class {node.name} has {public} public methods, more than {MOST_METHODS}; {remedy}"
                yield Finding(path, node.lineno, text)


def check_names(package: Path) -> Iterator[Finding]:
    """Modules of one package tree that have the same name."""
    found: dict[str, Path] = {}
    for path in sorted(package.rglob("*.py")):
        if path.stem in REPEATED_NAMES:
            continue
        first = found.setdefault(path.stem, path)
        if first is not path:
            same = first.relative_to(package.parent)
            yield Finding(path, 1, f"has the same name as {same}; name it by what it decides")


def check_marks(path: Path, text: str) -> Iterator[Finding]:
    """Marks of tests in a file that the Makefile does not look into."""
    if not path.name.startswith("test_"):
        for number, line in enumerate(text.splitlines(), 1):
            if found := _MARK.search(line):
                yield Finding(path, number, f"has {found[0]}, which make test finds in test_*.py alone; put it there")


def check_tree(root: Path) -> list[Finding]:
    """All findings of the repository at ``root``, with paths relative to it."""
    findings: list[Finding] = []
    for page in _pages(root):
        text = page.read_text()
        findings += [*check_columns(page, text), *check_paths(page, text, root)]
    for package in PACKAGES:
        for module in sorted((root / package).rglob("*.py")):
            findings += check_python(module, module.read_text())
        findings += check_names(root / package)
    for module in sorted((root / "tests").rglob("*.py")):
        findings += check_marks(module, module.read_text())
    return [finding._replace(path=finding.path.relative_to(root)) for finding in findings]


def _pages(root: Path) -> Iterable[Path]:
    yield from sorted(root.glob("*.md"))
    for folder in DOCS:
        yield from sorted((root / folder).rglob("*.md"))


def main() -> None:
    findings = check_tree(Path.cwd())
    for finding in findings:
        print(finding)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()

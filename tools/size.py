"""The ratchet: the project's lines of Python, shipped and of tests, may only become fewer.

``python -m tools.size`` counts them and compares them with `BOOK`. More lines than the book has are an error. Where
there are fewer, the book is written anew, and belongs into the commit. A new capability may raise a number by hand, in
a commit that says what for. Docstrings and blank lines count: what is cut is code with its words.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tools.house_rules import PACKAGES

ROOT = Path(__file__).parents[1]
#: By kind, the most lines that there may be.
BOOK = Path("tools/size.json")
#: By kind, the folders whose lines are counted.
KINDS = {"shipped": PACKAGES, "tests": ("tests",)}


def lines_of(root: Path) -> dict[str, int]:
    """By kind, the lines of the files ``*.py`` below its folders."""
    return {
        kind: sum(len(path.read_bytes().splitlines()) for folder in folders for path in (root / folder).rglob("*.py"))
        for kind, folders in KINDS.items()
    }


def turn(root: Path) -> list[str]:
    """Lower the book to what there is. Returns an error for each kind of which there is more."""
    book, now = json.loads((root / BOOK).read_text()), lines_of(root)
    lower = {kind: min(now[kind], book[kind]) for kind in KINDS}
    if lower != book:
        (root / BOOK).write_text(json.dumps(lower, indent=2) + "\n")
    return [
        f"{kind}: {now[kind]} lines of Python, {now[kind] - book[kind]} more than {BOOK} allows: delete as many"
        for kind in KINDS
        if now[kind] > book[kind]
    ]


def main() -> int:
    errors = turn(ROOT)
    print("\n".join(errors) or f"lines of Python: {lines_of(ROOT)}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

"""A class of the driver has at most three booleans of state: more of them are a state machine that nobody has drawn."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fluidtune"
CLASSES = [
    (path, node)
    for room in ("engine", "tune", "trials")
    for path in sorted((ROOT / room).rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
]


def is_frozen(node: ast.ClassDef) -> bool:
    """Whether it is a frozen dataclass: settings and messages have no state."""
    return any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)


def flags(node: ast.ClassDef) -> Iterator[str]:
    """Its attributes that are declared as a bool, or made with True or False."""
    for line in ast.walk(node):
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.annotation) == "bool":
            yield ast.unparse(line.target)
        elif isinstance(line, ast.Assign):
            for target in line.targets:
                pairs = (
                    zip(target.elts, line.value.elts, strict=False)
                    if isinstance(target, ast.Tuple) and isinstance(line.value, ast.Tuple)
                    else [(target, line.value)]
                )
                for left, right in pairs:
                    is_flag = isinstance(right, ast.Constant) and isinstance(right.value, bool)
                    if is_flag and ast.unparse(left).startswith("self."):
                        yield ast.unparse(left)


@pytest.mark.parametrize(("path", "node"), CLASSES, ids=lambda each: getattr(each, "name", ""))
def test_a_class_has_at_most_three_flags(path: Path, node: ast.ClassDef) -> None:
    found = sorted({name.removeprefix("self.") for name in flags(node)})
    assert is_frozen(node) or len(found) <= 3, f"{path.name}: {found}"

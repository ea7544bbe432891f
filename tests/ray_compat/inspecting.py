"""Reads Ray's classes and modules as source."""

from __future__ import annotations

import ast
import inspect
import textwrap


def attributes_of(cls: type) -> set[str]:
    """Return the names that a class and its bases define in their bodies or assign to an attribute in a method."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        names |= set(vars(base))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names

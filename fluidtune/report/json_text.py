"""JSON for programs: on one line, with null where a number is not finite, and with the version of its form.

docs/agents.md has the forms. A further key does not change the version; another meaning of a key does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: The version of all forms.
VERSION = 1


def versioned(found: Mapping[str, Any]) -> str:
    """The answer of a command with --json."""
    return plain_json({"version": VERSION, **found})


def plain_json(found: Any) -> str:
    """``found`` as JSON on one line. A number that is not finite, which JSON has not, is null."""
    try:
        return json.dumps(found, allow_nan=False, separators=(",", ":"))
    except ValueError:
        plain = json.loads(json.dumps(found), parse_constant=lambda name: None)
        return json.dumps(plain, separators=(",", ":"))

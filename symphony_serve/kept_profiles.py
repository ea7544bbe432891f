"""Profiles as JSON text, so that a model need not be measured at each start.

``{"format": 1, "device": TEXT, "seconds": {MODEL: [l(1), l(2), ...]}}``. A profile holds on the device on which it was
measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from symphony_serve.errors import ServeError
from symphony_serve.profiles import Profile

#: Grows when the meaning of the text changes.
FORMAT = 1


def profiles_to_json(profiles: Mapping[str, Profile], device: str) -> str:
    """The text. device: where they were measured, in words."""
    seconds = {name: profile.table[1:-1] for name, profile in profiles.items()}
    return json.dumps({"format": FORMAT, "device": device, "seconds": seconds}, indent=1)


def profiles_from_json(text: str, device: str) -> dict[str, Profile]:
    """The profiles by model. Raises ServeError if the text is not of this format or was measured on another device."""
    try:
        kept: Any = json.loads(text)
    except ValueError as error:
        raise ServeError(f"the kept profiles are not JSON ({error}); measure them again") from None
    if not isinstance(kept, dict) or kept.get("format") != FORMAT or not isinstance(kept.get("seconds"), dict):
        found = kept.get("format") if isinstance(kept, dict) else type(kept).__name__
        raise ServeError(f"the kept profiles have format {found}, expected {FORMAT}; measure them again")
    if kept.get("device") != device:
        found = kept.get("device")
        raise ServeError(f"the kept profiles are of device {found!r}, not of {device!r}; measure them again")
    try:
        return {name: Profile.from_seconds(seconds) for name, seconds in kept["seconds"].items()}
    except TypeError as error:
        raise ServeError(f"the kept profiles have an entry that is no list of seconds ({error})") from None

"""Profiles as JSON text, so that a model need not be measured at each start.

``{"format": 1, "device": TEXT, "seconds": {MODEL: [l(1), l(2), ...]}, "delays": {MODEL: SECONDS}}``. A profile holds on
the device on which it was measured. The delays are those besides the device's time that were measured with it; a text
may have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from symphony_serve.errors import ServeError
from symphony_serve.profiles import Profile

#: Grows when the meaning of the text changes.
FORMAT = 1


def profiles_to_json(profiles: Mapping[str, Profile], device: str, delays: Mapping[str, float] | None = None) -> str:
    """The text. device: where they were measured, in words. delays: seconds by model."""
    seconds = {name: profile.table[1:-1] for name, profile in profiles.items()}
    return json.dumps({"format": FORMAT, "device": device, "seconds": seconds, "delays": dict(delays or {})}, indent=1)


def profiles_from_json(text: str, device: str | None) -> dict[str, Profile]:
    """The profiles by model. device: where they must have been measured; None: anywhere.

    Raises ServeError if the text is not of this format or was measured on another device.
    """
    try:
        kept: Any = json.loads(text)
    except ValueError as error:
        raise ServeError(f"the kept profiles are not JSON ({error}); measure them again") from None
    if not isinstance(kept, dict) or kept.get("format") != FORMAT or not isinstance(kept.get("seconds"), dict):
        found = kept.get("format") if isinstance(kept, dict) else type(kept).__name__
        raise ServeError(f"the kept profiles have format {found}, expected {FORMAT}; measure them again")
    if device is not None and kept.get("device") != device:
        found = kept.get("device")
        raise ServeError(f"the kept profiles are of device {found!r}, not of {device!r}; measure them again")
    try:
        return {name: Profile.from_seconds(seconds) for name, seconds in kept["seconds"].items()}
    except TypeError as error:
        raise ServeError(f"the kept profiles have an entry that is no list of seconds ({error})") from None


def delays_from_json(text: str) -> dict[str, float]:
    """The seconds of delay by model, of a text that `profiles_from_json` reads; of models that have one."""
    found = json.loads(text).get("delays") or {}
    if not isinstance(found, dict) or not all(isinstance(one, int | float) and one >= 0 for one in found.values()):
        raise ServeError(f"the kept delays are {found!r}, expected seconds by model; measure them again")
    return {name: float(one) for name, one in found.items()}

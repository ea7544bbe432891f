"""Profiles of emulated trials, stretched to the length of an iteration that a benchmark asks for."""

from __future__ import annotations

from dataclasses import replace

from fluidtune.profiles import Profile


def scaled(profile: Profile, seconds: float) -> Profile:
    """A profile of the same shape of which an iteration takes ``seconds`` on one device."""
    factor = seconds / profile.seconds["1"]
    return replace(
        profile,
        seconds={placement: value * factor for placement, value in profile.seconds.items()},
        packed={count: value * factor for count, value in profile.packed.items()},
    )

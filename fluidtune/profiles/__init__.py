"""Profiles: how long an iteration of one kind of trial takes at each width, placement and number of neighbours.

An emulated device (`fluidtune.cluster.emulated`) and the twin (`fluidtune.twin`) take their times from one.
A profile comes from a file, from a run of our own (`measured`), or from recorded data (`recorded`). Pure: it
reads files that it is given, and decides nothing.
"""

from fluidtune.profiles.profile import DEFAULT, DEVICES_PER_NODE, Profile, ProfileError

__all__ = ["DEFAULT", "DEVICES_PER_NODE", "Profile", "ProfileError"]

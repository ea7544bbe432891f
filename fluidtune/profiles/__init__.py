"""Profiles: how long an iteration of one kind of trial takes, by width, placement on nodes, and trials on its device.

Emulated devices (`fluidtune.cluster.emulated`) and the twin (`fluidtune.twin`) take their times from a profile. It
comes from a JSON file (`profile`, where reading starts), or from the event log of a run of FluidTune (`measured`).
Pure: it reads the files that it is given, and decides nothing. What the engine knows of the speed of running trials is
not here but in `fluidtune.engine.speed`.
"""

from fluidtune.profiles.profile import DEFAULT, DEVICES_PER_NODE, Profile, ProfileError

__all__ = ["DEFAULT", "DEVICES_PER_NODE", "Profile", "ProfileError"]

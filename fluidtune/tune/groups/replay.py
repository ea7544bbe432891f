"""`PopulationBasedTrainingReplay`: the replay of one trial of a population."""

from __future__ import annotations

from fluidtune.tune.groups.adapter import Adapter


class ReplayAdapter(Adapter):
    """One batch, of one trial."""

    synchronous = True

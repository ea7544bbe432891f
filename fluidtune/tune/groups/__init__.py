"""Which TrialGroups each tuning algorithm of Ray Tune forms. The table is in docs/algorithms.md.

An *adapter* reads the state of one scheduler class. For a trial it returns the TrialGroup, whether the group is a
batch whose makespan counts or a stream, and the iteration at which the algorithm decides next. It also returns the
paused trials that the algorithm has promoted. It decides nothing: promotions and stops are the algorithm's.

Start reading in `adapter`; `budgets` converts a script's units into iterations. An algorithm without an adapter runs as
one stream, unless its author names its groups with `announce`.
"""

from __future__ import annotations

from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    TrialScheduler,
)

from fluidtune.tune.groups.adapter import (
    Adapter,
    ASHAAdapter,
    FIFOAdapter,
    MedianStoppingAdapter,
    Membership,
    ReplayAdapter,
    announce,
)
from fluidtune.tune.groups.hyperband import HyperBandAdapter
from fluidtune.tune.groups.pbt import PBTAdapter

__all__ = ["Adapter", "Membership", "adapter_for", "announce"]

_EXACT: dict[type, type[Adapter]] = {
    FIFOScheduler: FIFOAdapter,
    HyperBandScheduler: HyperBandAdapter,
    HyperBandForBOHB: HyperBandAdapter,
    ASHAScheduler: ASHAAdapter,
    MedianStoppingRule: MedianStoppingAdapter,
    PopulationBasedTraining: PBTAdapter,
    PopulationBasedTrainingReplay: ReplayAdapter,
}


def adapter_for(base: TrialScheduler) -> Adapter:
    """Return the adapter of a scheduler's own class. A subclass may have other rules: it does not get its parent's."""
    kind = type(base)
    if kind.__name__ == "PB2" and kind.__module__.startswith("ray."):
        # PB2 is PBT whose new configurations come from a model. Its import needs scikit-learn.
        return PBTAdapter(base)
    return _EXACT.get(kind, Adapter)(base)

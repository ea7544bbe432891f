"""How each tuning algorithm of Ray Tune is a sequence of TrialGroups. The table is in docs/algorithms.md.

An *adapter* answers, for one scheduler class, what an engine needs to know about a trial: its group, whether
the group is a batch whose makespan counts or a stream, how many iterations it may train until the next decision,
and which paused trials the algorithm has let go on. An algorithm without an adapter runs as one stream; its author
can say more with `announce`.
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

from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.announced import announce
from fluidtune.tune.groups.asha import ASHAAdapter
from fluidtune.tune.groups.fifo import FIFOAdapter
from fluidtune.tune.groups.hyperband import HyperBandAdapter
from fluidtune.tune.groups.median import MedianStoppingAdapter
from fluidtune.tune.groups.pbt import PBTAdapter
from fluidtune.tune.groups.replay import ReplayAdapter

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
    """The adapter of a scheduler's own class (a subclass with other rules is not taken for its parent)."""
    kind = type(base)
    if kind.__name__ == "PB2" and kind.__module__.startswith("ray."):
        # PBT whose new configurations come from a model; not imported here, because it wants scikit-learn.
        return PBTAdapter(base)
    return _EXACT.get(kind, Adapter)(base)

"""Grid search, random search, and any `Searcher` without a scheduler."""

from fluidtune.tune.groups.adapter import Adapter


class FIFOAdapter(Adapter):
    """One batch: nothing is decided before its trials have ended. A searcher's trials join it one by one."""

    synchronous = True

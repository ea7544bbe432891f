"""A class trainable that stays in its process between two trials, as stock Ray Tune does it with ``reuse_actors=True``.

It stays if the script asks for that and the class overrides ``reset_config``. The next trial of the class in the
process gets it by ``Trainable.reset``, so that it finds what the class keeps on purpose: a data set, a connection, a
compiled model. The process is not cleaned in between. Trials that share a device by lanes, that are elastic or
emulated, and those that failed leave nothing behind.
"""

from __future__ import annotations

from typing import Any

from ray.tune import Trainable
from ray.tune.trainable import FunctionTrainable


def can_stay(trainable: Trainable) -> bool:
    """Return whether the class can be reset for another trial. A function begins anew with each trial anyway."""
    return type(trainable).reset_config is not Trainable.reset_config and not isinstance(trainable, FunctionTrainable)


class KeptTrainable:
    """At most one trainable, of the trial before."""

    def __init__(self) -> None:
        self._kept: Trainable | None = None

    def keep(self, trainable: Trainable) -> None:
        """The trial is over; the trainable stays."""
        self._kept = trainable

    def reset_for(self, trainable_cls: type[Trainable], kwargs: dict[str, Any]) -> Trainable | None:
        """Return the kept trainable, reset for a trial with these arguments of its constructor.

        None: there is none of this class, or its ``reset_config`` returned False. It is stopped then. (Stock Ray Tune
        fails the trial if ``reset_config`` returns False.)
        """
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        others = {name: value for name, value in kwargs.items() if name != "config"}
        if type(kept) is trainable_cls and kept.reset(dict(kwargs["config"]), **others):
            return kept
        kept.stop()
        return None

    def stop(self) -> None:
        """Stop the kept trainable, if there is one: its ``cleanup`` runs."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.stop()

"""Which metrics a callback reports to Tune, and under which names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

#: None: all; a name or names; or a mapping from the name that Tune sees to the framework's own.
MetricNames = str | Sequence[str] | Mapping[str, str] | None


def reported(metrics: MetricNames, found: Iterable[str]) -> dict[str, str]:
    """The names that Tune sees, each with the framework's own, where the framework has ``found``."""
    if isinstance(metrics, Mapping):
        return dict(metrics)
    names = found if metrics is None else [metrics] if isinstance(metrics, str) else metrics
    return {name: name for name in names}

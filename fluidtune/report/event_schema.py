"""What the description of an event is made of. The descriptions are in `events` and `serving_events`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: The meaning of a field that many events have.
TRIAL = "the trial's id"


@dataclass(frozen=True)
class EventSchema:
    """The meaning of one event and its fields: the name of each field, and its meaning with its unit."""

    meaning: str
    required: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)

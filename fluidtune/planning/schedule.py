"""What a plan is: which trial runs on which devices, how wide, from when to when. Nothing is decided here."""

from __future__ import annotations

from dataclasses import dataclass, field

from fluidtune.planning.loads import Width


@dataclass(frozen=True, slots=True)
class Segment:
    """One trial at one width on the same devices, from ``start`` to ``end`` (seconds from the plan's start).

    ``width`` < 1: that share of the single device in ``devices``; otherwise every device listed, whole.
    """

    trial_id: str
    devices: tuple[int, ...]
    width: Width
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The segments of all trials, by start. Segments of one trial never overlap; a trial of height 0 has none."""

    segments: tuple[Segment, ...]
    #: Seconds until the last segment ends; 0 without segments.
    makespan: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "makespan", max((segment.end for segment in self.segments), default=0.0))

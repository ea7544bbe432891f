"""What a rehearsal of a trial's growth has found (`rehearsal`). Needs no torch: it goes to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Verdict:
    """Whether a step gives the same gradients whole and divided; "unknown": the comparison could not be made.

    ``reason``: why, in one line; empty with "same".
    """

    kind: Literal["same", "differs", "unknown"]
    reason: str = ""

"""Trials of one architecture, trained as one in one process: `fused_trials` runs them. docs/fused.md has the decision.

Read `fused_trials` first, then `baton` (whose turn it is), `fused_call` (what is done together) and `stacked_tensor`
(how one forward computes for several trials).
"""

from __future__ import annotations

from .fused_trials import FusedTrial, FusedTrials, current_trial

__all__ = ["FusedTrial", "FusedTrials", "current_trial"]

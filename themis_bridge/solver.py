"""HiGHS, which solves the programs of the auction and of planned policies, so that it prints nothing."""

from __future__ import annotations

import highspy


class SilentHighs(highspy.Highs):
    """HiGHS with one thread. (The constructor of 1.16 prints who it is in this call, before an option can be set.)"""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
        self.setOptionValue("threads", 1)

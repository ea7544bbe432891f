"""Decayed usage: what each user had of the cluster in the past, and what that does to the turn of his apps.

It is Slurm's fair share (multifactor priority plugin, "classic" fair share): F = 2 ** (-usage / share), where a user's
usage and share are parts of those of all users. Here rho is multiplied by F where apps are compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

#: GPU seconds of usage that are forgotten. Judgement: less than any lease.
FORGOTTEN = 1.0


def decayed(before: float, gpus: int, seconds: float, half_life_s: float) -> float:
    """Usage after a user has held so many GPUs for ``seconds``; GPU seconds, of which half fade in a half-life.

    The result does not depend on the steps into which the time is divided.
    """
    left = 0.5 ** (seconds / half_life_s)
    return before * left + gpus * half_life_s / math.log(2) * (1 - left)


def fair_share(usage: Mapping[str, float], users: Collection[str]) -> dict[str, float]:
    """User -> F, between 0 and 1: 1 without any usage, and 0.5 for a user who had exactly his share.

    ``usage``: user -> decayed usage, also of users who have no app now. ``users``: those who have an app now. Everybody
    in either of them has an equal share.
    """
    total, count = sum(usage.values()), len({*usage, *users})
    return {user: 2.0 ** (-usage.get(user, 0.0) * count / total) if total else 1.0 for user in users}

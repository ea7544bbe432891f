"""The order of the apps: who is further behind, and who comes first among equals.

`policy`, `auctioneer`, `preemption` and `arbiter_view` all use this order. Nothing is decided here about GPUs.
"""

from __future__ import annotations

import hashlib

#: Of two apps that are equally far behind, the one with the smaller turn comes first.
Turn = tuple[float, bytes]
#: Bytes of a lot. Judgement: no two of a thousand apps have the same one.
LOT_BYTES = 8


def turn(app: str, joined: float, draw: float) -> Turn:
    """The app's turn among equals: by arrival, and then by a lot that nobody can choose.

    By name, an app that calls itself "a" would win every tie. The lot is a hash that depends on the number of the draw,
    and on the time of arrival to its last bit, which no app knows when it chooses its name.

    Args:
        app: its name.
        joined: when it joined, seconds on the arbiter's clock.
        draw: another number in each draw, such as that of the round.
    """
    return joined, hashlib.blake2b(f"{draw!r}/{joined!r}/{app}".encode(), digest_size=LOT_BYTES).digest()


def behind(holds: bool, rho: float, best: float, turn: Turn) -> tuple[bool, float, Turn]:
    """Smaller for an app that is further behind; apps without any GPU come before all others.

    Without any GPU rho is practically infinite and says nothing. Of such apps, the one that has waited longest relative
    to its work is the one whose rho would be worst if it had all GPUs that it could use from now on (``best``).
    """
    return holds, -(rho if holds else best), turn

"""Each run stages its files in a folder of its own, also beside another run of its name that began in the same second.

Ray names the folder by the second and the experiment's name, and copies all that is in it into the run's storage.
"""

from __future__ import annotations

import functools
import secrets
from typing import Any

from ray.train._internal.storage import StorageContext


def stage_apart() -> None:
    """Have this process' later runs do so. A restored run goes on in its folder."""
    stock = StorageContext.__init__
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def begin(self: Any, *args: Any, **named: Any) -> None:
        stock(self, *args, **named)
        self._timestamp += f"_{secrets.token_hex(4)}"

    StorageContext.__init__ = begin

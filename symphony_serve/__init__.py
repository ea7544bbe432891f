"""Serving: requests to the models that a search found are answered in batches, each before its deadline.

Decided here: which requests form a batch (`batching`), when it starts, and on which GPU. The inputs are profiles, which
say how long a batch takes, and requests with deadlines. The rules are those of the paper Symphony;
docs/serving-decisions.md has the decisions.

`placement` decides which of many models should stand on which GPUs; it has rules of its own, those of AlpaServe.

Start reading with `messages`, then `profiles` and `batching`. What decides is pure: it needs nothing but Python
(`placement`: NumPy), and has no clock but the moments that it is told. `shell` has the real clock,
on an event loop. This package imports neither fluidtune nor themis_bridge nor salus_share.
"""

from symphony_serve.errors import Refused, ServeError
from symphony_serve.messages import Reason, Request
from symphony_serve.profiles import Profile
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.device import LocalDevice
from symphony_serve.shell.measuring import measure_models

__all__ = [
    "AsyncServer",
    "LocalDevice",
    "Profile",
    "Reason",
    "Refused",
    "Request",
    "ServeError",
    "measure_models",
]

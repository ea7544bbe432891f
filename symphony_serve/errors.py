"""The errors of this package. Each says the value, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from symphony_serve.messages import Reason


class ServeError(ValueError):
    """A profile, a setting, a message or a call is wrong."""


class Refused(Exception):
    """A request got no answer. Its text says why.

    reason: a `messages.Reason`.
    """

    def __init__(self, model: str, reason: Reason):
        super().__init__(f"a request to model {model} was refused: {reason.value}")
        self.model = model
        self.reason = reason

    def __reduce__(self) -> tuple[type[Refused], tuple[str, Reason]]:
        return type(self), (self.model, self.reason)


class DeviceLost(Exception):
    """A model's function raises it if its device is gone, and with it the batch that it was to run.

    back: waits a while for the device, and returns whether it can be used again. It is awaited until it says so.
    """

    def __init__(self, why: str, back: Callable[[], Awaitable[bool]]):
        super().__init__(why)
        self.back = back

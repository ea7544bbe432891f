"""Of which model each device is, as far as workers have told.

A *model* is a GPU's product name. It is not known before the first worker of a device has started. A job whose devices
are all of one model, or of none that is known, is planned as if this module did not exist (`DeviceModels.mixed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class DeviceModels:
    """The models of an engine's devices."""

    def __init__(self) -> None:
        #: The model of each device that is there and whose model is known.
        self.of: dict[int, str] = {}
        #: Number of devices of each model in ``of``; no number is 0.
        self._count: Counter[str] = Counter()

    @property
    def mixed(self) -> bool:
        """Whether devices of several models are there."""
        return len(self._count) > 1

    def note(self, device: int, model: str) -> bool:
        """``device`` is of this model. Returns whether that is news."""
        if self.of.get(device) == model:
            return False
        self.forget(device)
        self.of[device] = model
        self._count[model] += 1
        return True

    def forget(self, device: int) -> None:
        """``device`` is not there any more."""
        model = self.of.pop(device, None)
        if model is not None:
            self._count[model] -= 1
            if not self._count[model]:
                del self._count[model]

    def alike(self, device: int, other: int) -> bool:
        """Whether both are of one model, as far as is known: a device whose model is not known is like all others."""
        ours, theirs = self.of.get(device), self.of.get(other)
        return ours is None or theirs is None or ours == theirs

    def by_model(self, devices: Iterable[int]) -> list[list[int]]:
        """The devices by their models, in their order; those whose model is not known are one more part."""
        parts: dict[str | None, list[int]] = {}
        for device in devices:
            parts.setdefault(self.of.get(device), []).append(device)
        return list(parts.values())

    def validate(self) -> None:
        """Asserts what the comments of the attributes say."""
        assert self._count == Counter(self.of.values()) and all(self._count.values())

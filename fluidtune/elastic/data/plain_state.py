"""State of a loop that has no ``state_dict`` of its own: plain values (`State`), and random generators (`Drawing`)."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import torch


class State:
    """Values of a loop by name, which a restarted trial goes on from; see `elastic.state`."""

    def __init__(self, **values: Any) -> None:
        taken = sorted(set(values) & {"state_dict", "load_state_dict"})
        if taken:
            raise TypeError(f"elastic.state() cannot have a value named {taken[0]!r}: that is its own method")
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"State({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, values: dict[str, Any]) -> None:
        vars(self).clear()
        vars(self).update(values)


class Drawing:
    """A random generator with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    @staticmethod
    def fits(obj: Any) -> bool:
        """Whether it is a random generator of Python, numpy or torch."""
        return isinstance(obj, random.Random | numpy.random.Generator | numpy.random.RandomState | torch.Generator)

    def state_dict(self) -> dict[str, Any]:
        generator = self.generator
        if isinstance(generator, random.Random):
            return {"state": generator.getstate()}
        if isinstance(generator, numpy.random.Generator):
            return {"state": copy.deepcopy(generator.bit_generator.state)}
        return {"state": generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        generator = self.generator
        if isinstance(generator, random.Random):
            generator.setstate(state["state"])
        elif isinstance(generator, numpy.random.Generator):
            generator.bit_generator.state = state["state"]
        else:
            generator.set_state(state["state"])

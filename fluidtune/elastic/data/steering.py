"""Has all workers take their optimizers' steps with the leader's settings: learning rates, momenta, weight decay.

A loop may set them from state that no joiner gets, such as its own counter for a warm-up. The workers compare them
before the first step of each optimizer in a turn. If they differ, the workers take over the leader's, and from then on
compare before every step of the group. So the trial learns as it would alone, until its growth is ended (`likeness`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..alike.digests import digest_of, plain_leaves
from .group_view import GroupView


def steppers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers whose steps call torch's hooks: this one, and those that it has as attributes.

    Some that wrap another one, as SAM and Lookahead do, step by other methods, or were not made as torch makes one.
    """
    inner = [part for part in vars(optimizer).values() if isinstance(part, torch.optim.Optimizer)]
    return [each for each in (optimizer, *inner) if _calls_hooks(each)]


def _calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:  # it does not call torch's __init__
        return False
    return True


class Steering:
    """Compares the settings of the optimizers that it was given."""

    def __init__(self, group: GroupView) -> None:
        self._group = group
        self._stepped: set[int] = set()
        self._always = False

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._stepping)

    def next_turn(self, restart: bool) -> None:
        """A boundary. ``restart``: the group is a new one."""
        self._stepped.clear()
        self._always = self._always and not restart

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._group.width == 1 or (id(optimizer) in self._stepped and not self._always):
            return
        self._stepped.add(id(optimizer))
        settings = [_settings(group) for group in optimizer.param_groups]
        rate = float(settings[0].get("lr", 0.0)) if settings else 0.0
        row = torch.tensor([len(settings), digest_of(plain_leaves(settings)), rate], dtype=torch.float64)
        rows = self._group.backend.exchange(row, "the first step of an optimizer in this turn")
        worker = next((rank for rank in range(1, len(rows)) if not torch.equal(rows[rank], rows[0])), None)
        if worker is None or not torch.equal(rows[:, 0], rows[:1, 0].expand(len(rows))):
            return  # with other groups nothing can be taken over here: the boundary will say so
        self._always = True
        for group, leaders in zip(
            optimizer.param_groups, self._group.backend.broadcast_object(settings, "the leader's settings"), strict=True
        ):
            for name, value in leaders.items():
                if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
        theirs, leaders = float(rows[worker, 2]), float(rows[0, 2])
        self._group.likeness.differed(worker, f"learning rate ({theirs:g}, leader {leaders:g})")


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What steers the steps of a group of parameters; tensors are on the CPU."""
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }

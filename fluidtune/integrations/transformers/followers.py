"""What keeps a follower's Trainer from writing: it is process 1 to its callbacks, and it never saves a checkpoint."""

from __future__ import annotations

from typing import Any

from transformers import TrainerControl, TrainingArguments


class _Follower:
    """Comes before a class of TrainingArguments: the Trainer's ``should_save`` and ``should_log`` follow from it."""

    process_index = local_process_index = 1


def as_follower(args: TrainingArguments) -> None:
    """Let these arguments be those of a process that writes no files and logs nothing."""
    kind = type(args)
    if not issubclass(kind, _Follower):
        args.__class__ = type(kind.__name__, (_Follower, kind), {})


class NeverSaves(TrainerControl):
    """A Trainer's control in a follower: all of a checkpoint is the leader's, also what each process writes of it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, False if name == "should_save" else value)

"""What a joiner needs of the Trainer itself, beside model, optimizer and scheduler: a part of the trial's state."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState

#: What of a TrainerState belongs to the process, or to the script, and is there before the loop begins.
_NOT_PROGRESS = {
    *("is_local_process_zero", "is_world_process_zero"),
    *("trial_name", "trial_params", "stateful_callbacks"),
}
#: What the Trainer's loop keeps between two logs, in attributes that it does not publish; without them a loss that is
#: logged across a boundary would lack a part. tests/integrations/test_transformers.py fails if one is gone.
LOOP_VALUES = (
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"),
    *("_initial_global_step", "_initial_num_input_tokens_seen", "current_flos"),
)


class TrainerProgress:
    """``over``: the training has run its last epoch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.over = False

    def state_dict(self) -> dict[str, Any]:
        """As plain values and tensors."""
        trainer = self._trainer
        return {
            "state": {name: value for name, value in vars(trainer.state).items() if name not in _NOT_PROGRESS},
            "stop": trainer.control.should_training_stop,
            "callbacks": [callback.state()["attributes"] for callback in self._stateful()],
            "loop": {name: value for name, value in vars(trainer).items() if name in LOOP_VALUES},
            "over": self.over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the Trainer stand where the other one stands, before an epoch."""
        trainer = self._trainer
        vars(trainer.state).update(state["state"])
        trainer.control.should_training_stop = state["stop"]
        for callback, attributes in zip(self._stateful(), state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        for name, value in state["loop"].items():
            setattr(trainer, name, value.to(trainer.args.device) if isinstance(value, torch.Tensor) else value)
        self.over = state["over"]

    def _stateful(self) -> list[ExportableState]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

"""Trials of Hugging Face's Trainer; ``config["stock"]`` runs one as without FluidTune.

A trial reports once an epoch what the Trainer has logged and evaluated in it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from ray import tune
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fluidtune import elastic
from fluidtune.integrations.transformers import ReportCallback, prepare_trainer

Report = Any

#: Kind -> what its Trainer is told beside.
KINDS: dict[str, dict[str, Any]] = {
    "padded": {"logging_steps": 2, "include_num_input_tokens_seen": "non_padding"},
    "clipped": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.2, "logging_steps": 3},
    "classes": {"gradient_accumulation_steps": 2, "logging_steps": 1},
    "smoothed": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "own loss": {"gradient_accumulation_steps": 2, "logging_strategy": "epoch"},
    "by length": {"train_sampling_strategy": "group_by_length", "bf16": False, "weight_decay": 0.1},
    "best": {
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "learning_rate": 0.3,
        "num_train_epochs": 8,
    },
    "steps": {"max_steps": 17, "eval_on_start": True},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss"},
}
#: Kind -> what it is told beside, and a part of the line that says why it stays at one worker.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stream": ({"max_steps": 12}, "IterableDataset"),
    "no length": ({"max_steps": 12}, "no length"),
    "finds its batch size": ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    "integers": ({}, "is quantized"),
}


def texts(count: int = 53, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of 3 to 12 tokens, some of which are not learned."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        tokens = torch.randint(1, 40, (int(torch.randint(3, 13, (1,), generator=generator)),), generator=generator)
        rows.append({"input_ids": tokens, "labels": torch.where(tokens % 7 == 0, -100, tokens)})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    if rows[0]["labels"].dim():
        labels = nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    else:
        labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(texts())


class Unmeasured:
    """A batch sampler without a length."""

    def __iter__(self) -> Any:
        return iter([list(range(at, at + 8)) for at in range(0, 48, 8)])


class Integers(nn.Module):
    """Has a table of integers beside what it learns, as a quantized model does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 1)
        self.table = nn.Parameter(torch.arange(40, dtype=torch.int8), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.words(input_ids).mean(1) + 0.1 * self.table[input_ids].float().mean(1, keepdim=True)
        return {"loss": (scores - 1.0).square().mean(), "logits": scores}


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    wrong = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return 2.0 * wrong / num_items_in_batch


def model(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "integers":
        return Integers()
    if kind == "classes":
        shape = BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForSequenceClassification(shape)
    told = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2, **told))


class Told(TrainerCallback):
    """Reports what is known of an epoch when the next one begins, or the training ends."""

    def __init__(self, report: Report) -> None:
        self.report, self.values = report, dict[str, float]()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        left_out = ("runtime", "per_second", "flos")
        for name, value in logs.items():
            if not any(part in name for part in left_out) and not name.startswith("train_"):
                self.values[f"{name} at {state.global_step}"] = value

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            told, self.values = self.values, {}
            self.report(told)


def labelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "labels": (row["input_ids"].sum() % 2).long()} for row in rows]


class Means(Trainer):
    """Leaves out how many items the whole batch has."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


def made(config: dict[str, Any], report: Report) -> Trainer:
    """The Trainer of a trial."""
    kind, folder = config["kind"], Path(config["folder"])
    if not elastic.is_leader():
        folder = folder / "follower"
    of_kind = KINDS[kind] if kind in KINDS else REFUSED[kind][0]
    told = {"num_train_epochs": config.get("stop", 4), "learning_rate": 0.01, "logging_steps": 2, **of_kind}
    told = {"eval_strategy": "epoch", "save_strategy": "no", **told, **config.get("told", {})}
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=10,
        warmup_steps=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
        **told,
    )
    change = labelled if kind == "classes" else list
    trainer = (Means if config.get("mean") else Trainer)(
        model=model(kind),
        args=args,
        data_collator=padded,
        train_dataset=Stream() if kind == "stream" else change(texts()),
        eval_dataset=change(texts(21, 1)),
        compute_loss_func=own_loss if kind == "own loss" else None,
        callbacks=[Told(report), *([EarlyStoppingCallback(1)] if kind == "best" else [])],
    )
    trainer.remove_callback(PrinterCallback)
    if kind == "no length":
        prepare = trainer.accelerator.prepare
        batches = DataLoader(texts(), batch_sampler=Unmeasured(), collate_fn=padded)
        trainer.get_train_dataloader = lambda: prepare(batches)
    return trainer


def trial(config: dict[str, Any], report: Report) -> dict[str, Any]:
    trainer = made(config, report)
    if not config.get("stock"):
        trainer = prepare_trainer(trainer)
    for _ in range(config.get("trainings", 1)):
        found = trainer.train(resume_from_checkpoint=config.get("saved"))
    folder = Path(trainer.args.output_dir)
    return {
        "weights": {name: value.double() for name, value in trainer.model.state_dict().items()},
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "loss": found.training_loss,
        "best": trainer.state.best_metric or 0.0,
        "flos": trainer.state.total_flos,
        "log": [sorted(entry) for entry in trainer.state.log_history],
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
    }


class Slow(TrainerCallback):
    """A step takes ``step`` seconds for each worker's part; a worker's process dies once, where it is told to.

    ``dies``: (in this epoch, whether in the leader, the file that says that it has).
    """

    def __init__(self, step: float, dies: tuple[int, bool, str] | None) -> None:
        self.step, self.dies = step, dies

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(self.step / elastic.width())
        if self.dies is None or state.epoch < self.dies[0] or Path(self.dies[2]).exists():
            return
        if elastic.width() > 1 and elastic.is_leader() == self.dies[1]:
            Path(self.dies[2]).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def searched(config: dict[str, Any]) -> None:
    """A trial of Ray Tune, with or without a session."""
    args = TrainingArguments(
        output_dir="trainer",
        num_train_epochs=config["epochs"],
        learning_rate=0.003,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
    )
    trainer = Trainer(
        model=model("padded"),
        args=args,
        data_collator=padded,
        train_dataset=texts(),
        eval_dataset=texts(21, 1),
        callbacks=[ReportCallback(), Slow(config["step"], config.get("dies"))],
    )
    trainer = prepare_trainer(trainer)
    checkpoint = tune.get_checkpoint()
    trainer.train(resume_from_checkpoint=f"{checkpoint.to_directory()}/checkpoint" if checkpoint else None)

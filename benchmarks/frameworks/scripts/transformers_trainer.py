"""Search the learning rate of a tiny BERT that Hugging Face's Trainer trains on random tokens."""

import os
import time

import ray
import torch
from outcome import arguments, tell, tune_config
from ray import tune
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


def dataset(count):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 200, (count, 16), generator=generator)
    return [{"input_ids": row, "labels": int(row[0] > 100)} for row in tokens]


class Report(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            tune.report({"loss": logs["loss"], "process": os.getpid()})


def train(config):
    set_seed(0)
    shape = BertConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    settings = TrainingArguments(
        output_dir="trainer",
        learning_rate=config["lr"],
        max_steps=30,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    model = BertForSequenceClassification(shape)
    Trainer(model=model, args=settings, train_dataset=dataset(128), callbacks=[Report()]).train()


if __name__ == "__main__":
    args = arguments(trials=6)
    ray.init(num_cpus=2, include_dashboard=False)
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.grid_search([1e-2, 5e-3, 2e-3, 1e-3, 5e-4, 1e-4][: args.trials])},
        tune_config=tune_config(args),
        run_config=tune.RunConfig(name="transformers_trainer", storage_path=args.storage),
    )
    started = time.perf_counter()
    results = tuner.fit()
    tell(results, time.perf_counter() - started, ["loss"])

"""Search learning rate and batch size of a tiny BERT with Trainer.hyperparameter_search and its backend "ray"."""

import os
import tempfile
import time

import ray
import torch
from outcome import arguments, tell
from ray import tune
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


def dataset(count, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 200, (count, 16), generator=generator)
    return [{"input_ids": row, "labels": int(row[0] > 100)} for row in tokens]


def model_init(trial):
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=200,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
    )


def compute_metrics(prediction):
    right = (prediction.predictions.argmax(-1) == prediction.label_ids).mean()
    return {"accuracy": float(right), "process": os.getpid()}


def hp_space(trial):
    return {
        "learning_rate": tune.loguniform(1e-4, 1e-2),
        "per_device_train_batch_size": tune.choice([8, 16, 32]),
    }


def objective(metrics):
    return metrics["eval_loss"]


if __name__ == "__main__":
    args = arguments(trials=8)
    ray.init(num_cpus=2, include_dashboard=False)
    set_seed(0)
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(
        args=settings,
        model_init=model_init,
        train_dataset=dataset(128, 0),
        eval_dataset=dataset(64, 1),
        compute_metrics=compute_metrics,
    )
    more = {"reuse_actors": True} if args.reuse else {}
    started = time.perf_counter()
    best = trainer.hyperparameter_search(
        hp_space=hp_space,
        compute_objective=objective,
        direction="minimize",
        backend="ray",
        n_trials=args.trials,
        name="hyperparameter_search",
        storage_path=args.storage,
        **more,
    )
    seconds = time.perf_counter() - started
    results = tune.ResultGrid(best.run_summary)
    tell(results, seconds, ["eval_loss", "eval_accuracy"], process="eval_process")

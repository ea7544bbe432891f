"""A script with Hugging Face's Trainer for Ray Tune. It has no line for FluidTune.

A tiny BERT, made from a configuration, reads an image of a digit as a text of 64 grey levels. Run it either way:

    python examples/digits_transformers.py             stock Ray Tune, one device per trial
    fluidtune run examples/digits_transformers.py      trials also grow onto idle devices while they train
"""

import argparse
import os
import shutil
import tempfile

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Report(TrainerCallback):
    """Reports after each save what was logged, with the checkpoint."""

    def on_save(self, args, state, control, **more):
        metrics = {name: value for entry in state.log_history for name, value in entry.items()}
        with tempfile.TemporaryDirectory() as directory:
            saved = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            shutil.copytree(saved, os.path.join(directory, "checkpoint"))
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(directory))


def digits():
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": torch.tensor(images[i]).long(), "labels": int(labels[i])} for i in order]
    return rows[:1437], rows[1437:]


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(config):
    set_seed(config["seed"])
    training, validation = digits()
    shape = BertConfig(
        vocab_size=17,
        hidden_size=config["width"],
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * config["width"],
        max_position_embeddings=64,
        num_labels=10,
    )
    args = TrainingArguments(
        output_dir="trainer",
        num_train_epochs=config["epochs"],
        learning_rate=config["lr"],
        per_device_train_batch_size=config["batch_size"],
        per_device_eval_batch_size=256,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=config["seed"],
    )
    trainer = Trainer(
        model=BertForSequenceClassification(shape),
        args=args,
        train_dataset=training,
        eval_dataset=validation,
        compute_metrics=accuracy,
        callbacks=[Report()],
    )
    checkpoint = tune.get_checkpoint()
    resume = os.path.join(checkpoint.to_directory(), "checkpoint") if checkpoint else None
    trainer.train(resume_from_checkpoint=resume)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="trials")
    parser.add_argument("--epochs", type=int, default=9, help="most epochs of one trial")
    parser.add_argument("--storage", default=None, help="where Tune keeps the results")
    args = parser.parse_args()
    tuner = tune.Tuner(
        train,
        param_space={
            "lr": tune.loguniform(1e-3, 1e-2),
            "width": tune.choice([16, 32]),
            "batch_size": tune.choice([32, 64]),
            "epochs": args.epochs,
            "seed": 0,
        },
        tune_config=tune.TuneConfig(
            metric="eval_accuracy",
            mode="max",
            num_samples=args.samples,
            scheduler=ASHAScheduler(max_t=args.epochs, grace_period=2),
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
        ),
        run_config=tune.RunConfig(name="digits_transformers", storage_path=args.storage),
    )
    best = tuner.fit().get_best_result()
    print(f"best accuracy {best.metrics['eval_accuracy']:.4f} with {best.config}")


if __name__ == "__main__":
    main()

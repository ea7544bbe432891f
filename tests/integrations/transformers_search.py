"""Searches the learning rate of a tiny language model with `Trainer.hyperparameter_search`; prints each objective.

The trial with the larger rate trains four times as long: it can have both cores then.

    python tests/integrations/transformers_search.py STORAGE
"""

import sys
import time

import ray
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from fluidtune import elastic
from fluidtune.integrations.transformers import prepare_trainer


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": row, "labels": row} for row in torch.randint(1, 40, (count, 10), generator=generator)]


def model():
    told = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2, **told))


class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(0.2 / elastic.width())


def space(_):
    rates = ray.tune.grid_search([0.003, 0.01])
    epochs = ray.tune.sample_from(lambda config: 6 if config["learning_rate"] < 0.005 else 24)
    return {"learning_rate": rates, "num_train_epochs": epochs}


def main():
    ray.init(num_cpus=2, include_dashboard=False)
    args = TrainingArguments(
        output_dir=f"{sys.argv[1]}/trainer",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
    )
    data = {"train_dataset": texts(61, 0), "eval_dataset": texts(21, 1)}
    trainer = Trainer(model_init=model, args=args, callbacks=[Slow()], **data)
    best = prepare_trainer(trainer).hyperparameter_search(
        hp_space=space,
        backend="ray",
        n_trials=1,
        storage_path=sys.argv[1],
        name="search",
    )
    results = best.run_summary.results.values()
    print("objectives", *sorted(result["objective"] for result in results))


if __name__ == "__main__":
    main()

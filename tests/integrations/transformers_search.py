"""Searches the learning rate of a tiny language model with `Trainer.hyperparameter_search`; prints each objective.

    python tests/integrations/transformers_search.py STORAGE
"""

import sys

import ray
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from fluidtune.integrations.transformers import prepare_trainer


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": row, "labels": row} for row in torch.randint(1, 40, (count, 10), generator=generator)]


def model():
    told = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2, **told))


def main():
    ray.init(num_cpus=2, include_dashboard=False)
    args = TrainingArguments(
        output_dir=f"{sys.argv[1]}/trainer",
        num_train_epochs=6,
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
    trainer = Trainer(model_init=model, args=args, train_dataset=texts(61, 0), eval_dataset=texts(21, 1))
    best = prepare_trainer(trainer).hyperparameter_search(
        hp_space=lambda _: {"learning_rate": ray.tune.grid_search([0.003, 0.01])},
        backend="ray",
        n_trials=1,
        storage_path=sys.argv[1],
        name="search",
    )
    results = best.run_summary.results.values()
    print("objectives", *sorted(result["objective"] for result in results))


if __name__ == "__main__":
    main()

"""An elastic Horovod script as a trial. Its losses do not depend on its width, and it notes what it does."""

from __future__ import annotations

import os
import time


def scripted(config):
    """Commits after the second of an epoch's four batches and after each epoch; notes each epoch that it completes."""
    import torch
    from ray import tune
    from torch.utils.data import DataLoader, TensorDataset

    from fluidtune.elastic import hvd

    hvd.init()
    torch.manual_seed(int(config["x"]) + hvd.rank())  # the workers' first weights must not matter
    inputs = torch.linspace(-1, 1, 64).reshape(-1, 1)
    data = TensorDataset(inputs, torch.sin(3 * inputs))
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data, seed=int(config["x"]))
    notes = os.path.join(config["notes"], f"{config['x']}-{os.getpid()}")

    def note(line):
        with open(notes, "a") as file:
            file.write(f"{time.time()} {line}\n")

    @hvd.elastic.run
    def train(state):
        note(f"called {hvd.rank()} {hvd.size()} {state.epoch} {sampler.processed_num}")
        while state.epoch < config["iterations"]:
            share = 16 // hvd.size()
            for batch, (x, y) in enumerate(DataLoader(data, batch_size=share, sampler=sampler)):
                time.sleep(config["step"] / 4 / hvd.size())
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                sampler.record_batch(batch, share)
                state.total += float(hvd.allreduce(loss.detach(), name="loss"))
                if sampler.processed_num % 32 == 0:
                    state.commit()
            if hvd.rank() == 0:
                note(f"epoch {state.epoch}")
                tune.report({"value": state.total / 4, "workers": hvd.size()})
            state.epoch, state.total = state.epoch + 1, 0.0
            sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, total=0.0)
    state.register_reset_callbacks([lambda: note(f"reset {hvd.rank()} {hvd.size()}")])
    train(state)


def alone(x, iterations, folder):
    """The values that the script reports without FluidTune: under Horovod's own names, in one process."""
    import horovod.torch as hvd
    from ray import tune

    values = []
    original, tune.report = tune.report, lambda metrics: values.append(metrics["value"])
    folder.mkdir()
    try:
        scripted({"x": x, "iterations": iterations, "step": 0.0, "notes": str(folder)})
    finally:
        tune.report = original
        hvd.shutdown()
    return values

"""The side `elastic_ray` of resize.py: the same training under Horovod's own ElasticRayExecutor.

The network, the data and the global batch are those of resize_job.py. Our host discovery reports one or two slots.
Changing that number is the decision. The resize is over when rank 0 has done a step in a group of the new size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import ray
from horovod.ray import ElasticRayExecutor
from horovod.runner.elastic.discovery import HostDiscovery

from benchmarks.common import ROOT
from benchmarks.resize_job import BATCH
from fluidtune.ray_compat.versions import put_state_where_horovod_looks

#: Seconds of training at one size before the next decision. Longer than
#: the second between two host discoveries of Horovod.
APART = 4.0
#: Seconds after which a resize that has not happened is given up. Far more than any that was seen.
PATIENCE = 120.0


class Slots(HostDiscovery):
    """Reports this machine with `count` slots; `count` may change at any time."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.count = 1

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {self.host: self.count}


def train(steps: str) -> None:
    """An elastic Horovod script. Rank 0 writes a line per step with the time and the group's size.

    ``steps``: the path of these lines. The script ends when a file of that name with ".over" exists.
    """
    import horovod.torch as hvd
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Subset

    from examples.digits_elastic import digits, network

    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = Subset(digits()[0], range(BATCH))
    model = network(48)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(data)

    @hvd.elastic.run
    def run(state: Any) -> None:
        while not state.over:
            for x, y in DataLoader(data, batch_size=BATCH // hvd.size(), sampler=sampler):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            state.step += 1
            sampler.set_epoch(state.step)
            if hvd.rank() == 0:
                with open(steps, "a") as file:
                    file.write(f"{time.time()} {hvd.size()}\n")
            over = torch.tensor(float(os.path.exists(f"{steps}.over")))
            state.over = bool(hvd.broadcast(over, root_rank=0, name="over"))
            state.commit()

    run(hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0, over=False))


def done(steps: Path) -> list[tuple[float, int]]:
    """The time and the group's size of every step."""
    lines = steps.read_text().splitlines() if steps.exists() else []
    return [(float(line.split()[0]), int(line.split()[1])) for line in lines if len(line.split()) == 2]


def resize(slots: Slots, steps: Path, times: int) -> dict[str, list[float]]:
    """Grow and shrink ``times`` times. Returns the seconds of each, and the longest time without a step meanwhile."""
    found: dict[str, list[float]] = {"grow": [], "shrink": [], "grow_stall": [], "shrink_stall": []}
    wait_for(steps, 1, 0.0)
    for kind, size in [("grow", 2), ("shrink", 1)] * times:
        time.sleep(APART)
        decided = time.time()
        slots.count = size
        over = wait_for(steps, size, decided)
        moments = [t for t, _ in done(steps) if t <= over]
        late = [b - a for a, b in itertools.pairwise(moments) if b > decided]
        found[kind].append(over - decided)
        found[f"{kind}_stall"].append(max(late))
    return found


def wait_for(steps: Path, size: int, since: float) -> float:
    """The time of the first step at ``size`` after ``since``. Raises TimeoutError after `PATIENCE` seconds."""
    deadline = time.time() + PATIENCE
    while time.time() < deadline:
        for moment, width in done(steps):
            if moment > since and width == size:
                return moment
        time.sleep(0.02)
    raise TimeoutError(f"no step by {size} workers within {PATIENCE:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="The same training, resized by Horovod's ElasticRayExecutor.")
    parser.add_argument("--times", type=int, required=True, help="how often it grows, and shrinks")
    parser.add_argument("--storage", required=True)
    parser.add_argument("--out", required=True, help="where the measurements go, JSON")
    args = parser.parse_args()
    put_state_where_horovod_looks()
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    slots = Slots(ray.util.get_node_ip_address())
    settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=2, nics={"lo"})
    settings.discovery = slots
    environment = {"PYTHONPATH": str(ROOT), "HOROVOD_LOG_LEVEL": "fatal"}
    executor = ElasticRayExecutor(settings, cpus_per_slot=1, env_vars=environment, override_discovery=False)
    executor.start()
    steps = Path(args.storage) / "steps"
    trainer = threading.Thread(target=executor.run, args=(lambda: train(str(steps)),), daemon=True)
    trainer.start()
    try:
        found = resize(slots, steps, args.times)
    finally:
        Path(f"{steps}.over").touch()
        trainer.join(20)
    Path(args.out).write_text(json.dumps(found))
    os._exit(0)  # the threads of Horovod's driver would keep the process alive


if __name__ == "__main__":
    main()

"""Ray actors whose processes are forked: no Tune, no FluidTune executor. One line differs from a plain Ray program.

python examples/forked_actors.py
"""

from __future__ import annotations

import time

import ray
import torch

import fluidtune


@ray.remote(num_cpus=1)
class Model:
    def __init__(self, width: int) -> None:
        self.net = torch.nn.Linear(width, width)

    def apply(self, value: float) -> float:
        with torch.no_grad():
            return float(self.net(torch.full((1, self.net.in_features), value)).sum())


def main() -> None:
    ray.init(num_cpus=8, runtime_env=fluidtune.forked())  # without forked(): a plain Ray program
    time.sleep(10)  # the server imports meanwhile; without this wait the first processes would be plain ones
    started = time.perf_counter()
    models = [Model.remote(width) for width in (8, 16, 32, 64)]
    print([round(each, 3) for each in ray.get([model.apply.remote(1.0) for model in models])])
    print(f"four actors answered after {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()

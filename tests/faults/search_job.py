"""A driver to kill: ASHA over trials that run one at a time. `python -m tests.faults.search_job MODE STORAGE`.

MODE is new or restore.
"""

from __future__ import annotations

import os
import random
import sys
import time

TRIALS, LAST = 18, 8


def train(config):
    from ray import tune

    from fluidtune import elastic

    for epoch in elastic.epochs(0, LAST):
        time.sleep(0.05)
        tune.report({"score": random.Random(f"{config['x']} {epoch}").random()})


def main():
    mode, storage = sys.argv[1:]
    import ray
    from ray import tune

    import fluidtune

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    path, executor = os.path.join(storage, "job"), fluidtune.FluidExecutor(devices="cpu:1", max_packing=1)
    if mode == "restore" and fluidtune.Tuner.can_restore(path):
        tuner = fluidtune.Tuner.restore(path, train, executor=executor)
    else:
        tuner = fluidtune.Tuner(
            train,
            param_space={"x": tune.grid_search(list(range(TRIALS)))},
            tune_config=tune.TuneConfig(
                metric="score",
                mode="max",
                max_concurrent_trials=1,
                scheduler=tune.schedulers.ASHAScheduler(max_t=LAST, reduction_factor=2),
            ),
            run_config=tune.RunConfig(name="job", storage_path=storage, verbose=0),
            executor=executor,
        )
    assert not tuner.fit().errors


if __name__ == "__main__":
    main()

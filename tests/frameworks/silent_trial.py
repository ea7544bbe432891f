"""Code of a trial as a follower runs it: it names a mode and a place for all that its trackers record.

``python silent_trial.py FOLDER WHERE``: it records nothing in FOLDER. ``WHERE``: "imported before" the silence, or not.
"""

import os
import sys
import tempfile

folder, where = sys.argv[1:]
if where == "imported before":
    import mlflow
    import tensorboardX
    import torch.utils.tensorboard
    import wandb

    mlflow.set_tracking_uri(f"sqlite:///{folder}/first.db")  # as a module of the trial's may do

from fluidtune.cluster.hosting.silent_trackers import silent  # noqa: E402

with tempfile.TemporaryDirectory() as own:
    os.chdir(own)
    with silent(own):
        import mlflow
        import tensorboardX
        import torch.utils.tensorboard
        import wandb

        wandb.init(mode="offline", dir=folder, project="search").log({"x": 1})
        wandb.finish()
        if where != "imported before":
            mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        mlflow.set_experiment("search")
        with mlflow.start_run():
            mlflow.log_metric("x", 1)
        client = mlflow.MlflowClient(f"sqlite:///{folder}/client.db")
        client.log_metric(client.create_run("0").info.run_id, "x", 1)
        for module in (torch.utils.tensorboard, tensorboardX):
            with module.SummaryWriter(f"{folder}/board") as board:
                board.add_scalar("x", 1, 1)
    assert wandb.init.__module__.startswith("wandb") and not hasattr(wandb.init, "__wrapped__")
    os.chdir("/")
print("silent")

"""What a training loop calls so that its trial can run on one worker or several, and can be resized in place.

    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for epoch in elastic.epochs(0, 10):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)          # a mean over the samples
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        tune.report({"loss": elastic.mean(total, count)})

The result does not depend on the number of workers: a batch is divided, never repeated, and gradients and batch
statistics are those of the whole batch. What is drawn at random for each sample (dropout, augmentation) differs with
the width, as in any data-parallel training; what the loop draws once a batch does not (`loop_draws`). If a step draws
for each sample on the CPU, give the DataLoader a ``generator``: otherwise the DataLoader shuffles from the same stream.
Outside FluidTune the same file runs unchanged.

Every worker runs the function, and only the leader's side effects are seen: its reports and checkpoints, what it
prints, and files below its working directory. Each follower has a working directory of its own, empty and removed
when the follower ends; its log files are there. Weights & Biases, MLflow and TensorBoard record nothing of a follower
(docs/trackers.md). What remains is done once a worker: files at absolute paths, databases, requests to a server, other
trackers. Put these under `is_leader`. With ``RAY_CHDIR_TO_TRIAL_DIR=0`` the workers of one machine share the directory
of the script.

What cannot be divided so (weights of classes, contrastive losses) is listed at `prepare`; `rehearsal` finds most of it
before a trial grows, and `common_batches` compares each new worker with the leader.

From top to bottom; each folder imports only what is below it:

| where | what is there |
| --- | --- |
| `loop`, `frameworks`, `hvd` | what a training loop calls; what a framework calls that owns it; Horovod's names |
| `checks` | whether a trial's code can be divided, tried before the trial grows |
| `group` | the workers of a trial: their session, its boundaries, resizes and losses |
| `data` | what a loop works with: batches, gradients, batch statistics, random draws, state |
| `alike` | whether the workers compute the same, and so whether the trial may have several |
| `commits` | the states to which a trial can return |
| `transport` | how workers find each other and exchange tensors |
| `errors`, `random_streams` | what all of them use |

Start reading with `group`. No width is decided here: the host of the session does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fluidtune.group_facts import Reform

from .errors import GroupLost, Left
from .group.current_session import LazySession, current, use, wake_on_first_use
from .group.loop_thread import LoopOutcome, LoopThread
from .group.worker_session import FollowerSession, LeaderSession, WorkerSession

if TYPE_CHECKING:
    from .commits.commit_store import Commit, CommitStore, Files, LocalFiles
    from .frameworks import (
        agreed,
        barrier,
        boundary,
        broadcast,
        gather,
        one_worker,
        parts,
        rank,
        reduce,
        width,
        work_on,
    )
    from .group.session import ElasticSession
    from .loop import epochs, is_leader, mean, prepare, samples, state

__all__ = [
    "Commit",
    "CommitStore",
    "ElasticSession",
    "Files",
    "FollowerSession",
    "GroupLost",
    "LazySession",
    "LeaderSession",
    "Left",
    "LocalFiles",
    "LoopOutcome",
    "LoopThread",
    "Reform",
    "WorkerSession",
    "agreed",
    "barrier",
    "boundary",
    "broadcast",
    "current",
    "epochs",
    "gather",
    "is_leader",
    "mean",
    "one_worker",
    "parts",
    "prepare",
    "rank",
    "reduce",
    "samples",
    "state",
    "use",
    "wake_on_first_use",
    "width",
    "work_on",
]

_HOMES = {
    **dict.fromkeys(("Commit", "CommitStore", "Files", "LocalFiles"), "commits.commit_store"),
    **dict.fromkeys(("agreed", "barrier", "boundary", "broadcast", "gather", "one_worker"), "frameworks"),
    **dict.fromkeys(("parts", "rank", "reduce", "width", "work_on"), "frameworks"),
    **dict.fromkeys(("epochs", "is_leader", "mean", "prepare", "samples", "state"), "loop"),
    "ElasticSession": "group.session",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a driver and a worker on an emulated device need no torch.
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What a training loop calls so that its work is not lost when its trial is moved, paused or restored.

    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for epoch in elastic.epochs(0, 10):
        for x, y in loader:
            ...
        tune.report({"loss": ...})

Three functions say what a commit holds and where it may be taken: `prepare`, `state` and `epochs`. Nothing of them is
about the devices that a trial has: every trial can have several, as calls of its modules are divided (`divided`), but
for those of a module that is given to `keep_whole`. Outside FluidTune the same file runs unchanged.

Before a restarted trial goes on from a commit, the commit is proved: one epoch is run again, and must make what it made
before. So a loop that keeps something besides what it has prepared never goes on wrongly: it begins anew.

| where | what is there |
| --- | --- |
| `loop` | what a training loop calls |
| `session`, `current_session`, `leader_session` | a trial's session, how the loop finds it, what a host asks of it |
| `commits` | the states to which a trial can return, and their proof |
| `data` | what a trial consists of, as one value |
| `divided` | calls of modules among several devices |
| `errors`, `random_streams`, `references` | what all of them use |

Start reading with `session`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .current_session import LazySession, current, use
from .errors import BeginsAnew, Left
from .leader_session import LeaderSession

if TYPE_CHECKING:
    from .commits.commit_store import Commit, CommitStore, Files
    from .divided.module_calls import keep_whole
    from .loop import epochs, prepare, state
    from .session import ElasticSession

__all__ = [
    "BeginsAnew",
    "Commit",
    "CommitStore",
    "ElasticSession",
    "Files",
    "LazySession",
    "LeaderSession",
    "Left",
    "current",
    "epochs",
    "keep_whole",
    "prepare",
    "state",
    "use",
]

_HOMES = {
    **dict.fromkeys(("Commit", "CommitStore", "Files"), "commits.commit_store"),
    **dict.fromkeys(("epochs", "prepare", "state"), "loop"),
    "ElasticSession": "session",
    "keep_whole": "divided.module_calls",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a driver and a worker on an emulated device need no torch.
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

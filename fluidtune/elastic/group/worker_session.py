"""The protocols between a worker process and the session of the trial that it hosts.

A worker process (`fluidtune.cluster.hosting.worker`, here *the host*) runs a trial's code and drives a session beside
it. The trial's first worker leads: it runs the trial and reports to Tune. The others follow: they only share the
leader's work. The engine decides whether and when a trial is resized; a session carries it out at the trial's next
*boundary*, which is between two of its iterations.

| session | what stands behind it |
| --- | --- |
| `fluidtune.elastic.ElasticSession` | training on real devices, with a collective backend |
| `fluidtune.elastic.LazySession` | a leader whose loop has not called `fluidtune.elastic` so far |
| `fluidtune.cluster.emulated.EmulatedSession` | emulated devices, where nothing is computed |

`tests.contracts.worker_sessions` is this contract as tests: a new session's test file is a fixture and an import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fluidtune.group_facts import GroupFacts, Reform


class WorkerSession(Protocol):
    """What the host asks of any session.

    The host's main thread calls every method, unless the method says otherwise. The trial's own loop may run in
    another thread meanwhile; it calls what the implementation offers it, which is not part of the protocol.
    """

    def leave(self) -> None:
        """End this worker's part in the trial, when the host unloads it; idempotent, returns at once.

        A follower that waits to enter ends at once. A leader's group ends at its next boundary at the latest, where the
        session may end the leader's loop with `Left`.
        """
        ...

    def close(self) -> None:
        """Leave the group and free what the session holds (sockets, threads, its device); idempotent.

        Called when the trial's code has ended, however it ended. The process may then host another session.
        """
        ...


class LeaderSession(WorkerSession, Protocol):
    """The session of a trial's first worker."""

    def facts(self) -> GroupFacts:
        """What the leader knows of its group now. Any thread calls it; it returns at once."""
        ...

    def fails_divided(self, error: BaseException) -> str | None:
        """The loop has raised ``error``: why it must have one worker, in a line; None: the error is the trial's.

        In the first turn whose batches are divided the error may come of that. Alone the turn may not fail.
        """
        ...

    def direct(self, reform: Reform) -> None:
        """Re-form at the next boundary at which all joiners stand ready; the trial goes on until then.

        Called between two iterations, only if the session is elastic. Replaces a directive that was not carried out.
        """
        ...

    def boundary(self, done: int) -> object:
        """Let a class trainable come to its boundary: called before each of its iterations, if the session is elastic.

        ``done``: the iterations done so far. (A function's loop comes to its boundaries by itself.)

        Raises:
            Left: `leave` was called; the trial is committed, and its followers end.
            GroupLost: a follower died.
        """
        ...

    def forget_resume(self) -> None:
        """Do not go on from the trial's commit. Called before the loop runs: Tune has given it another trial's state.

        This method and the next two do nothing in a session that has no commit to go on from.
        """
        return

    def prefer_checkpoint(self) -> None:
        """Go on without the trial's commit. Called before the loop runs: Tune has restored a newer checkpoint."""
        return

    def ended(self) -> None:
        """The trial's function has returned.

        Raises:
            GroupLost: it has not come to the loop of the trial's commit, and so has done nothing; it begins anew.
        """
        return

    def load_commit(self) -> None:
        """Put the commit's state into a class trainable's objects before its first step, so that Tune can save it."""
        return


class FollowerSession(WorkerSession, Protocol):
    """The session of any other worker of a trial. The order of calls: `run` and `wait_ready`, then `enter`."""

    #: Names the trial, for the name of the thread.
    trial: str

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Take part in the trial from `enter` until dismissed, then `close`. It has a thread to itself.

        ``fn(*args)`` is the trial's code; a session whose followers compute nothing need not call it. Returns what
        ``fn`` returns.

        Raises:
            Left: dismissed, or asked to `leave`.
            GroupLost: the leader or another follower died.
            BaseException: what ``fn`` raised.
        """
        ...

    def wait_ready(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds until the thread in `run` is ready to enter a group. False if it is not.

        False at once when `run` has ended.
        """
        ...

    def enter(self, reform: Reform) -> None:
        """Join this generation when the leader comes to it; returns at once. Replaces one that did not form yet."""
        ...

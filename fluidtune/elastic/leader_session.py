"""What a worker process asks of the session of the trial that it hosts.

A worker process (`fluidtune.cluster.hosting.worker`, here *the host*) runs a trial's code and drives a session beside
it. A session takes care that the trial's work is not lost: it commits at the trial's *boundaries*, which are between
two of its iterations.

| session | what stands behind it |
| --- | --- |
| `fluidtune.elastic.ElasticSession` | training on real devices |
| `fluidtune.elastic.LazySession` | a trial whose loop has not called `fluidtune.elastic` so far |
| `fluidtune.cluster.emulated.EmulatedSession` | emulated devices, where nothing is computed |

`tests.contracts.worker_sessions` is this contract as tests: a new session's test file is a fixture and an import.
"""

from __future__ import annotations

from typing import Protocol

from fluidtune.group_facts import GroupFacts


class LeaderSession(Protocol):
    """The host's main thread calls every method, unless the method says otherwise.

    The trial's own loop may run in another thread meanwhile; it calls what the implementation offers it, which is not
    part of the protocol. The methods with a body do nothing in a session that has no commit to go on from.
    """

    def facts(self) -> GroupFacts:
        """What the session knows of the trial now. Any thread calls it; it returns at once."""
        ...

    def leave(self) -> None:
        """End the trial at its next boundary, with `Left`, when the host unloads it; idempotent, returns at once."""
        ...

    def close(self) -> None:
        """Free what the session holds (threads, its device); idempotent.

        Called when the trial's code has ended, however it ended. The process may then host another session.
        """
        ...

    def boundary(self, done: int) -> object:
        """Let a class trainable come to its boundary: called before each of its iterations, if the session is elastic.

        ``done``: the iterations done so far; a second call with the same number does nothing. (A function's loop comes
        to its boundaries by itself.)

        Raises:
            Left: `leave` was called; the trial is committed.
            BeginsAnew: an iteration that ran again has shown that the trial's commits are not whole.
        """
        ...

    def unproved_by(self, error: BaseException | None) -> str | None:
        """Why the trial begins anew, in a line, if the iteration that has just run is one that proves its commit.

        ``error``: what the trial's code has raised; None: it has reported what Tune has not seen. Returns None if the
        trial is itself: then the error, or the result, is its own.
        """
        return None

    def forget_resume(self) -> None:
        """Go on without the trial's commit. Called before the loop runs: Tune has given it another trial's state."""
        return

    def prefer_checkpoint(self) -> None:
        """Go on without the trial's commit. Called before the loop runs: Tune has restored a newer checkpoint."""
        return

    def ended(self) -> None:
        """The trial's function has returned.

        Raises:
            BeginsAnew: it has not come to the loop of the trial's commit, and so has done nothing; it begins anew.
        """
        return

    def load_commit(self) -> None:
        """Put the commit's state into a class trainable's objects before its first step, so that Tune can save it."""
        return

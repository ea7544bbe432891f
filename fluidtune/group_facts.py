"""What a trial's leader knows of itself and its followers: it tells the driver when it is loaded, and with every reply.

Three parts make the facts: the session what the trial goes on from (`fluidtune.elastic.LeaderSession.facts`), the
division what its followers do (`fluidtune.elastic.divided`), and the host puts both together. The trial's life in the
driver reads them (`fluidtune.trials`). A new fact is a field here, its value in one of these, and a line that reads it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GroupFacts:
    """The defaults hold for a trial that cannot have followers, and whose loop has not called `fluidtune.elastic`."""

    #: The trial has commits. It may become true as the loop runs, and then stays true.
    is_elastic: bool = False
    #: Where followers find the leader. None: it listens nowhere.
    address: Hashable = None
    #: Only processes of the leader's own node reach the address.
    one_node: bool = False
    #: It has called a module with parameters, and so can grow. It may become true as the loop runs, and then stays.
    calls_modules: bool = False
    #: How many workers took part in the whole last iteration, the leader included. 0: that changed meanwhile.
    width: int = 1
    #: What checks have found since the last reply: the name of a module, "divided" or "whole", and why.
    checked: tuple[tuple[str, str, str], ...] = ()
    #: Why followers do not help the trial, in a line. None: they do, or that is not known yet.
    ungrowable: str | None = None
    #: Calls are divided among this many workers now: since the newest one came, the seconds until the first divided
    #: call, and those by which calls took longer meanwhile. None: no such change since the last reply.
    grown: tuple[int, float, float] | None = None
    #: The loop is writing its last commit, for which the host waits.
    committing: bool = False
    #: Why no commit is possible, or why the last one failed, in a line: what the trial has done since would be lost.
    cannot_commit: str | None = None
    #: The iteration that it has gone on from since it was loaded, by its own count. None: it has begun none so far.
    began_at: int | None = None
    #: The random streams with which the trial's code began. None: none, or they were sent before.
    streams: dict[str, Any] | None = field(default=None, repr=False)

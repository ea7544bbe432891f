"""Which requests of one model form a batch: the protocol `BatchFormer`. All times are seconds.

A former holds the requests of one model that wait. Asked for a batch that would start at some moment, it answers with a
`Candidate`. It decides neither when the batch starts (`model_side.StartPolicy`) nor on which GPU. It never touches a
clock: a moment is an argument.

| former | order | gives up |
| --- | --- | --- |
| `window` | by deadline | the heads that would keep the batch below its target (Nexus' rule, Symphony's default) |
| `orloj` | by score, for times that vary | what would be late by its expected time |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from symphony_serve.messages import Refuse, Request


class Candidate(NamedTuple):
    """A batch that a model could run next.

    size: its requests; at least 1.
    deadline: the earliest deadline in it (of `orloj`: of the requests from which it is chosen), less `Delays.margin`.
    seconds: how long it takes; where times vary, how long that is expected to take. The last moment at which it may
        start is ``deadline - seconds``.
    next_seconds: how long the next larger batch would take. Infinite if there is none, or if waiting for one more
        request is of no use to the former: then the batch may start at once. Symphony starts a batch no earlier than
        ``deadline - next_seconds``.
    longest: how long it may take, where times vary. A GPU that needs a multiple of it is taken for lost.
    overlap: its last seconds, in which a GPU that is a pipeline of stages can run the next batch (`Profile.overlap`).
    """

    size: int
    deadline: float
    seconds: float
    next_seconds: float
    longest: float = 0.0
    overlap: float = 0.0


class BatchFormer(Protocol):
    """The requests of one model that wait, and the rule that makes batches of them.

    Moments of start mostly grow from call to call. They may go back a little; what was given up then stays given up.
    `tests/serve/test_formers.py` has the contract as tests: add yours to its fixture `make`.
    """

    def add(self, request: Request) -> None:
        """A request came, or came back from a GPU that was lost. Its id is not the id of another one that waits.

        Raises ServeError if its deadline is not finite; it does not wait then.
        """

    def remove(self, request_id: int) -> Request | None:
        """Take out a request that waits, because it was cancelled. None: no such request waits."""

    def form(self, start: float) -> Candidate | None:
        """The batch that the model could start at ``start``, or None if there is none.

        Gives up every request that this former will never serve from ``start`` on, see `refused`. The candidate meets
        ``start <= deadline - seconds``, in exactly this form: the same sum in another order may round differently.
        Calling it again with the same moment gives the same candidate.
        """

    def changes_at(self) -> float:
        """The last moment of start for which the latest answer of `form` holds if no request is added or removed.

        After it, `form` must be called anew. Infinite: it holds until a request comes.
        """

    def take(self) -> tuple[Request, ...]:
        """Remove the requests of the latest candidate and return them, the earliest deadline first.

        No request was added or removed since that candidate was formed.
        """

    def refused(self) -> Sequence[Refuse]:
        """The requests that were given up since the last call, each with its reason. They have left the former."""

    def waiting(self) -> Sequence[Request]:
        """The requests that wait, the earliest deadline first."""

    def __len__(self) -> int:
        """How many requests wait."""

    def set_rate(self, rate: float) -> None:
        """The model's measured requests per second. A former that needs no rate does nothing."""

    def set_profile(self, profile: Any) -> None:
        """Batches take other times from now on. The profile is of the kind that this former was made with."""

"""The agent: says how things are with one tuning app, and tells the app's executor which GPUs the app holds.

It is a state machine like the arbiter. Five times a second it says what the app still has to do. The arbiter answers
with all leases of the app, and the agent derives from them which GPUs were gained, which have to be left and which are
lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from themis_bridge import messages as m
from themis_bridge.locality import Gpu


class Work(Protocol):
    """What the agent asks its app."""

    def report(self) -> m.Report:
        """The work left now, and what places cost."""


@dataclass(frozen=True)
class Notice:
    """News for the executor about a GPU and the token of its lease."""

    gpu: Gpu
    token: int


@dataclass(frozen=True)
class Gained(Notice):
    """From now on trials may run on the GPU, under this token. ``group``: as of `messages.LeaseView`."""

    group: str = field(default="", compare=False)


@dataclass(frozen=True)
class Leave(Notice):
    """The lease ends in ``within`` seconds and is not renewed: commit, leave the GPU, then call `Agent.vacated`."""

    within: float


@dataclass(frozen=True)
class Lost(Notice):
    """The app does not hold the GPU any more; what still runs there is killed."""


class Agent:
    """The agent of one app.

    session: a name that is unique to this run of the app's driver.
    user, together, bundle: as of `messages.Heartbeat`.
    """

    def __init__(
        self,
        app: str,
        session: str,
        work: Work,
        user: str = "",
        together: int = 1,
        bundle: Mapping[str, float] | None = None,
    ):
        self.app, self.session, self.work = app, session, work
        self.user, self.together, self.bundle = user, together, dict(bundle or {})
        #: As of `messages.Heartbeat`.
        self.life = ""
        #: GPU id -> its lease, by the arbiter's last message.
        self.leases: dict[str, m.LeaseView] = {}
        #: GPUs that are on their way to it, by the arbiter's last message; told only if it needs gangs.
        self.promised = 0
        #: Why the arbiter refused this app for good; None if it did not.
        self.refused: str | None = None
        #: Leases that the executor gave up by itself, until the arbiter's message has them no more: (GPU, token).
        self._left: set[tuple[str, int]] = set()
        #: Digest of the newest `messages.Leases`.
        self._known = ""
        #: Number of messages sent.
        self._sent = 0

    def heartbeat(self) -> m.Heartbeat:
        """What to send to the arbiter five times a second. The answer has the app's leases if they have changed."""
        self._sent += 1
        left = tuple(sorted(self._left))
        who = self.user, self.life, self.together, self.bundle
        return m.Heartbeat(self.app, self.session, self._sent, self.work.report(), self._known, left, *who)

    def take(self, answer: m.Leases | m.Refused | None) -> list[Notice]:
        """Take the answer to the last message. Returns the notices to the executor."""
        if isinstance(answer, m.Refused) and answer.ends:
            self.refused = answer.why
            return self._drop_leases(self.leases)
        return self._update_leases(answer) if isinstance(answer, m.Leases) else []

    def vacated(self, gpu: str, token: int) -> None:
        """The executor has left the GPU for good.

        token: of the lease that it has left. A newer one of the GPU, of which it may not have heard yet, is kept.
        """
        view = self.leases.get(gpu)
        if view is not None and token == view.token:
            del self.leases[gpu]
            self._left.add((gpu, view.token))

    def _update_leases(self, told: m.Leases) -> list[Notice]:
        self._known, self.promised = told.digest, told.promised
        self._left &= {(view.gpu.id, view.token) for view in told.leases}
        new = {view.gpu.id: view for view in told.leases if (view.gpu.id, view.token) not in self._left}
        out = self._drop_leases(
            gpu for gpu, view in self.leases.items() if gpu not in new or new[gpu].token != view.token
        )
        for gpu, view in new.items():
            known = self.leases.get(gpu)
            if known is None:
                out.append(Gained(view.gpu, view.token, view.group))
            if view.ending and not (known is not None and known.ending):
                out.append(Leave(view.gpu, view.token, view.remaining))
            self.leases[gpu] = view
        return out

    def _drop_leases(self, gpus: Iterable[str]) -> list[Notice]:
        return [Lost(view.gpu, view.token) for view in [self.leases.pop(gpu) for gpu in list(gpus)]]

"""What an app of the twin can do to be served before its turn: lie in its messages, split, or come back.

`Liar` is an agent whose messages are false. `split` and `come_back` change the apps of a workload. Lies about the work
and about placements are in `apps.TwinApp`, because there all messages stay consistent with each other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from benchmarks.shared_cluster.apps import Spec, TwinAgent, TwinApp
from themis_bridge import messages as m
from themis_bridge.agent import Notice
from themis_bridge.fairness import JobInfo


@dataclass(frozen=True)
class Lie:
    """How an app lies in its messages; each factor is 1 for the truth.

    behind: it multiplies every rho that it reports or bids, and the times until its end that they imply.
    shorter: it divides its T_id and T_cluster, and all work that it claims to have had.
    ends: in each report it ends in this number of seconds on the GPUs that it holds; None: it says what is true.
    """

    behind: float = 1.0
    shorter: float = 1.0
    ends: float | None = None


#: No lie.
TRUTH = Lie()


class Liar(TwinAgent):
    """An agent that lies. ``lie``: how."""

    def __init__(self, app: str, session: str, work: TwinApp, user: str, lie: Lie, together: int = 1):
        super().__init__(app, session, work, user, together)
        self._lie = lie

    def handle(self, instruction: m.Instruction) -> tuple[list[m.AppEvent], list[Notice]]:
        events, notices = super().handle(instruction)
        return [self._false(event) for event in events], notices

    def _false(self, event: m.AppEvent) -> m.AppEvent:
        lie = self._lie
        factor = lie.behind * lie.shorter
        if isinstance(event, m.BidAnswer):
            rows = {row: rho * factor for row, rho in event.bid.rho.items()}
            return replace(event, bid=replace(event.bid, rho=rows))
        if not isinstance(event, m.RhoAnswer):
            return event
        told = event.report
        ends = None if told.ends is None else told.ends * lie.behind
        return replace(
            event,
            report=replace(
                told,
                rho=told.rho * factor,
                best=told.best * factor,
                ends=ends if lie.ends is None else lie.ends,
                whole=told.whole / lie.shorter,
                fair=told.fair / lie.shorter,
            ),
        )


def split(spec: Spec) -> list[Spec]:
    """The app as two of the same user, each with half of its work, and half as wide where it cannot have half the jobs.

    A phase of one job that can use one GPU only stays whole in the first app.
    """
    halves: list[list[list[JobInfo]]] = [[], []]
    for jobs in spec.phases:
        if len(jobs) > 1:
            parts = [jobs[::2], jobs[1::2]]
        elif jobs[0].max_gpus > 1:
            width = jobs[0].max_gpus // 2
            share = width / jobs[0].max_gpus
            part = replace(jobs[0], max_gpus=width, iters_remaining=jobs[0].iters_remaining * share)
            rest = replace(
                jobs[0],
                max_gpus=jobs[0].max_gpus - width,
                iters_remaining=jobs[0].iters_remaining * (1 - share),
            )
            parts = [[rest], [part]]
        else:
            parts = [jobs, []]
        for half, part_of in zip(halves, parts, strict=True):
            if part_of:
                half.append(part_of)
    return [
        replace(spec, name=f"{spec.name}-{number}", phases=phases, user=spec.user or spec.name)
        for number, phases in enumerate(halves)
        if phases
    ]


def come_back(spec: Spec, parts: int = 4) -> list[Spec]:
    """The app as several of the same user, one after the other: each leaves when a further part of the work is done."""
    share = 1 / parts
    phases = [[replace(job, iters_remaining=job.iters_remaining * share) for job in jobs] for jobs in spec.phases]
    if len(spec.phases) >= parts:
        # It leaves between phases.
        cuts = [round(len(spec.phases) * number / parts) for number in range(parts + 1)]
        pieces = [spec.phases[begin:end] for begin, end in itertools.pairwise(cuts)]
    elif len(spec.phases) == 1:
        pieces = [phases] * parts
    else:
        pieces = [[jobs] for jobs in spec.phases]
    made: list[Spec] = []
    for number, piece in enumerate(pieces):
        before = made[-1].name if made else ""
        made.append(
            replace(spec, name=f"{spec.name}-{number}", phases=piece, user=spec.user or spec.name, follows=before)
        )
    return made

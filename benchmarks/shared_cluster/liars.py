"""What an app of the twin can do to be served before its turn: lie in its messages, split, or come back.

`Liar` is an agent whose messages are false. `split` and `come_back` change the apps of a workload. Lies about the work
and about placements are in `apps.TwinApp`, because there all messages stay consistent with each other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from benchmarks.shared_cluster.apps import Spec, TwinApp
from themis_bridge import messages as m
from themis_bridge.agent import Agent
from themis_bridge.fairness import JobInfo
from themis_bridge.locality import Phase


@dataclass(frozen=True)
class Lie:
    """How an app lies in its reports; each factor is 1 for the truth.

    behind: it multiplies the work left that it reports.
    done: it multiplies the work done that it reports.
    always: in each report it has so many GPU seconds of work left; None: it says what is true, but for ``behind``.
    """

    behind: float = 1.0
    done: float = 1.0
    always: float | None = None


#: No lie.
TRUTH = Lie()


class Liar(Agent):
    """An agent that lies. ``lie``: how."""

    def __init__(self, app: str, session: str, work: TwinApp, user: str, lie: Lie, together: int = 1):
        super().__init__(app, session, work, user, together)
        self._lie = lie

    def heartbeat(self) -> m.Heartbeat:
        told, lie = super().heartbeat(), self._lie
        left = sum(kind.work for phase in told.report.phases for kind in phase)
        factor = lie.behind if lie.always is None else lie.always / max(left, 1e-9)
        phases = tuple(Phase(phase).part(factor).kinds for phase in told.report.phases)
        return replace(told, report=replace(told.report, phases=phases, done=told.report.done * lie.done))


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

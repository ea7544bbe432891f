"""The table of GPUs, beside a plain list that looks at every GPU each time."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from symphony_serve.gpu_table import Gpu, GpuTable, Held
from symphony_serve.messages import Dispatch
from tests.serve.invariants import check_gpus

A, B = frozenset("a"), frozenset("ab")


@dataclasses.dataclass
class Plain:
    """A GPU in the list. sent: its unanswered batches."""

    id: int
    token: int
    models: Held
    free: float
    ends: float
    plans: int = 0
    open: bool = True
    sent: list[Dispatch] = dataclasses.field(default_factory=list)


class Beside:
    """A table and the list. Times are whole, so that many of them are equal."""

    def __init__(self, ahead: int):
        self.table, self.ahead, self.now = GpuTable(ahead), ahead, 0.0
        self.list: dict[int, Plain] = {}
        self.tokens = 0

    def able(self, models: Held) -> Iterator[Plain]:
        yield from (one for one in self.list.values() if one.models == models and one.open and self.room(one))

    def room(self, one: Plain) -> bool:
        return len(one.sent) <= self.ahead

    def check(self) -> None:
        for models in self.table.pools:
            idle = min((one.id for one in self.able(models) if one.free <= self.now), default=None)
            busy = min(((one.free, one.id) for one in self.able(models) if one.free > self.now), default=(0, None))[1]
            assert _id(self.table.first_idle(self.now, models)) == idle
            assert _id(self.table.next_free(models)) == busy
        assert {one.id: (one.free, one.ends) for one in self.list.values()} == {
            one.id: (one.free, one.ends) for one in self.table.gpus.values()
        }
        check_gpus(self.table)

    def join(self, number: int, models: Held) -> None:
        if number not in self.list:
            self.tokens += 1
            self.table.join(number, self.tokens, self.now, models)
            self.list[number] = Plain(number, self.tokens, models, self.now, self.now)

    def drop(self, number: int) -> None:
        if number in self.list:
            assert self.table.drop(number) == self.list.pop(number).sent

    def hold(self, number: int, models: Held) -> None:
        if number in self.list:
            self.table.hold(self.table.gpus[number], models)
            self.list[number].models = models

    def close(self, number: int) -> None:
        if number in self.list:
            self.table.close(self.table.gpus[number])
            self.list[number].open = False

    def send(self, number: int, seconds: float, overlap: float) -> None:
        one = self.list.get(number)
        if one is None or not one.open or not self.room(one):
            return
        overlap = min(overlap, seconds)
        start = max(self.now, one.free, one.ends - overlap)
        batch = Dispatch(number, one.token, one.plans, "a", (), start, seconds, overlap=overlap)
        self.table.send(self.table.gpus[number], batch)
        one.sent.append(batch)
        one.plans, one.ends, one.free = one.plans + 1, start + seconds, start + seconds - overlap

    def until(self, number: int) -> None:
        """Until the GPU is to be free."""
        if number in self.list:
            self.now = max(self.now, self.list[number].free)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def answer(self, number: int, newer: int, place: int) -> None:
        """The GPU tells of its batch at this place; -1: of one that it has answered. newer: its token is so much."""
        one = self.list.get(number)
        token = one.token + newer if one is not None else 1
        plan = one.plans - len(one.sent) + place if one is not None else place
        over = None
        if one is not None and not newer and plan in [batch.plan for batch in one.sent]:
            (over,) = [batch for batch in one.sent if batch.plan == plan]
            one.sent.remove(over)
            one.free = one.ends = self.now
            for batch in one.sent:
                one.ends = max(batch.start + batch.seconds, one.ends + batch.seconds - batch.overlap)
                one.free = one.ends - batch.overlap
        assert self.table.answer(number, token, plan, self.now) == over


def _id(gpu: Gpu | None) -> int | None:
    return None if gpu is None else gpu.id


#: Of each step, what is done, and what with. Most of it happens to one GPU, so that the batches of one are many.
TIMES = st.sampled_from([0.0, 1.0, 2.0])
STEPS = st.fixed_dictionaries(
    {
        "what": st.sampled_from([*["send", "answer"] * 4, *["until"] * 3, "wait", "join", "hold", "drop", "close"]),
        "number": st.sampled_from([0, 0, 0, 0, 1, 2]),
        "seconds": TIMES,
        "overlap": TIMES,
        "models": st.sampled_from([None, A, B]),
        "newer": st.sampled_from([0, 0, 0, -1, 1]),
        "place": st.integers(-1, 2),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2), st.lists(STEPS, min_size=20, max_size=40))
def test_the_table_finds_the_gpu_that_a_plain_list_finds(ahead, steps):
    beside = Beside(ahead)
    beside.join(0, None)
    for step in steps:
        do = getattr(beside, step["what"])
        do(*(step[name] for name in inspect.signature(do).parameters))
        beside.check()

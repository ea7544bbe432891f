"""Who loads a data set, and who gets its file: against a model, for any order of asking, loading and dying."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fluidtune.cluster.data.kept_data import KeptData

KEYS = st.sampled_from(["digits", "words"])


class Processes(RuleBasedStateMachine):
    """Processes ask, load and die. ``loading``: key -> who was sent to load it. ``waiting``: who waits for which."""

    def __init__(self) -> None:
        super().__init__()
        self.data = KeptData[int]()
        self.loading: dict[str, int] = {}
        self.waiting: dict[int, str] = {}
        self.kept: dict[str, int] = {}
        self.last = 0

    @rule(key=KEYS)
    def ask(self, key: str) -> None:
        self.last += 1
        load, file = self.data.asked(key, self.last)
        assert load == (key not in self.loading and key not in self.kept)
        assert file == self.kept.get(key)
        if load:
            self.loading[key] = self.last
        elif file is None:
            self.waiting[self.last] = key

    @precondition(lambda self: self.loading)
    @rule(draw=st.data())
    def load(self, draw: st.DataObject) -> None:
        key = draw.draw(st.sampled_from(sorted(self.loading)))
        file = self.kept[key] = 100 + self.last
        told = self.data.loaded(self.loading.pop(key), file)
        assert told == [who for who, wanted in self.waiting.items() if wanted == key]
        for who in told:
            del self.waiting[who]

    @rule(draw=st.data())
    def die(self, draw: st.DataObject) -> None:
        who = draw.draw(st.sampled_from(range(self.last + 1)))
        key = next((each for each, loader in self.loading.items() if loader == who), None)
        self.waiting.pop(who, None)
        heirs = [each for each, wanted in self.waiting.items() if wanted == key]
        assert self.data.lost(who) == (heirs[0] if key and heirs else None)
        if key:
            del self.loading[key]
        if key and heirs:
            self.loading[key] = heirs[0]
            del self.waiting[heirs[0]]

    @invariant()
    def what_waits_is_being_loaded(self) -> None:
        assert set(self.waiting.values()) <= self.loading.keys()
        assert sorted(self.data.files()) == sorted(self.kept.values())


TestProcesses = Processes.TestCase


def test_only_who_was_sent_to_load_may_bring_data():
    data = KeptData[str]()
    assert data.asked("digits", "a") == (True, None)
    data.asked("digits", "b")
    with pytest.raises(KeyError, match="no data set is loaded by this connection"):
        data.loaded("b", 5)

"""What a loop reads and gathers that the script has written: by the pass that it reads. No framework runs here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fluidtune import elastic
from fluidtune.integrations.written_loop import WrittenLoop
from tests.contracts.processes import PeerProcess, peer_processes
from tests.elastic.groups import in_session, on_all


def loop_of(model: torch.nn.Module) -> WrittenLoop:
    loop = WrittenLoop("Helper")
    loop.models.append(model)
    return loop


def refusal() -> str:
    session = elastic.current()
    assert session is not None
    return str(session.facts().ungrowable)


@pytest.fixture(scope="module")
def pool() -> Iterator[list[PeerProcess]]:
    with peer_processes(2) as processes:
        yield processes


def gathers_unequal() -> str:
    loop = loop_of(torch.nn.Linear(1, 1))
    try:
        loop.gathered(torch.ones(2, 3 + elastic.rank()))
    except elastic.GroupLost as error:
        return str(error)
    return "gathered"


def test_rows_of_several_lengths_are_not_gathered_and_it_is_said(pool: list[PeerProcess]) -> None:
    assert all("rows of several lengths" in said for said in on_all(pool, gathers_unequal))


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    with in_session():
        yield torch.nn.Linear(1, 1)


def test_within_a_pass_that_is_not_divided_each_worker_has_all(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "width", lambda: 2)
    loop = loop_of(model)
    for _ in loop.pass_over([1], divided=loop.trains):
        assert loop.together
        model.eval()
        for _ in loop.pass_over([1], divided=loop.trains):
            assert not loop.together
            model.train()
            assert not loop.together
        assert loop.together
    for _ in loop.pass_over([1, 2], divided=False):
        break
    assert loop.together


def test_a_mode_that_changes_amid_a_pass_keeps_one_worker_and_says_so(model: torch.nn.Module) -> None:
    loop = loop_of(model)
    for mode in (model.train, model.eval, model.train):
        mode()
        for _ in loop.pass_over([1, 2, 3], divided=loop.trains):
            with torch.no_grad():
                pass
        for number in loop.pass_over([1, 2], divided=loop.trains):
            if number == 2:
                model.eval()
    assert refusal() == "None"
    for _ in loop.pass_over([1, 2], divided=loop.trains):
        model.train()
    assert "Helper: the mode of the models changes between two batches" in refusal()

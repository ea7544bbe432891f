"""What a bid may cost the arbiter is bounded by what an honest agent sends."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from themis_bridge import Bid, JobInfo, ThemisError
from themis_bridge import messages as m
from themis_bridge.auction import shape
from themis_bridge.bids import Valuation, make_bid, most_rows
from themis_bridge.locality import Gpu
from themis_bridge.rounds import Round


def machines(*sizes: int, kinds: int = 1) -> list[Gpu]:
    """GPUs of machines of these sizes; the machines are of so many kinds in turn."""
    return [Gpu(f"m{i}-{j}", f"m{i}", kind=f"kind{i % kinds}") for i, size in enumerate(sizes) for j in range(size)]


def bidding(gpus: list[Gpu]) -> Round:
    """A round that waits for the bid of "a"."""
    offer = m.Offer("a", "s", 1, tuple(gpus), 1.0, len(gpus), (), None)
    return Round(1, 0.0, {"a": "s"}, {gpu.id: gpu for gpu in gpus}, bidders={"a": offer})


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("sizes", [(1,), (8, 8), (4,) * 16, (1,) * 50, (64,), (3, 5, 7, 16)])
@pytest.mark.parametrize("width", [1, 2, 8, 1000])
def test_no_honest_bid_is_too_large(width: int, sizes: tuple[int, ...], kinds: int) -> None:
    gpus = machines(*sizes, kinds=kinds)
    bid = make_bid("a", Valuation([[JobInfo(10, 10.0, width)] * 60], 0.0, 100.0), [], gpus)
    assert len(bid.rho) <= most_rows(gpus)
    told = bidding(gpus).plain_bid(m.BidAnswer("a", "s", 1, bid))
    assert (told.app, told.rho) == (bid.app, bid.rho)


def test_of_a_bid_with_too_many_rows_no_row_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = machines(16)
    names = [gpu.id for gpu in gpus]
    rows = map(frozenset, chain.from_iterable(combinations(names, size) for size in range(17)))
    bid = Bid("a", {row: 1.0 / (1 + len(row)) for row in rows})
    monkeypatch.setattr(Bid, "check", lambda *args: pytest.fail("its rows were compared with each other"))
    with pytest.raises(ThemisError, match="65536 subsets"):
        bidding(gpus).plain_bid(m.BidAnswer("a", "s", 1, bid))


def test_a_gang_that_the_offer_cannot_hold_is_cut_into_the_same_pieces() -> None:
    for number in (1, 5, 16):
        bid = Bid("a", {frozenset(): 1.0}, gang=1 << 62)
        gang = bidding(machines(number)).plain_bid(m.BidAnswer("a", "s", 1, bid)).gang
        assert number < gang <= 2 * number
        for count in range(number + 1):
            assert shape([count], gang) == shape([count], 1 << 62)
    with pytest.raises(ThemisError, match="63 bits"):
        bidding(machines(4)).plain_bid(m.BidAnswer("a", "s", 1, Bid("a", {frozenset(): 1.0}, gang=1 << 10**6)))

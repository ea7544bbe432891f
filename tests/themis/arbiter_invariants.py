"""The invariants of an arbiter, asserted after any event."""

from __future__ import annotations

from themis_bridge.arbiter import Arbiter


def check_arbiter(arbiter: Arbiter) -> None:
    """Asserts every invariant of what the arbiter knows."""
    state = arbiter.state
    for lease in state.leases:
        assert lease.gpu in state.gpus, f"{lease} of a GPU that is not in the cluster"
        assert lease.token <= state.leases.token, f"{lease} has a token that was never given"
        assert lease.app in state.apps, f"{lease} of an app that is not known"
        assert not (lease.waits and lease.ending), f"{lease} waits and ends, and its heir would wait as long"
        assert lease.heir is None or lease.heir in state.apps, f"{lease} is promised to an app that is not known"
    assert not state.apps.keys() & state.away.keys(), "an app that is here and away"
    assert not arbiter.auctioneer.failed, "a policy raised an exception; the log says which"
    assert state.reports.keys() <= state.apps.keys(), "a report of an app that is not here"

"""The agent: what it makes of the arbiter's answers."""

from __future__ import annotations

from tests.themis.cluster import Job
from themis_bridge import messages as m
from themis_bridge.agent import Agent, Gained, Leave, Lost
from themis_bridge.locality import Gpu

GPU = Gpu("g", "m")


def told(*tokens: int, **more) -> m.Leases:
    """Leases of the GPU under these tokens."""
    return m.Leases(f"{tokens}{more}", tuple(m.LeaseView(GPU, token, "group", **more) for token in tokens))


def test_a_gpu_that_was_left_stays_left_and_its_next_lease_is_kept():
    # Seen: a job that gave a GPU back gave back its next lease of that GPU, too.
    agent = Agent("a", "s", Job())
    agent.take(told(4))
    assert agent.take(told(5)) == [Lost(GPU, 4), Gained(GPU, 5)]
    agent.vacated("g", 4)
    assert agent.heartbeat().left == () and "g" in agent.leases
    agent.vacated("g", 5)
    for _ in range(2):
        assert agent.heartbeat().left == (("g", 5),)
        assert agent.take(told(5)) == [], "the arbiter does not know yet"
    assert agent.take(told(6)) == [Gained(GPU, 6)]
    assert agent.heartbeat().left == ()


def test_a_lease_that_ends_before_it_is_reserved_is_left_after_it_is_gained():
    agent = Agent("a", "s", Job())
    assert agent.take(told(5, ending=True, remaining=9.0)) == [Gained(GPU, 5), Leave(GPU, 5, 9.0)]
    assert agent.take(told(5, ending=True, remaining=8.0)) == [], "it was told"


def test_an_app_that_is_refused_for_good_holds_nothing():
    agent = Agent("a", "s", Job())
    agent.take(told(5))
    assert agent.take(m.Refused("silent", ends=False)) == agent.take(None) == [] and not agent.refused
    assert agent.take(m.Refused("two of one name", ends=True)) == [Lost(GPU, 5)]
    assert agent.refused == "two of one name" and not agent.leases

"""The agent: which messages it believes, and what it reports."""

from __future__ import annotations

import pytest

from tests.themis.cluster import Job
from themis_bridge import JobInfo
from themis_bridge import messages as m
from themis_bridge.agent import Agent, Gained, Lost
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.bids import Valuation
from themis_bridge.locality import Gpu


def test_an_agent_ignores_messages_that_are_out_of_date():
    agent = Agent("a", "s", Job())
    gpu = Gpu("g", "m")
    new = m.Leases("a", "s", (0, 2), (m.LeaseView(gpu, 5, 60.0),))
    old = m.Leases("a", "s", (0, 1), ())
    assert agent.handle(new)[1] == [Gained(gpu, 5)]
    assert agent.handle(old) == ([], [])
    assert agent.handle(m.Leases("a", "other", (9, 9), ())) == ([], [])
    # A token older than a known one is not believed, whichever message names it.
    assert agent.handle(m.Leases("a", "s", (1, 0), (m.LeaseView(gpu, 4, 60.0),)))[1] == [Lost(gpu, 5)]
    assert not agent.leases


def test_a_new_arbiter_with_an_earlier_clock_is_believed():
    agent = Agent("a", "s", Job())
    gpu = Gpu("g", "m")
    agent.handle(m.Leases("a", "s", (2_000, 1), (m.LeaseView(gpu, 2_001, 60.0),)))
    agent.handle(m.Leases("a", "s", (2_000, 2), ()))
    agent.handle(m.Refused("a", "s", "round 3: nonsense"))
    again = m.Leases("a", "s", (1_000, 1), (m.LeaseView(gpu, 1_001, 60.0),))
    assert agent.handle(again) == ([], [])
    (stranger,) = Arbiter(ArbiterState()).handle(m.Heard("a", "s"), 0.0)
    assert agent.handle(stranger) == ([m.AppJoined("a", "s")], [])
    assert agent.handle(again) == ([], [Gained(gpu, 1_001)])


def test_a_gpu_that_was_left_stays_left():
    agent = Agent("a", "s", Job())
    gpu = Gpu("g", "m")
    agent.handle(m.Leases("a", "s", (0, 1), (m.LeaseView(gpu, 5, 60.0),)))
    assert agent.vacated("g") == [m.Release("a", "s", "g", 5)]
    again = agent.handle(m.Leases("a", "s", (0, 2), (m.LeaseView(gpu, 5, 60.0),)))
    assert again == ([m.Release("a", "s", "g", 5)], [])
    assert agent.handle(m.Leases("a", "s", (0, 3), (m.LeaseView(gpu, 6, 60.0),)))[1] == [Gained(gpu, 6)]


def test_who_leaves_a_lease_keeps_the_next_one_of_that_gpu():
    # Seen: a job that gave a GPU back gave back its next lease of that GPU, too.
    agent = Agent("a", "s", Job())
    gpu = Gpu("g", "m")
    agent.handle(m.Leases("a", "s", (0, 1), (m.LeaseView(gpu, 5, 60.0),)))
    assert agent.handle(m.Leases("a", "s", (0, 2), (m.LeaseView(gpu, 6, 60.0),)))[1] == [Lost(gpu, 5), Gained(gpu, 6)]
    assert agent.vacated("g", 5) == []
    assert agent.vacated("g", 6) == [m.Release("a", "s", "g", 6)]


def test_the_cached_table_does_not_outlive_the_leases_that_it_was_bid_for():
    job = Job(4)
    agent = Agent("a", "s", job)
    first, second = Gpu("g", "m"), Gpu("h", "m")

    def rho() -> float:
        (answer,), _ = agent.handle(m.AskRho("a", "s", 9, 2.0, 4))
        return answer.report.rho

    def told(version, *views):
        agent.handle(m.Leases("a", "s", (0, version), views))

    # It bids while it keeps one GPU, gets another one as a leftover, and then loses the first.
    told(1, m.LeaseView(first, 5, 60.0))
    agent.handle(m.Offer("a", "s", 1, (second,), 2.0, 4, (first,), None))
    told(2, m.LeaseView(first, 5, 60.0), m.LeaseView(second, 6, 60.0, leftover=True))
    job.now = 4000.0
    assert rho() == pytest.approx(1.0), "as said"
    told(3, m.LeaseView(second, 6, 50.0, leftover=True))
    assert rho() == pytest.approx(4.0)
    # The lease of the leftover ends, and the GPU is a leftover again.
    told(4, m.LeaseView(first, 7, 60.0), m.LeaseView(second, 6, 50.0, leftover=True))
    assert rho() == pytest.approx(1.0)
    told(5, m.LeaseView(first, 7, 60.0), m.LeaseView(second, 6, 90.0, leftover=True, expires=90.0))
    assert rho() == pytest.approx(3.0)


def test_no_job_is_forecast_on_more_gpus_than_there_are():
    class Wide(Job):
        def valuation(self, contention, cluster_gpus):
            return Valuation([[JobInfo(1, 800.0, 1000)]], 0.0, 1.0)

    (answer,), _ = Agent("a", "s", Wide()).handle(m.AskRho("a", "s", 1, 1.0, 8))
    assert answer.report.left == answer.report.best == pytest.approx(100.0)

"""Leases and their tokens: when they end, who holds them, and what an old token may do."""

from __future__ import annotations

import re
from pathlib import Path

from tests.themis.cluster import STATES, Cluster, Job


def test_the_states_of_a_lease_are_those_that_are_drawn():
    text = (Path(__file__).parents[2] / "docs/arbiter.md").read_text()
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| ([\w, ]*)\|$", text, re.MULTILINE)
    drawn = {state: tuple(filter(None, after.strip().split(", "))) for state, after in rows if state in STATES}
    assert drawn == STATES


def test_leases_do_not_all_end_at_once():
    cluster = Cluster(16)
    cluster.join("a", Job(16))
    ends = [lease.expires for lease in cluster.arbiter.state.leases]
    assert len(set(ends)) == 8
    assert all(50 <= end <= 150 for end in ends)


def test_an_heir_that_has_no_use_for_the_gpu_any_more_does_not_get_it():
    # Seen: the GPU that was promised to a job went to it all the same.
    cluster = Cluster(4)
    cluster.join("a", Job(4))
    state = cluster.arbiter.state
    cluster.wait(20)
    agent = cluster.join("b", Job(2, 300.0))
    for _ in range(200):
        promised = [lease for lease in state.leases if lease.heir == "b"]
        if promised:
            break
        cluster.wait(1)
    assert not cluster.holds("b")
    # It says before they are free that one is enough.
    agent.work.jobs = state.apps["b"].wanted = len(promised) - 1
    for _ in range(20):
        cluster.wait(1)
        assert len(cluster.holds("b")) < len(promised), "no more than it has a use for"
        if not any(lease in promised for lease in state.leases):
            break
    assert not any(lease in promised for lease in state.leases)

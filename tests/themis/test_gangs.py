"""Apps whose trials need several GPUs of one machine at once: they get whole gangs of them, or none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.themis.cluster import SETTINGS, Cluster, Job
from themis_bridge import messages as m
from themis_bridge.locality import Gpu, cut_in_gangs, whole_gangs


def held_by(cluster: Cluster, app: str) -> list[Gpu]:
    return [cluster.arbiter.state.gpus[gpu] for gpu in cluster.holds(app)]


def test_an_app_hears_of_a_promise_that_is_dropped():
    cluster = Cluster(4)
    cluster.join("one", Job(4, 1e5))
    gang = cluster.join("gang", Job(1, 1e5, together=4))
    while not gang.promised:
        cluster.wait(1)
    cluster.silent.add("one")
    promised = next(each for each in cluster.arbiter.state.leases if each.heir == "gang")
    before = gang.promised
    cluster.send(m.Gpus(tuple(gpu for gpu in cluster.arbiter.state.gpus.values() if gpu.id != promised.gpu)))
    assert promised not in cluster.arbiter.state.leases
    assert gang.promised == sum(each.heir == "gang" for each in cluster.arbiter.state.leases) < before


def test_quotas_and_reserves_are_of_whole_gangs():
    cluster = Cluster(8, replace(SETTINGS, quotas={"gang": 6}, reserves={"kept": 3}))
    cluster.join("gang", Job(2, 1e5, together=4))
    cluster.join("kept", Job(2, 1e5, together=2))
    for _ in range(300):
        cluster.wait(1)
        assert len(cluster.holds("gang")) in (0, 4)
        assert len(cluster.holds("kept")) % 2 == 0
    assert len(cluster.holds("gang")) == 4 and len(cluster.holds("kept")) == 4


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 1, 2, 4]), st.integers(0, 150)), min_size=1, max_size=5)
)
def test_whatever_apps_come_each_gets_its_turn_in_whole_gangs(apps):
    """What is of no use to an app is given back, as by a job, and never grows to more than the rest of one gang."""
    cluster = Cluster(8)
    served, torn_for = set(), Counter()
    for second in range(450):
        for number, (jobs, together, arrives) in enumerate(apps):
            if second == arrives:
                cluster.join(f"app{number}", Job(jobs, 1e5, together=together))
        cluster.wait(1)
        for name, agent in cluster.agents.items():
            gpus = held_by(cluster, name)
            served |= {name} if whole_gangs(gpus, agent.together) else set()
            loose = [] if agent.promised else cut_in_gangs({gpu.id: gpu.machine for gpu in gpus}, agent.together)[1]
            torn_for[name] = torn_for[name] + 1 if loose else 0
            if torn_for[name] > 3:
                for gpu in loose:
                    agent.vacated(gpu, agent.leases[gpu].token)
    late = {f"app{number}" for number, (_, _, arrives) in enumerate(apps) if arrives > 450 - 100 * 2 * len(apps)}
    assert served >= cluster.agents.keys() - late
    assert len(cluster.reserved) >= min(8, sum(jobs for jobs, together, _ in apps if together == 1))

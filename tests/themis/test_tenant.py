"""`Tenant`, the side of a job, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from tests.contracts.processes import until
from themis_bridge import ThemisError
from themis_bridge import messages as m
from themis_bridge.agent import Gained, Leave, Lost
from themis_bridge.errors import WrongArbiter
from themis_bridge.locality import Gpu
from themis_bridge.shell import tenant


class Remote:
    """A method of an actor, called in this process; the patched ``ray.get`` returns its answer."""

    def __init__(self, method):
        self.remote = method


class Work:
    """Nothing is left to do."""

    def report(self):
        return m.Report()


class Arbiter:
    """It lets jobs join that ask for its unit, and refuses messages of all others."""

    def __init__(self, unit):
        self.unit, self.apps = unit, set()
        self.users: dict[str, str] = {}
        self.hear, self.leave = Remote(self._hear), Remote(lambda *args: None)

    def _hear(self, heard):
        if self.unit not in heard.bundle:
            raise WrongArbiter(f"leases single {self.unit}s")
        self.apps.add(heard.app)
        self.users[heard.app], self.life = heard.user, heard.life


def gone(*args):
    raise ray.exceptions.RayActorError


@pytest.fixture
def cluster(monkeypatch):
    """A cluster whose arbiter can be replaced."""
    there = SimpleNamespace(arbiter=Arbiter("GPU"))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: there.arbiter)
    monkeypatch.setattr(tenant, "POLL_S", 0.01)
    monkeypatch.setattr(tenant, "JOIN_PAUSE_S", 0.0)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    there.signs, there.gone = [], set()

    def sign():
        there.signs.append(f"sign{len(there.signs)}")
        return there.signs[-1]

    monkeypatch.setattr(tenant.reservations, "sign_of_life", sign)
    monkeypatch.setattr(tenant.reservations, "id_of", lambda sign: sign)
    monkeypatch.setattr(tenant.reservations, "is_gone", lambda sign: sign in there.gone)
    monkeypatch.setattr(tenant.reservations, "remove", there.gone.add)
    return there


def test_an_arbiter_that_leases_something_else_now_ends_the_job(cluster):
    job = tenant.Tenant("a", Work(), {"GPU": 1.0}, "GPU")
    assert cluster.arbiter.apps == {"a"} and job.poll() == []
    former, cluster.arbiter = cluster.arbiter, Arbiter("CPU")
    former.hear.remote = gone
    until(lambda: job._agent.refused)
    with pytest.raises(ThemisError, match="leases single CPUs"):
        job.poll()
    job.close()
    with pytest.raises(ThemisError, match="leases single CPUs"):
        tenant.Tenant("b", Work(), {"GPU": 1.0}, "GPU")
    assert not cluster.arbiter.apps and set(cluster.signs) == cluster.gone, "no sign of life is left"


def test_a_join_that_is_answered_late_or_refused_because_of_a_silent_namesake_is_waited_for(cluster, caplog):
    hear, sessions = cluster.arbiter._hear, []

    def late(heard):
        sessions.append(heard.session)
        if len(sessions) < 4:
            raise ray.exceptions.GetTimeoutError
        why = "an app of the name 'a' is silent, and keeps its name"
        return m.Refused(why, ends=len(sessions) < 6) if len(sessions) < 8 else hear(heard)

    cluster.arbiter.hear = Remote(late)
    job = tenant.Tenant("a", Work(), {"GPU": 1.0}, "GPU", "anna")
    assert cluster.arbiter.users == {"a": "anna"} and job.poll() == []
    assert len(sessions) >= 8 and len(set(sessions)) == 1, "the calls that were given up may still arrive"
    for said in ("has not answered within 10 s", "keeps its name; trying to join"):
        assert len([line for line in caplog.messages if said in line]) == 1
    job.close()


def test_a_join_that_is_never_answered_ends_the_job_at_the_limit(cluster, monkeypatch):
    monkeypatch.setattr(tenant, "JOIN_S", 0.0)

    def never(*args):
        raise ray.exceptions.GetTimeoutError

    cluster.arbiter.hear = Remote(never)
    with pytest.raises(ThemisError, match="has not answered within 10 s"):
        tenant.Tenant("a", Work(), {"GPU": 1.0}, "GPU")


@pytest.mark.parametrize("call", ["get_actor", "sign_of_life", "id_of", "is_gone", "hear", "get", "take"])
def test_whatever_ray_raises_at_a_call_a_job_goes_on_and_shows_that_it_lives(call, cluster, monkeypatch):
    # Seen: the id of a group that Ray could not read ended the agent without a word, and the job lost its leases.
    # Seen: Ray had removed the sign of life of a job once. Each of its later stalls of two seconds ended its leases.
    failed, gpu, hear = [], Gpu("g0", "m0"), cluster.arbiter._hear
    told = [m.Leases("1", (m.LeaseView(gpu, 3, "G", True, 20.0),), 1)]
    cluster.arbiter.hear.remote = lambda heard: hear(heard) or (told[-1] if heard.known != told[-1].digest else None)
    places = {"get_actor": ray, "get": ray, "hear": cluster.arbiter.hear, "take": tenant.Agent}
    owner, name = places.get(call, tenant.reservations), "remote" if call == "hear" else call
    real = getattr(owner, name)

    def thrice(*args, **kwargs):
        if len(failed) < 3:
            failed.append(call)
            raise RuntimeError("injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, thrice)
    job, notices = tenant.Tenant("a", Work(), {"GPU": 1.0}, "GPU"), []
    until(lambda: notices.extend(job.poll()) or notices)
    assert notices == [Gained(gpu, 3, "G"), Leave(gpu, 3, 20.0)] and job.expects
    # It loses its lease, since Ray has removed its sign of life.
    failed.clear()
    cluster.gone.update(cluster.signs)
    told.append(m.Leases("2", ()))
    until(lambda: notices.extend(job.poll()) or (cluster.arbiter.life not in cluster.gone and notices[2:]))
    assert notices[2:] == [Lost(gpu, 3)] and len(failed) == 3
    job.close()


def test_an_arbiter_of_an_earlier_version_is_named_with_the_remedy(cluster):
    del cluster.arbiter.hear
    with pytest.raises(ThemisError, match=r"earlier version: stop it .fluidtune arbiter stop"):
        tenant.Tenant("b", Work(), {"GPU": 1.0}, "GPU", "anna")


def test_a_report_that_the_arbiter_does_not_take_ends_no_job(cluster, caplog):
    # Seen: one false report, when a job joined or when the arbiter had not answered in time, ended the job.
    hear, said = cluster.arbiter._hear, []

    def refuse(heard):
        said.append(len(said))
        if said[-1] == 2:
            raise ray.exceptions.GetTimeoutError
        if said[-1] in (0, 3):
            raise ThemisError("done is -1")
        return hear(heard)

    cluster.arbiter.hear.remote = refuse
    job = tenant.Tenant("a", Work(), {"GPU": 1.0}, "GPU")
    until(lambda: len(said) > 5)
    assert job.poll() == [] and "cannot take the report of a: done is -1" in caplog.text
    job.close()

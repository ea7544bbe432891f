"""`Tenant`, the side of a job, over a stand-in of Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.themis.cluster import Job
from tests.themis.shell_world import World
from themis_bridge import ThemisError
from themis_bridge import messages as m
from themis_bridge.agent import Gained, Lost
from themis_bridge.shell import actor, tenant


class Between:
    """Hears what apps say in the place of an arbiter, which does all else."""

    def __init__(self, arbiter: Any, hear: Any):
        self._arbiter, self.hear = arbiter, hear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arbiter, name)


@pytest.fixture
def world(monkeypatch, tmp_path):
    """An arbiter of two cores, and no job. One that comes tries to join for a while."""
    world = World(monkeypatch, tmp_path)
    monkeypatch.setattr(tenant, "JOIN_S", 60.0)
    return world


def job_of(name: str, user: str = "") -> tenant.Tenant:
    return tenant.Tenant(name, Job(1), {"CPU": 1.0}, "CPU", user)


def test_an_arbiter_that_leases_something_else_now_ends_the_job(world):
    job = job_of("a")
    assert job.poll() == []
    world.actor = actor.ArbiterActor({}, "GPU", "other")
    job._loop()
    with pytest.raises(ThemisError, match="leases single GPUs"):
        job.poll()
    job.close()
    with pytest.raises(ThemisError, match="leases single GPUs"):
        job_of("b")
    world.settle()
    assert not world.actor._arbiter.state.apps
    assert {each["state"] for each in world.table.values() if not each["name"]} == {"REMOVED"}, "signs of life"


def test_a_join_that_is_answered_late_or_refused_because_of_a_silent_namesake_is_waited_for(world, caplog):
    arbiter, sessions = world.actor, []

    def late(heard):
        sessions.append(heard.session)
        if len(sessions) < 4:
            raise ray.exceptions.GetTimeoutError
        why = "an app of the name 'a' is silent, and keeps its name"
        return m.Refused(why, ends=len(sessions) < 6) if len(sessions) < 8 else arbiter.hear(heard)

    world.actor = Between(arbiter, late)
    job = job_of("a", user="anna")
    assert arbiter._arbiter.state.apps["a"].user == "anna" and job.poll() == []
    assert len(sessions) >= 8 and len(set(sessions)) == 1, "the calls that were given up may still arrive"
    for said in ("has not answered within 10 s", "keeps its name; trying to join"):
        assert len([line for line in caplog.messages if said in line]) == 1


def test_a_join_that_is_never_answered_ends_the_job_at_the_limit(world):
    def never(*args):
        raise ray.exceptions.GetTimeoutError

    world.actor = Between(world.actor, never)
    with pytest.raises(ThemisError, match="has not answered within 10 s"):
        job_of("a")


@pytest.mark.parametrize("call", ["get_actor", "sign_of_life", "id_of", "is_gone", "hear", "get", "take"])
def test_whatever_ray_raises_at_a_call_a_job_goes_on_and_shows_that_it_lives(call, world, monkeypatch):
    # Seen: the id of a group that Ray could not read ended the agent without a word, and the job lost its leases.
    # Seen: Ray had removed the sign of life of a job once. Each of its later stalls of two seconds ended its leases.
    failed = []
    owner = {"get_actor": ray, "get": ray, "hear": actor.ArbiterActor, "take": tenant.Agent}.get(call)
    owner = owner or tenant.reservations
    real = getattr(owner, call)

    def thrice(*args, **kwargs):
        if len(failed) < 3:
            failed.append(call)
            raise RuntimeError("injected")
        return real(*args, **kwargs)

    def turns(number):
        for _ in range(number):
            world.run(0.2)
            job._loop()
        return job.poll()

    monkeypatch.setattr(owner, call, thrice)
    job = job_of("a")
    (gained,) = turns(20)
    assert isinstance(gained, Gained)
    # Ray has removed its sign of life, and it stands still for a while.
    failed.clear()
    world.end_driver(job)
    world.run(5.0)
    assert turns(20)[:2] == [Lost(gained.gpu, gained.token), Gained(gained.gpu, 2, job._agent.leases["m-0"].group)]
    assert world.table[job._agent.life]["state"] != "REMOVED" and len(failed) == 3


def test_an_arbiter_of_an_earlier_version_is_named_with_the_remedy(world, monkeypatch):
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: SimpleNamespace())
    with pytest.raises(ThemisError, match=r"earlier version: stop it .fluidtune arbiter stop"):
        job_of("b")


def test_a_report_that_the_arbiter_does_not_take_ends_no_job(world, caplog):
    # Seen: one false report, when a job joined or when the arbiter had not answered in time, ended the job.
    arbiter, said = world.actor, []

    def refuse(heard):
        said.append(len(said))
        if said[-1] == 2:
            raise ray.exceptions.GetTimeoutError
        if said[-1] in (0, 3):
            raise ThemisError("done is -1")
        return arbiter.hear(heard)

    world.actor = Between(arbiter, refuse)
    job = job_of("a")
    for _ in range(6):
        job._loop()
    assert not any(isinstance(each, Lost) for each in job.poll()) and len(said) > 5
    assert "cannot take the report of a: done is -1" in caplog.text

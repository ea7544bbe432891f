"""Arbiter, tenants and leases on a real Ray: reservations, tokens, and an arbiter that dies and is restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from ray.exceptions import ActorPlacementGroupRemoved, ActorUnschedulableError, GetTimeoutError

from tests.contracts.processes import until
from themis_bridge import JobInfo, ThemisError
from themis_bridge.agent import Gained, Lost
from themis_bridge.fairness import kinds_of
from themis_bridge.messages import Report

pytestmark = pytest.mark.ray
PATIENCE_S = 60.0


class Work:
    """Two jobs that never end."""

    def report(self):
        return Report((kinds_of([JobInfo(1, 100.0)] * 2),), peak=2)


class Process:
    def pid(self):
        return os.getpid()


@pytest.fixture
def control(ray2):
    from themis_bridge.shell import control

    control.start("CPU", lease_s=60.0, notice_s=5.0, pace_s=0.5)
    yield control
    control.stop()


def gained(tenant, count):
    notices = []

    def look():
        notices.extend(tenant.poll())
        return sum(isinstance(notice, Gained) for notice in notices) >= count

    until(look)
    return [notice for notice in notices if isinstance(notice, Gained)]


def where(tenant, lease, patience=PATIENCE_S):
    """The process id of an actor that is started in a lease."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = tenant.group(lease)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    actor = ray.remote(Process).options(num_cpus=1, scheduling_strategy=strategy).remote()
    try:
        return ray.get(actor.pid.remote(), timeout=patience)
    finally:
        ray.kill(actor)


@pytest.mark.core
def test_leases_of_one_tenant(control):
    from themis_bridge.shell import reservations
    from themis_bridge.shell.tenant import Tenant

    tenant = Tenant("a", Work(), {"CPU": 1.0}, "CPU")
    first, second = gained(tenant, 2)
    assert first.gpu.id != second.gpu.id
    assert where(tenant, first) != os.getpid()
    # The arbiter dies. Nothing changes for the holder of a lease.
    before = control.status()
    os.kill(before["pid"], signal.SIGKILL)

    def again():
        try:
            found = control.status()
        except Exception:
            return None
        return found if found["pid"] != before["pid"] else None

    after = until(again)
    tokens = {gpu: lease["token"] for gpu, lease in before["apps"]["a"]["leases"].items()}
    assert {gpu: lease["token"] for gpu, lease in after["apps"]["a"]["leases"].items()} == tokens
    assert not [notice for notice in tenant.poll() if isinstance(notice, Lost)]
    # A GPU that was left is leased again under a newer token. In its old group nothing can run.
    tenant.vacated(first.gpu.id, first.token)
    (third,) = gained(tenant, 1)
    assert third.gpu == first.gpu and third.token > second.token
    assert where(tenant, third) != os.getpid()
    # Ray either raises an error or lets the actor wait for ever.
    with pytest.raises((ActorPlacementGroupRemoved, ActorUnschedulableError, GetTimeoutError)):
        where(tenant, first, patience=2.0)
    # A job that asks for another unit is refused.
    with pytest.raises(ThemisError, match="leases single CPUs"):
        Tenant("b", Work(), {"GPU": 1.0}, "GPU")
    tenant.close()
    until(lambda: not reservations.found()[0])
    assert control.stop()
    with pytest.raises(ThemisError, match="fluidtune arbiter start"):
        control.status()


def test_a_core_that_something_else_uses_is_leased_as_soon_as_it_is_given_back(control):
    import ray

    from themis_bridge.shell.tenant import Tenant

    other = ray.remote(Process).options(num_cpus=1).remote()
    ray.get(other.pid.remote())
    tenant = Tenant("a", Work(), {"CPU": 1.0}, "CPU")
    (first,) = gained(tenant, 1)
    until(lambda: "no room" in control.status()["apps"]["a"]["waits"])
    ray.kill(other)
    (second,) = gained(tenant, 1)
    assert second.gpu != first.gpu and where(tenant, second) != os.getpid()
    tenant.close()


DRIVER = """
import sys, time, logging
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
from tests.themis.test_on_ray import Work
from themis_bridge.shell.tenant import Tenant
tenant = Tenant("a", Work(), {"CPU": 1.0}, "CPU")
print("joined", flush=True)
time.sleep(600)
"""


def test_a_driver_that_stands_still_keeps_its_name_and_a_dead_one_does_not(control, monkeypatch):
    import ray

    from themis_bridge.shell import tenant

    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout.readline().strip() == "joined"
        driver.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(tenant, "JOIN_S", 4.0)  # the arbiter looks for dead drivers meanwhile
            with pytest.raises(ThemisError, match="of the name 'a' is running"):
                tenant.Tenant("a", Work(), {"CPU": 1.0}, "CPU")
    finally:
        driver.kill()
        driver.wait()
    again = tenant.Tenant("a", Work(), {"CPU": 1.0}, "CPU")
    assert len(gained(again, 2)) == 2
    again.close()

"""Devices that are leases: what a job hears of them, when it gives them back, and what it reports of its work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.devices import leased_devices
from fluidtune.cluster.devices.layout import DeviceSpec, layout
from fluidtune.engine import Engine
from fluidtune.engine import messages as m
from fluidtune.engine.trial import TrialWork
from fluidtune.errors import FluidTuneError
from fluidtune.tune import arbiter_progress, device_setup
from fluidtune.tune.arbiter_progress import JobProgress
from tests.contracts.device_sources import DeviceSourceCase, DeviceSourceContract
from tests.engine.helpers import Bench, elastic, plain, resize
from tests.themis.fake_tenant import FakeTenant, gpu
from themis_bridge import ThemisError, independent_finish_time
from themis_bridge.agent import Gained, Leave, Lost
from themis_bridge.app_record import valued
from themis_bridge.locality import Gpu
from themis_bridge.messages import MOST_GPUS

CLUSTER = {"CPU": 4.0, "GPU": 4.0}


@pytest.fixture
def leased(monkeypatch, request):
    """A `LeasedDevices` with a settable ``used`` (devices) and ``useful``, on a clock of its own.

    Its parameter: GPUs that a trial asks for; 1.
    """
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(leased_devices, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    progress = SimpleNamespace(useful=10, update=lambda where, now: None)
    used: set[int] = set()
    asked = {"GPU": getattr(request, "param", 1.0)}
    plan = layout(DeviceSpec("gpu"), asked, CLUSTER, max_packing=1, leased=True)
    made: list[Any] = []

    def tenant(**given):
        made.append(FakeTenant("app", **given))
        return made[0]

    devices = leased_devices.LeasedDevices(plan, progress, used.__contains__, tenant)
    return SimpleNamespace(devices=devices, tenant=made[0], used=used, progress=progress, clock=clock)


class LeasedCase(DeviceSourceCase):
    """The job uses every device that it has, so that it gives none back by itself."""

    def __init__(self, leased):
        self.source, self._tenant = leased.devices, leased.tenant
        leased.used.update((0, 1))
        self._tokens = {}

    def bring(self, device):
        self._tokens[device] = self._tokens.get(device, 0) + 1
        self._tenant.notices.append(Gained(gpu(device), self._tokens[device]))

    def take_away(self, device):
        self._tenant.notices.append(Lost(gpu(device), self._tokens[device]))

    def remove_group(self, device):
        """The arbiter has removed it, and its message is not here yet."""

    def held(self):
        return 0 if self._tenant.closed else len(self.source.nodes)

    def warn(self, device):
        self._tenant.notices.append(Leave(gpu(device), self._tokens[device], 30.0))
        return True


class TestLeasedDevices(DeviceSourceContract):
    @pytest.fixture
    def case(self, leased):
        return LeasedCase(leased)


def test_a_device_that_ends_is_given_back_when_it_is_empty(leased):
    leased.tenant.notices = [Gained(gpu(0), 1)]
    leased.devices.poll()
    leased.used.add(0)
    leased.tenant.notices = [Leave(gpu(0), 1, 30.0)]
    assert leased.devices.poll() == ({}, [])
    assert leased.devices.leaving() == [0]
    assert leased.devices.leaving() == []
    assert leased.devices.poll() == ({}, []) and not leased.tenant.left
    leased.used.clear()
    assert leased.devices.poll() == ({}, [0])
    assert leased.tenant.left == [("m-0", 1)]


@pytest.mark.parametrize("revoked", [False, True])
def test_the_same_gpu_under_another_token_is_the_same_device(leased, revoked):
    leased.tenant.notices = [Gained(gpu(0), 1)]
    leased.devices.poll()
    if revoked:  # its old group was removed, as a worker has found
        leased.devices.revoked(0, leased.devices.group(0))
    leased.tenant.notices = [Lost(gpu(0), 1), Gained(gpu(0), 2)]
    assert leased.devices.poll() == ({0: "m"}, [0]) and leased.tenant.left == []
    leased.tenant.notices = [Lost(gpu(0), 1)]  # late
    assert leased.devices.poll() == ({}, [])


def test_a_job_that_the_arbiter_does_not_want_ends(leased):
    def refuse():
        raise ThemisError("another app of that name")

    leased.tenant.poll = refuse
    with pytest.raises(FluidTuneError, match="another app"):
        leased.devices.poll()


def test_only_single_cores_and_gangs_of_a_power_of_two_are_leased():
    for kind, asked, said in (("cpu", {"CPU": 2.0}, "single ones"), ("gpu", {"GPU": 3.0}, "3 GPUs at once")):
        plan = layout(DeviceSpec(kind), asked, CLUSTER, max_packing=1, leased=True)
        with pytest.raises(FluidTuneError, match=said):
            leased_devices.LeasedDevices(plan, None, None, FakeTenant)


@pytest.mark.parametrize("leased", [2.0], indirect=True)
def test_a_device_whose_gang_is_not_whole_is_kept_only_while_the_rest_is_on_its_way(leased):
    assert leased.tenant.together == 2
    leased.tenant.expects = True
    leased.tenant.notices = [Gained(gpu(k), 1) for k in range(3)]
    leased.devices.poll()
    leased.used.update((0, 1))
    leased.clock.now += 100.0
    assert leased.devices.poll() == ({}, [])
    leased.tenant.expects = False
    assert leased.devices.poll() == ({}, [])
    leased.clock.now += leased_devices.SPARE_S - 0.1
    assert leased.devices.poll() == ({}, []) and not leased.tenant.left
    leased.clock.now += 0.1
    assert leased.devices.poll() == ({}, [2]) and leased.tenant.left == [("m-2", 1)]


@pytest.mark.parametrize("leased", [2.0], indirect=True)
def test_whole_gangs_and_those_of_which_a_part_is_in_use_are_kept(leased):
    leased.tenant.notices = [Gained(gpu(k), 1) for k in range(4)]
    leased.devices.poll()
    leased.clock.now += 100.0
    assert leased.devices.poll() == ({}, [])
    leased.used.update((0, 1))
    leased.tenant.notices = [Lost(gpu(1), 1)]
    assert leased.devices.poll() == ({}, [1])
    leased.used.clear()
    for _ in range(2):
        leased.clock.now += leased_devices.SPARE_S
        leased.devices.poll()
    assert len(leased.tenant.left) == 1 and len(leased.devices.nodes) == 2


@pytest.mark.parametrize("leased", [2.0], indirect=True)
def test_a_gang_that_is_of_no_use_is_given_back_whole_after_what_is_left_of_another(leased):
    gpus = [Gpu("x-0", "x"), *(Gpu(f"{node}-{k}", node) for node in "yz" for k in range(2))]
    leased.tenant.notices = [Gained(each, 1) for each in gpus]
    leased.progress.useful = 2
    leased.devices.poll()
    leased.clock.now += 0.1
    leased.devices.poll()
    leased.clock.now += leased_devices.SPARE_S
    _, gone = leased.devices.poll()
    assert [name for name, _ in leased.tenant.left] == ["x-0", "y-1", "y-0"] and len(gone) == 3
    leased.clock.now += 100.0
    leased.progress.useful = 1
    assert leased.devices.poll() == ({}, []), "one gang is kept"


def test_the_work_of_trials_that_need_two_gpus_at_once():
    bench = Bench(2)
    bench(*(plain(name, 10, 2.0) for name in "abc"))
    bench.results("a", 1.0, 3, width=2)
    progress = JobProgress(bench.engine, lambda group: (), 5, 2)
    assert progress.useful == 2
    progress.update({}, 1.0)
    assert progress.useful == 4, "of the five that it may have"
    value = valuation(progress, 1.0, 8, together=2)
    # 7 and twice 10 iterations of 1 s on two GPUs are left of 30.
    assert value.finish([gpu(0), gpu(1)]) == value.finish([gpu(k) for k in range(3)]) == pytest.approx(27.0)
    assert value.rho([gpu(0)]) == value.rho([])


def valuation(progress, contention, cluster_gpus, together=1):
    """What GPUs are worth to the job by its report, if the arbiter has seen all that it has done."""
    report = progress.report()
    budget = report.done + valued(report, 0.0, 1.0, together).work
    return valued(report, 0.0, independent_finish_time(budget, cluster_gpus, report.peak, contention), together)


def progress_of(engine, rungs=lambda group: ()):
    """As it is when it has looked."""
    progress = JobProgress(engine, rungs, None)
    progress.update({}, 1.0)
    return progress


def test_a_job_whose_first_trial_has_yet_to_come_wants_devices_for_it():
    progress = progress_of(Engine())
    assert progress.useful == 1
    value = valuation(progress, 1.0, 4)
    assert value.finish([gpu(0)]) == value.independent == arbiter_progress.UNKNOWN_S


def test_an_emulated_device_is_one_that_ray_believes_in():
    plan = layout(DeviceSpec("emulated", 3), {"GPU": 1.0}, CLUSTER, max_packing=2, leased=True)
    assert plan.bundle["GPU"] == 1.0 and plan.most == 3
    with pytest.raises(FluidTuneError, match="emulated:8"):
        layout(DeviceSpec("emulated", 8), {"GPU": 1.0}, CLUSTER, max_packing=2, leased=True)


@pytest.mark.parametrize("kind, growable, peak", [("checkpointing", True, 5), ("elastic", False, 1)])
def test_a_trial_counts_by_how_far_it_can_grow_whether_it_commits_or_not(kind, growable, peak):
    """Seen: `KeyError` in the driver of a job under an arbiter, whose one trial had checkpoints and could grow."""
    bench = Bench(1)
    bench(m.TrialAdded("a", "g", kind, 2, growable=growable))
    progress = JobProgress(bench.engine, lambda group: (), 5)
    for last in (False, True):
        progress.update({}, 1.0 + last)
        assert (progress.useful, progress.report().peak) == (1 if last else peak, peak)
        bench.results("a", 2.0, 1)


def test_many_trials_of_unknown_scaling_can_use_no_more_gpus_than_a_report_may_say():
    bench = Bench(1)
    bench(*(elastic(f"t{k}") for k in range(200)))
    assert progress_of(bench.engine).report().peak == progress_of(bench.engine).useful == MOST_GPUS


def test_rungs_to_come_are_part_of_the_work():
    bench = Bench(1)
    bench(m.GroupAnnounced("h"), *(plain(f"t{k}", 3) for k in range(9)), plain("other", 12, group="h"))
    bench.results("other", 2.0, 3)
    progress = progress_of(bench.engine, {"g": ((3, 6.0), (1, 18.0)), "h": ()}.get)
    assert progress.useful == 10, "only what could run now"
    value = valuation(progress, 1.0, 10)
    # Of 2 s each: 9 x 3 and 9 of 12 left now; then 3 x 6; then 1 x 18. Three were done.
    assert value.independent == pytest.approx(2 * (27 + 12 + 18 + 18) / 10)
    assert value.finish([gpu(k) for k in range(10)]) == pytest.approx(2 * (9 + 6 + 18))


def test_packed_trials_count_as_if_alone():
    bench = Bench(1, max_packing=2)
    bench(plain("a", 10))
    bench.results("a", 2.0, 3)
    bench(plain("b", 10))
    for _ in range(5):
        # They share a device: an iteration takes four seconds where it would take two.
        bench(m.Result("a", 4.0, 0.5), m.Result("b", 4.0, 0.5))
    # Of 20 iterations of 2 s on one worker 7 are left.
    value = valuation(progress_of(bench.engine), 1.0, 1)
    assert value.independent == pytest.approx(40.0)
    assert value.finish([gpu(0)]) == pytest.approx(14.0)


def test_a_guess_of_what_trials_can_use_does_not_outlive_its_measurement():
    def works(*widest):
        return [TrialWork(f"t{k}", "g", (k,), most, most, 10, 0, 100.0, 10.0) for k, most in enumerate(widest)]

    looks = iter([works(*[MOST_GPUS] * 4), works(2, 1, 1), works(2)])
    engine = SimpleNamespace(knows_trials=True, works_left=lambda *_: next(looks), work_done=lambda: 0.0)
    progress = progress_of(engine)
    assert valuation(progress, 1.0, 64).independent == pytest.approx(400 / 64), "nothing is known: the whole cluster"
    # For one trial a second worker still pays; one has ended before anything was measured.
    progress.update({}, 10.0)
    assert progress.useful == 4
    assert valuation(progress, 1.0, 64).independent == pytest.approx(300 / 6)
    # On a share of 64 / 16 GPUs; and the six stay what the job could use, when trials have ended.
    assert valuation(progress, 16.0, 64).independent == pytest.approx(300 / 4)
    progress.update({}, 20.0)
    assert progress.useful == 2
    assert valuation(progress, 1.0, 64).independent == pytest.approx(100 / 6)


def test_a_job_asks_for_no_devices_that_would_be_of_use_too_late():
    """A trial of 2 s an iteration on one device, and half of that on two."""
    # Seen: a job took six GPUs from another one and gave them back 9.6 s later without one iteration on them.
    clock = SimpleNamespace(now=100.0)
    engine = Engine(max_workers=8)
    engine.handle(m.DeviceGained(0), m.GroupAnnounced("g"), elastic("a"), now=clock.now)
    progress = JobProgress(engine, lambda group: (), None)

    def results(count, width):
        told = []
        for _ in range(count):
            clock.now += 2.0 / width
            told += engine.handle(m.Result("a", 2.0 / width, width), now=clock.now)
        return told

    def asked(*devices):
        # It looks no more often than that.
        clock.now += arbiter_progress.UPDATE_S
        progress.update({device: gpu(device) for device in devices}, clock.now)
        return progress.useful

    assert asked(0) == 8 and progress.lag == 0.0
    results(3, 1.0)
    assert asked(0) == 8 and progress.lag == 0.0, "its first device is not one to which it has grown"
    told = engine.handle(m.DeviceGained(1), now=clock.now)
    assert asked(0, 1) == 8
    came = clock.now
    assert resize("a", (0, 1)) in told + results(1, 1.0)
    clock.now += 6.0
    engine.handle(m.Resized("a", (0, 1)), now=clock.now)
    results(1, 2.0)
    assert asked(0, 1) == 8 and progress.lag == pytest.approx(clock.now - came) == pytest.approx(9.5, abs=0.1)
    results(1, 2.0)
    assert asked(0, 1) == 8 and progress.lag == pytest.approx(9.5, abs=0.1), "a device counts once"
    results(80, 2.0)
    # 14 s are left: further devices would come after 9.5, and do in 1.25 s after a resize what takes 5.
    assert asked(0, 1) == 8
    results(6, 2.0)
    # 8 s are left.
    assert asked(0, 1) == 2
    assert valuation(progress, 1.0, 8).finish([gpu(k) for k in range(8)]) == pytest.approx(8.0)


def test_a_job_is_one_of_the_user_that_it_or_its_metadata_names(monkeypatch):
    plan = layout(DeviceSpec("gpu"), {"GPU": 1.0}, CLUSTER, max_packing=1, leased=True)
    setup = SimpleNamespace(layout=plan, most_devices=None, on_demand=False)
    made = []
    monkeypatch.setattr(
        "themis_bridge.shell.tenant.Tenant", lambda *a, **k: made.append(FakeTenant(*a, **k)) or made[-1]
    )
    monkeypatch.setattr(device_setup, "user_of_job", lambda named: named or "anna")
    for named in (None, "bert"):
        settings = SimpleNamespace(on_demand=False, arbiter="auto", max_workers=None, user=named)
        job = SimpleNamespace(setup=setup, engine=None, trials=SimpleNamespace(rungs={}))
        device_setup.hold_devices(job, settings, "app", 1)
    assert [tenant.user for tenant in made] == ["anna", "bert"]

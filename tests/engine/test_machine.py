"""After any events in any order, the engine's books are right and its instructions can be carried out.

A model keeps its own, simpler books from the instructions alone, and refuses every instruction that no shell could
carry out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fluidtune.engine import Engine, Reason
from fluidtune.engine import messages as m
from tests.engine.helpers import holders
from tests.engine.invariants import check_engine

SHARES = st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.3, 2.0, 3.0])
KINDS = st.sampled_from(["plain", "checkpointing", "elastic", "elastic"])
LEFT = st.sampled_from([None, 0.0, 1.0, 5.0, 100.0, 1000.0])
SECONDS = st.sampled_from([0.01, 0.5, 1.0, 1.0, 3.0])
PICK = st.integers(0, 1000)


@dataclass
class Shadow:
    """What the model knows of a trial."""

    group: str
    kind: str
    asked: float
    grows: bool
    status: str = "waiting"
    has_run: bool = False
    #: Devices it has or was promised, in order; share of each.
    held: tuple[int, ...] = ()
    share: float = 0.0
    #: Devices of the resize that is not answered, and those it runs on until then.
    asked_devices: tuple[int, ...] | None = None
    on: tuple[int, ...] = ()


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        packing=st.sampled_from([None, 1, 2, 3]),
        workers=st.sampled_from([None, 1, 2, 4]),
        devices=st.integers(0, 6),
        lanes=st.sampled_from([None, None, "FAIR", "SRTF", "HPT"]),
        mixed=st.booleans(),
    )
    def begin(self, packing, workers, devices, lanes, mixed):
        #: Every other device is slow, and is said to be when it comes.
        self.mixed = mixed
        self.engine = Engine(max_packing=packing, max_workers=workers, lanes=lanes)
        self.trials: dict[str, Shadow] = {}
        self.groups: dict[str, tuple[bool, int | None]] = {}
        self.nodes: dict[int, str] = {}
        self.leaving: set[int] = set()
        #: Trials that once did not do what a resize asked: they are left alone for a while.
        self.refused: set[str] = set()
        #: Trials whose growth has ended.
        self.narrow: set[str] = set()
        #: Why each trial waits, as it was said last.
        self.waits: dict[str, int] = {}
        self.clock = 0.0
        self.send(m.GroupAnnounced("sync"), m.GroupAnnounced("asha", False), m.GroupAnnounced("three", False, 3))
        self.groups = {"sync": (True, None), "asha": (False, None), "three": (False, 3)}
        for _ in range(devices):
            self.gain(len(self.nodes) // 3)

    def check_reason(self, instruction: m.Instruction, trial: Shadow):
        """The numbers that are said to have decided are those of the model, as far as it has them."""
        numbers = dict(instruction.why.numbers)
        assert instruction.why.words
        assert all(number >= 0 for name, number in numbers.items() if name != "benefit"), instruction
        assert all(math.isfinite(number) for name, number in numbers.items() if name != "left"), instruction
        if "waiting" in numbers and isinstance(instruction, m.Start):
            assert numbers["waiting"] >= 1, instruction
        if isinstance(instruction, m.Resize) and instruction.why.reason is not Reason.DEVICE_LOST:
            assert numbers["width"] == len(trial.on), instruction
            assert numbers.get("to", len(instruction.devices)) == len(instruction.devices), instruction
            grows = len(instruction.devices) > len(trial.on)
            assert not grows or trial.grows, instruction
            assert grows == (instruction.why.reason is Reason.IDLE_DEVICES), instruction
            assert not grows or numbers["left_to"] + numbers["resize"] < numbers["left"], instruction

    # The shell's side

    def send(self, *events):
        self.clock += 1
        # What the events themselves end, the rules below have ended in the model before.
        out = self.engine.handle(*events, now=self.clock)
        check_engine(self.engine)
        self.waits = {name: line for name, line in self.waits.items() if name in self.engine.waiting}
        for line, names, why in self.engine.new_waits():
            self.waits |= dict.fromkeys(names, line)
            assert line in self.waits.values() and self.waits.keys() >= set(names)
            assert not self.engine.idle_devices or why.reason not in (Reason.DEVICES_BUSY, Reason.NO_ROOM), line
        assert set(self.waits) == set(self.engine.waiting)
        for instruction in out:
            self.carry_out(instruction)
        return out

    def carry_out(self, instruction: m.Instruction):
        trial = self.trials[instruction.trial]
        self.check_reason(instruction, trial)
        if isinstance(instruction, m.Release):
            assert set(instruction.devices) <= set(trial.held), instruction
            assert not set(instruction.devices) & set(trial.on), f"{instruction} while it runs there"
            trial.held = tuple(d for d in trial.held if d not in instruction.devices)
        elif isinstance(instruction, m.Start):
            assert trial.status == "waiting" and not trial.held, instruction
            assert not self.leaving & set(instruction.devices), instruction
            assert isinstance(instruction, m.Resume) == trial.has_run, instruction
            several = len(instruction.devices) > 1
            assert not several or trial.grows or trial.asked == len(instruction.devices)
            if trial.asked >= 2:
                assert len(instruction.devices) == trial.asked
                assert len({self.nodes[d] for d in instruction.devices}) == 1
            trial.status, trial.has_run = "running", True
            trial.held, trial.share = instruction.devices, instruction.share
            trial.on = trial.held
            for other in self.trials.values():
                if instruction.devices[0] in other.held:
                    # A device that had one trial may be opened for more.
                    other.share = min(other.share, instruction.share)
            if several and trial.asked < 2:
                trial.asked_devices, trial.on = instruction.devices, instruction.devices[:1]
        elif isinstance(instruction, m.Resize):
            assert trial.status == "running" and trial.asked < 2, instruction
            lost = instruction.why.reason is Reason.DEVICE_LOST
            assert trial.asked_devices is None, f"{instruction} before the last one was answered"
            assert instruction.devices[0] == trial.on[0] and (set(instruction.devices) == set(trial.on)) == lost
            assert not self.leaving & (set(instruction.devices) - set(trial.on)), instruction
            trial.asked_devices = instruction.devices
            trial.held = tuple(dict.fromkeys(trial.held + instruction.devices))
            if len(trial.held) > 1:
                trial.share = 1.0
        else:
            assert isinstance(instruction, m.Suspend)
            assert trial.status == "running" and trial.kind != "plain" and trial.asked_devices is None
            assert trial.share < 1 or self.leaving & set(trial.on)
            trial.status = "suspending"
        used = Counter()
        for other in self.trials.values():
            for device in other.held:
                used[device] += other.share
        over = [d for d, share in used.items() if share > 1 + 1e-9 or d not in self.nodes]
        assert not over, f"{instruction}: devices {over} over-committed"

    def stop(self, trial: Shadow, status: str):
        trial.status, trial.on, trial.asked_devices = status, (), None

    def those(self, *statuses: str) -> list[str]:
        return [name for name, trial in self.trials.items() if trial.status in statuses]

    def gain(self, node: int):
        device = max(self.nodes, default=-1) + 1
        self.nodes[device] = f"node{node}"
        self.send(m.DeviceGained(device, f"node{node}"))
        if self.mixed:
            self.send(m.ModelFound(device, "slow" if device % 2 else "fast"))

    # Rules

    @rule(
        kinds=st.lists(st.tuples(KINDS, st.booleans(), LEFT, SHARES), min_size=1, max_size=6),
        group=st.sampled_from(["sync", "asha", "three"]),
    )
    def add(self, kinds, group):
        events = []
        for kind, grows, left, share in kinds:
            name = f"t{len(self.trials)}"
            self.trials[name] = Shadow(group, kind, share, grows)
            events.append(m.TrialAdded(name, group, kind, left, share, growable=grows))
        self.send(*events)

    @precondition(lambda self: self.those("paused"))
    @rule(pick=PICK, left=LEFT, group=st.sampled_from(["sync", "asha", "three"]))
    def add_again(self, pick, left, group):
        paused = self.those("paused")
        name = paused[pick % len(paused)]
        trial = self.trials[name]
        trial.status, trial.group = "waiting", group
        self.send(m.TrialAdded(name, group, trial.kind, left, trial.asked, turn=None if pick % 2 else pick % 3))

    @precondition(lambda self: self.those("running", "suspending"))
    @rule(
        pick=PICK,
        seconds=SECONDS,
        count=st.integers(1, 5),
        overhead=st.sampled_from([1.0, 1.1, 3.0]),
        memory=st.sampled_from([0.1, 0.25, 0.45]),
    )
    def result(self, pick, seconds, count, overhead, memory):
        running = self.those("running", "suspending")
        name = running[pick % len(running)]
        for _ in range(count):
            width = len(self.trials[name].on)
            if width:
                taken = seconds / width * overhead ** (width - 1)
                self.send(m.Result(name, taken, None if memory == 0.45 and width > 1 else width, memory))

    @precondition(lambda self: self.those("running", "suspending", "waiting", "paused"))
    @rule(pick=PICK, ending=st.sampled_from(["paused", "stopped", "failed"]))
    def end(self, pick, ending):
        live = self.those("running", "suspending", "waiting", "paused")
        name = live[pick % len(live)]
        self.stop(self.trials[name], "paused" if ending == "paused" else "ended")
        self.send(m.TrialEnded(name, ending))
        assert not self.trials[name].held

    @precondition(lambda self: len(self.those("running", "waiting")) > 1 and self.those("running"))
    @rule(pick=PICK, seconds=SECONDS, grown=st.booleans())
    def all_but_one_end(self, pick, seconds, grown):
        """The one that is left may grow, which it hardly ever could otherwise."""
        running = self.those("running")
        left = running[pick % len(running)]
        for name in self.those("running", "suspending", "waiting"):
            if name != left:
                self.stop(self.trials[name], "ended")
                self.send(m.TrialEnded(name, "stopped"))
        trial = self.trials[left]
        if trial.asked < 2 and trial.asked_devices is None:
            trial.grows = True
            self.send(m.CanGrow(left))
            self.send(m.BudgetChanged(left, 1000.0))
            for _ in range(2):
                self.send(m.Result(left, seconds / len(trial.on), len(trial.on), 0.1))
            if trial.asked_devices is not None and grown:
                trial.on, trial.asked_devices = trial.asked_devices, None
                self.send(m.Resized(left, trial.on))

    @precondition(lambda self: self.those("running", "suspending"))
    @rule(pick=PICK)
    def lose_worker(self, pick):
        running = self.those("running", "suspending")
        name = running[pick % len(running)]
        self.stop(self.trials[name], "waiting")
        out = self.send(m.WorkerLost(name))
        assert isinstance(out[0], m.Release) and out[0].trial == name

    @precondition(lambda self: any(len(trial.on) > 1 and trial.asked < 2 for trial in self.trials.values()))
    @rule(pick=PICK, which=PICK)
    def lose_follower(self, pick, which):
        """It goes on with the others; a resize that is under way is called off."""
        wide = [name for name, trial in self.trials.items() if len(trial.on) > 1 and trial.asked < 2]
        name = wide[pick % len(wide)]
        trial = self.trials[name]
        device = trial.on[1 + which % (len(trial.on) - 1)]
        trial.on, trial.asked_devices = tuple(d for d in trial.on if d != device), None
        self.refused.add(name)
        self.send(m.WorkerLost(name, trial.on))

    @rule(node=st.integers(0, 2))
    def gain_device(self, node):
        if len(self.nodes) < 9:
            self.gain(node)

    @precondition(lambda self: self.nodes)
    @rule(pick=PICK)
    def lose_device(self, pick):
        device = sorted(self.nodes)[pick % len(self.nodes)]
        for name, trial in self.trials.items():
            if device in trial.held:
                if trial.asked < 2 and trial.status == "running" and trial.on[0] != device:
                    trial.on, trial.asked_devices = tuple(d for d in trial.on if d != device), None
                    self.refused.add(name)
                else:
                    self.stop(trial, "waiting")
                trial.held = tuple(d for d in trial.held if d != device)
        del self.nodes[device]
        self.leaving.discard(device)
        self.send(m.DeviceLost(device))

    @precondition(lambda self: self.nodes)
    @rule(pick=PICK, model=st.sampled_from(["fast", "slow"]))
    def find_model(self, pick, model):
        device = sorted(self.nodes)[pick % len(self.nodes)]
        self.send(m.ModelFound(device, model))

    @precondition(lambda self: self.nodes.keys() - self.leaving)
    @rule(pick=PICK)
    def device_leaves(self, pick):
        there = sorted(self.nodes.keys() - self.leaving)
        device = there[pick % len(there)]
        self.leaving.add(device)
        self.send(m.DeviceLeaving(device))

    @invariant()
    def what_can_leave_leaves(self):
        assert not self.leaving & set(self.engine.idle_devices)
        for name in self.those("running"):
            trial = self.trials[name]
            if self.leaving & set(trial.on) and trial.kind != "plain" and trial.asked_devices is None:
                assert name in self.refused, f"{name} stays on a device that leaves"

    @precondition(lambda self: any(t.asked_devices for t in self.trials.values()))
    @rule(pick=PICK, how=st.sampled_from(["all", "some", "none", "failed"]))
    def answer(self, pick, how):
        asked = [name for name, trial in self.trials.items() if trial.asked_devices]
        name = asked[pick % len(asked)]
        trial = self.trials[name]
        wanted, trial.asked_devices = trial.asked_devices, None
        before = trial.on
        trial.on = {"all": wanted, "some": wanted[: max(1, len(wanted) // 2)]}.get(how, before)
        if set(trial.on) != set(wanted):
            self.refused.add(name)
        event = m.ResizeFailed(name, trial.on) if how == "failed" else m.Resized(name, trial.on)
        self.send(event)
        assert set(trial.on) <= set(trial.held)

    @precondition(lambda self: self.those("running", "waiting"))
    @rule(pick=PICK, kind=KINDS)
    def find_kind(self, pick, kind):
        live = self.those("running", "waiting")
        name = live[pick % len(live)]
        self.trials[name].kind = kind
        self.send(m.KindFound(name, kind))

    @precondition(lambda self: self.those("running", "waiting"))
    @rule(pick=PICK)
    def can_grow(self, pick):
        live = self.those("running", "waiting")
        name = live[pick % len(live)]
        self.trials[name].grows = True
        self.send(m.CanGrow(name))

    @precondition(lambda self: self.those("waiting"))
    @rule(pick=PICK, devices=st.integers(2, 3))
    def find_gang(self, pick, devices):
        waiting = self.those("waiting")
        name = waiting[pick % len(waiting)]
        self.trials[name].asked = devices
        self.send(m.GangFound(name, devices))

    @precondition(lambda self: self.trials)
    @rule(pick=PICK, stays=st.booleans())
    def end_growth(self, pick, stays):
        name = list(self.trials)[pick % len(self.trials)]
        self.narrow |= set() if stays else {name}
        self.send(m.GrowthEnded(name, stays))

    @invariant()
    def what_must_not_grow_does_not(self):
        for name in getattr(self, "narrow", ()):
            trial = self.trials[name]
            if trial.status == "running" and trial.asked_devices is None and trial.asked < 2:
                assert len(trial.on) == 1, name

    @precondition(lambda self: self.trials)
    @rule(pick=PICK, left=LEFT)
    def change_budget(self, pick, left):
        self.send(m.BudgetChanged(list(self.trials)[pick % len(self.trials)], left))

    @precondition(lambda self: any(t.has_run and t.status != "running" for t in self.trials.values()))
    @rule(pick=PICK)
    def late(self, pick):
        late = [n for n, t in self.trials.items() if t.has_run and t.status in ("waiting", "paused", "ended")]
        if late:
            name = late[pick % len(late)]
            self.send(m.Result(name, 1.0, 1), m.Resized(name, (0,)), m.ResizeFailed(name, (0,)))

    # What must hold

    @invariant()
    def books_agree(self):
        tenants: dict[int, list[str]] = {device: [] for device in self.nodes}
        for name, trial in self.trials.items():
            view = self.engine.trial(name)
            assert view.status == trial.status, name
            assert view.devices == trial.on, name
            assert bool(trial.on) == (trial.status in ("running", "suspending"))
            for device in trial.held:
                tenants[device].append(name)
        assert {d: sorted(t) for d, t in holders(self.engine).items()} == {d: sorted(t) for d, t in tenants.items()}
        assert set(self.engine.waiting) == set(self.those("waiting"))

    @invariant()
    def nothing_idles_that_could_start(self):
        running = Counter(self.trials[name].group for name in self.those("running", "suspending"))
        idle = self.engine.idle_devices
        sizes = Counter(node for device, node in self.nodes.items() if device not in self.leaving)
        may_start, gangs, held_for = [], [], []
        for name in self.engine.waiting:
            trial = self.trials[name]
            synchronous, concurrency = self.groups[trial.group]
            places = 1000 if synchronous or concurrency is None else concurrency - running[trial.group]
            # A gang of this group for which a node is held keeps one of the group's places, too.
            kept = any(
                self.trials[other].asked >= 2 and self.trials[other].group == trial.group and other != name
                for other in self.engine.waiting
            )
            fits = max(sizes.values(), default=0) >= trial.asked
            if trial.asked >= 2 and places > 0 and fits:
                held_for.append(name)
            if places > kept and fits:
                (gangs if trial.asked >= 2 else may_start).append(name)
        if gangs:
            # One node may be held back for the first of them.
            on_node = Counter(self.nodes[device] for device in idle)
            room = [n for n, count in on_node.items() if count >= min(self.trials[g].asked for g in gangs)]
            assert len(room) <= 1, f"{gangs} wait with {idle} idle"
        if may_start:
            held_back = {self.nodes[device] for device in idle}
            assert len(held_back) <= bool(held_for), f"{may_start} wait with {idle} idle"

    @invariant()
    def limits_hold(self):
        running = [self.trials[name] for name in self.those("running", "suspending")]
        assert sum(trial.group == "three" for trial in running) <= 3
        for trial in running:
            if len(trial.held) > 1:
                assert trial.grows or trial.asked == len(trial.held)

    def teardown(self):
        """With enough devices and everybody ending in turn, every trial starts and all is given back."""
        if not hasattr(self, "trials"):
            return
        for device in list(self.leaving):
            self.lose_device(sorted(self.nodes).index(device))
        while sum(node == "node0" for node in self.nodes.values()) < 4:
            self.gain(0)
        waiting = set(self.those("waiting"))
        for _ in range(3 * len(self.trials) + 3):
            for name, trial in self.trials.items():
                if trial.asked_devices:
                    trial.on, trial.asked_devices = trial.asked_devices, None
                    self.send(m.Resized(name, trial.on))
            for name in self.those("running", "suspending"):
                waiting.discard(name)
                self.stop(self.trials[name], "ended")
                self.send(m.TrialEnded(name, "stopped"))
        assert not waiting, f"never started: {waiting}"
        assert not self.engine.held_devices() and not self.engine.waiting
        assert self.engine.idle_devices == tuple(sorted(self.nodes))
        assert not any(trial.held for trial in self.trials.values())


EngineMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngine = EngineMachine.TestCase

"""Followers that die, hang, are slow or fail at each message: the loop goes on as alone, and nothing is repeated."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fluidtune.elastic.divided import call as divided_call
from fluidtune.elastic.divided.follower import Follower
from fluidtune.elastic.divided.meeting import Lost, Refused, connect
from fluidtune.elastic.divided.parts import sizes_of
from fluidtune.elastic.divided.tensor_link import Link
from fluidtune.elastic.divided.torch_private import HOOKS_FOR_ALL
from fluidtune.elastic.divided.trees import Tree
from tests.contracts.processes import until
from tests.elastic.divided.grown import Grown, grown

STEPS = 12


def layers(statistics: bool) -> nn.Module:
    torch.manual_seed(1)
    between = (nn.BatchNorm1d(16),) if statistics else ()
    return nn.Sequential(nn.Linear(12, 16), *between, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 5)).double()


class Loop:
    """A small loop; `step` is one of its steps."""

    def __init__(self, statistics: bool = False, seed: int = 2) -> None:
        self.model = layers(statistics)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.data = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []

    def step(self) -> None:
        x = torch.randn(20, 12, generator=self.data, dtype=torch.float64)
        y = torch.randint(5, (20,), generator=self.data)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def result(self) -> list[float]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [*self.losses, *(each.sum().item() for each in tensors), torch.rand(1).item()]


def alone(statistics: bool, steps: int = STEPS) -> list[float]:
    loop = Loop(statistics)
    for _ in range(steps):
        loop.step()
    return loop.result()


def at(kind: str, number: int, act: Callable[[Follower], None], after: bool = False) -> Callable[[Follower], None]:
    """A follower that does ``act`` at its ``number``-th message of this kind; ``after``: once it has computed."""

    def run(follower: Follower) -> None:
        serve, seen = follower._serve, 0

        def hooked(message: Any) -> None:
            nonlocal seen
            seen += message.kind == kind
            if message.kind == kind and seen == number:
                if after:
                    send = follower._link.send
                    follower._link.send = lambda *args, **more: act(follower) or send(*args, **more)
                else:
                    act(follower)
            serve(message)

        follower._serve = hooked
        follower.run()

    return run


def die(follower: Follower) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(follower: Follower) -> None:
    time.sleep(3600)


def fail(follower: Follower) -> None:
    def broken(*args: Any, **more: Any) -> None:
        raise MemoryError("no memory is left in the follower")

    for held in follower._held.values():
        for replica in held.replicas.values():
            replica.forward = broken


def meet_no_more(follower: Follower) -> None:
    follower._gather = lambda *_: die(follower)


MOMENTS = {
    "module": at("module", 1, die),
    "weights": at("weights", 1, die),
    "the check": at("check", 1, die),
    "the check, computed": at("check", 1, die, after=True),
    "forward": at("forward", 4, die),
    "forward, computed": at("forward", 4, die, after=True),
    "backward": at("backward", 4, die),
    "backward, computed": at("backward", 4, die, after=True),
    "forward, hung": at("forward", 4, hang),
    "backward, hung": at("backward", 4, hang),
    "forward, failed": at("forward", 4, fail),
    "meeting in the forward": at("forward", 4, meet_no_more),
    "meeting in the backward": at("backward", 4, meet_no_more),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that does not answer is given up after seconds."""
    monkeypatch.setattr(divided_call, "GRACE_S", 0.5)
    monkeypatch.setattr(divided_call, "PATIENCE", 1.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("followers", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("statistics", [False, True], ids=["", "statistics"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_follower_is_lost(moment: str, statistics: bool, followers: int) -> None:
    before = alone(statistics)
    loop = Loop(statistics)
    with grown(1) as trial:
        trial.add(MOMENTS[moment])
        for _ in range(followers - 1):
            trial.add()
        trial.division.begin_iteration()
        for _ in range(STEPS):
            loop.step()
        if moment != "forward, failed" and (statistics or "meeting" not in moment):
            assert len(trial.division.followers.present) == followers - 1
        assert loop.result() == pytest.approx(before, rel=1e-9)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("opens", [True, False], ids=["its number is a file's", "its number is free"])
def test_a_backward_on_a_link_that_another_call_has_closed(opens: bool, tmp_path: Path) -> None:
    """Seen: its gradients were written over a file that the loop had opened meanwhile."""
    loop, x, outputs = Loop(), torch.ones(20, 12, dtype=torch.float64), list[torch.Tensor]()
    with grown(2) as trial:
        followers = trial.division.followers

        def divided() -> bool:
            before, outputs[:] = followers.divided, [loop.model(x)]
            return followers.divided > before

        assert until(divided)
        trial.kill(trial.pids[-1])
        outputs.append(loop.model(x))
        assert not followers.present
        with ExitStack() as files:
            for each in range(4 * opens):
                files.enter_context(open(tmp_path / str(each), "w+b", buffering=0)).write(b"precious")
            sum(outputs).sum().backward()
    assert all(each.read_bytes() == b"precious" for each in tmp_path.iterdir())


@pytest.mark.usefixtures("impatient")
def test_the_loop_does_not_wait_for_a_check() -> None:
    """Of a follower that hangs in it, which is given up in the end."""
    loop = Loop(True)
    with grown(1, patient=False) as trial:
        trial.add(at("check", 1, hang))
        trial.division.begin_iteration()
        while trial.division.followers.can_divide():
            loop.step()
            time.sleep(0.01)
    assert len(loop.losses) > 5
    assert loop.result() == pytest.approx(alone(True, len(loop.losses)), rel=1e-9)


def test_a_backward_beside_checks() -> None:
    """Seen: a backward took the answer to another call's check for its gradients, and StopIteration left the loop."""
    torch.manual_seed(0)
    net, beside, size = nn.Linear(300, 300).double(), 0, 1
    with grown(2, patient=False) as trial:
        followers = trial.division.followers
        for _ in range(400):
            trial.division.begin_iteration()
            x = torch.randn(200, 300).double()
            loss, expected = net(x).sum(), x.sum(0)
            if followers.divided:
                net(x)  # and again, so that checks are few
                size += 1
                loss, expected = loss + net(x[:size]).sum(), expected + x[:size].sum(0)  # another number of samples
                beside += followers.undecided
            net.zero_grad()
            loss.backward()
            assert torch.allclose(net.weight.grad, expected.expand(300, 300), rtol=1e-9, atol=1e-9)
            if beside == 5:
                break
        assert beside == 5 and len(followers.present) == 1


@pytest.mark.slow
def test_500_kills(request: pytest.FixtureRequest) -> None:
    """Followers are killed at random moments while others arrive; the result is that of a loop without any."""
    kills = 250 * min(2, request.config.getoption("--kills"))
    chance = random.Random(7)
    expected, loop = alone(True, 40 * kills // 10), Loop(True)
    with grown(3) as trial:
        killed = 0
        for step in range(40 * kills // 10):
            if step % 4 == 0 and killed < kills:
                for pid in list(trial.pids):
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        trial.pids.remove(pid)
                if len(trial.pids) < 3:
                    trial.add()
                thread = threading.Timer(
                    chance.uniform(0.0, 0.004), os.kill, (chance.choice(trial.pids), signal.SIGKILL)
                )
                thread.start()
                killed += 1
            loop.step()
        for pid in list(trial.pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                trial.pids.remove(pid)
    assert loop.result() == pytest.approx(expected, rel=1e-8)


def test_thousand_resizes() -> None:
    """Width 1, 2, 3, 1, ..: each change takes part in the next call, and nothing is left behind."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    expected, loop = alone(True, 120), Loop(True)
    with grown(1) as trial:
        for step in range(120):
            trial.width(1 + step % 3)
            loop.step()
            assert len(trial.division.followers.present) <= step % 3
    assert loop.result() == pytest.approx(expected, rel=1e-9)
    assert len(os.listdir("/proc/self/fd")) <= files + 2


def test_one_call_an_iteration() -> None:
    """Growth is not given up before calls are decided; a follower that returns has its replica soon."""
    torch.manual_seed(0)
    net, others = nn.Linear(4, 4), [nn.Linear(300, 300) for _ in range(4)]
    with grown(2, patient=False) as trial:
        for _ in range(2000):  # a follower gets several modules at a time
            if len(trial.checked) == 1 + len(others):
                break
            time.sleep(0.005)
            trial.width(2)
            for each in (net, *others):
                each(torch.randn(8, each.in_features))
            trial.facts()
        assert trial.checked == [("Linear", "divided", "")] * 5 and len(trial.division.followers.present) == 1
        trial.width(1)
        net = nn.Linear(4, 4)
        trial.width(2)
        undivided = []
        for _ in range(2):
            for count in range(1000):
                trial.division.begin_iteration()
                net(torch.randn(8, 4)).sum().backward()
                facts = trial.facts()
                assert facts.ungrowable is None
                if facts.grown is not None:
                    undivided.append(count)
                    break
                time.sleep(0.01)
            assert facts.grown[0] == 2
            trial.width(1)
            net(torch.randn(8, 4))
            trial.width(2)
            time.sleep(0.5)
    assert len(undivided) == 2 and undivided[0] >= 2 and undivided[1] == 0


def test_that_a_trial_calls_modules_is_seen_without_followers_and_no_hook_stays() -> None:
    with grown(1) as trial:
        for _ in range(20):  # more calls than a look lasts
            nn.ReLU()(torch.ones(1))
        assert not trial.facts().calls_modules and any(HOOKS_FOR_ALL)
        nn.Sequential(nn.Linear(1, 1))(torch.ones(1))
        assert trial.facts().calls_modules and not any(HOOKS_FOR_ALL)


def test_modules_without_parameters_do_not_end_the_look_for_one_with_them() -> None:
    """As transforms of each sample, before the first batch."""
    with grown(2) as trial:
        trial.division.begin_iteration()
        for _ in range(50):
            nn.ReLU()(torch.ones(2))
        nn.Linear(4, 4)(torch.randn(8, 4)).sum().backward()
        assert trial.facts().calls_modules


def test_a_module_in_more_states_than_a_follower_keeps_replicas_of() -> None:
    """Seen: a follower forgot other replicas than its leader believed, and the module stayed whole."""
    net = nn.Linear(12, 5)
    with grown(2) as trial:
        for state in "ABCDAEBCDA":
            net.state = state
            for _ in range(3):
                net(torch.randn(20, 12))
        trial.facts()
        assert trial.checked == [("Linear", "divided", "")] and trial.division.followers.divided > 10


def test_a_slow_follower_gets_less() -> None:
    def slow(follower: Follower) -> None:
        forward = follower._forward

        def slowed(value: Any, tensors: Any) -> Any:
            time.sleep(0.02 * value["cut"][2] / 10)
            kind, said, found = forward(value, tensors)
            said["seconds"] += 0.02 * value["cut"][2] / 10
            return kind, said, found

        follower._forward = slowed
        follower.run()

    loop = Loop()
    loop.model = nn.Sequential(*(each for each in loop.model if not isinstance(each, nn.Dropout)))
    with grown(1) as trial:
        trial.add(slow)
        trial.division.begin_iteration()
        for _ in range(70):
            loop.step()
        own, other = sizes_of(20, trial.division.followers.shares(2))
    assert other <= 4 < 16 <= own


def test_the_error_is_that_of_alone() -> None:
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x[:, 0] > 100).any()):
                raise ValueError(f"a batch of {len(x)} has a bad sample")
            return super().forward(x)

    model = Fails(12, 5)
    with grown(2) as trial:
        for _ in range(4):
            model(torch.randn(20, 12)).sum().backward()
        assert trial.division.followers.divided, (trial.facts(), trial.checked)
        bad = torch.randn(20, 12)
        bad[15, 0] = 101.0  # in the follower's part
        for _ in range(2):
            with pytest.raises(ValueError, match="a batch of 20 has a bad sample"):
                model(bad)
        assert len(trial.division.followers.present) == 1
        assert model(torch.randn(20, 12)).shape == (20, 5)


def test_a_loop_that_is_ended_from_outside_leaves_no_half_call() -> None:
    class Ended(BaseException):
        pass

    class Stops(nn.Linear):
        stop = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if Stops.stop and threading.current_thread() is threading.main_thread() and os.getpid() == leader:
                raise Ended
            return super().forward(x)

    leader, model = os.getpid(), Stops(12, 5)
    with grown(2) as trial:
        for _ in range(4):
            model(torch.randn(20, 12)).sum().backward()
        assert trial.division.followers.divided, (trial.facts(), trial.checked)
        Stops.stop = True
        with pytest.raises(Ended):
            model(torch.randn(20, 12))
        Stops.stop = False
        assert model(torch.randn(20, 12)).shape == (20, 5)


@pytest.mark.parametrize("secret", [b"x" * 32, b""], ids=["another", "none"])
def test_a_stranger_is_not_let_in(secret: bytes) -> None:
    with grown(1) as trial:
        with pytest.raises((OSError, Refused)):
            connect(trial.division.address, secret, "stranger")
        assert not trial.division.followers.can_divide()


def test_a_follower_of_a_dead_leader_ends() -> None:
    """Also while a data loader's process of the leader lives on."""
    read, write = os.pipe()
    leader = os.fork()
    if leader == 0:
        trial = Grown()
        follower = trial.add()
        loader = os.fork()
        if loader == 0:
            os.close(write)
            time.sleep(3600)
        os.write(write, f"{follower} {loader}".encode())
        os.close(write)
        time.sleep(3600)
    follower, loader = (int(each) for each in os.read(read, 100).split())
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    try:
        until(lambda: not psutil.pid_exists(follower) or psutil.Process(follower).status() == psutil.STATUS_ZOMBIE, 10)
    finally:
        os.kill(loader, signal.SIGKILL)


def test_followers_of_another_machine() -> None:
    """Through a port, where no memory is shared."""
    expected, loop = alone(True), Loop(True)
    with grown(3, host="127.0.0.1") as trial:
        for _ in range(STEPS):
            loop.step()
        assert trial.division.followers.divided, (trial.facts(), trial.checked)
        assert not any(peer.link.shares for peer in trial.division.followers.present)
    assert loop.result() == pytest.approx(expected, rel=1e-9)


def test_who_sends_waits_for_a_leader_that_computes_and_not_for_a_follower_that_hangs() -> None:
    """Seen: a follower was given up where the loop called no module for a minute while it sent a large answer."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    device = torch.device("cpu")
    leader, follower, answer = Link(ends[0], False, device, 0.1), Link(ends[1], False, device), torch.arange(1e6)
    sending = threading.Thread(target=follower.send, args=("outputs", None, [answer]))
    sending.start()
    sending.join(1.0)  # ten times as long as the leader would wait
    assert sending.is_alive() and torch.equal(leader.receive().tensors[0], answer)
    sending.join()
    with pytest.raises(Lost, match="timed out"):
        leader.send("forward", None, [answer])


def test_a_replica_that_cannot_be_made_leaves_its_own_module_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: the module that was called when the follower said so stayed whole."""
    made, loop, other = Tree.value, Loop(), nn.Linear(12, 7).double()

    def value(tree: Tree, tensors: Any = None) -> Any:
        if tensors is None and len(tree.tensors[0]) == 7:
            raise MemoryError("no room")
        return made(tree, tensors)

    monkeypatch.setattr(Tree, "value", value)
    with grown(2, patient=False) as trial:

        def both_are_checked() -> bool:
            trial.division.begin_iteration()
            other(torch.ones(20, 12, dtype=torch.float64))
            time.sleep(0.1)
            loop.step()
            trial.facts()
            return trial.division.followers.divided > 0 and len(trial.checked) > 1

        until(both_are_checked)
    assert {(name, verdict) for name, verdict, _ in trial.checked} == {("Sequential", "divided"), ("Linear", "whole")}


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    """Of the leader and of its follower, also where graphs are never used."""
    loop = Loop()

    def held(pid: int) -> int:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1])

    with grown(2) as trial:
        before = []
        for step in range(900):
            loop.step()
            loop.model(torch.zeros(20, 12, dtype=torch.float64))
            if step == 300:
                before = [held(os.getpid()), held(trial.pids[0])]
        after = [held(os.getpid()), held(trial.pids[0])]
    pages = [late - early for early, late in zip(before, after, strict=True)]
    assert max(pages) < 1500, pages


def test_an_error_of_our_own_leaves_the_loop_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any place of the leader's side: the call is computed whole, from the random numbers where they were."""
    from fluidtune.elastic.divided import checks, module_calls

    expected = alone(True)
    for owner, name in (
        (checks, "difference"),
        (divided_call, "parts_of"),
        (module_calls.ModuleCalls, "_ready"),
        (divided_call.Call, "result"),
    ):
        loop = Loop(True)
        with monkeypatch.context() as patch, grown(2) as trial:
            patch.setattr(owner, name, lambda *args, **more: 1 / 0)
            for _ in range(STEPS):
                loop.step()
            trial.facts()
            assert any("ZeroDivisionError" in why for _, _, why in trial.checked), (name, trial.checked)
        losses, *weights, _ = loop.losses, *loop.result()[STEPS:]
        assert [*losses, *weights] == pytest.approx(expected[:-1], rel=1e-9), name

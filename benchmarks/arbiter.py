"""The arbiter's process over many lease changes on one real Ray cluster: does its tick, or its memory, grow?

``python -m benchmarks.arbiter --json [--quick] [--lease-changes N] [--gpus N] [--users] [--idle]``. The arbiter leases
emulated GPUs of a Ray cluster that this command starts. Two apps want all of them, and give each one back at once, so
that every lease ends at the first opportunity and is a lease change: one placement group is made and one removed.
Nothing runs on the GPUs.

``--apps N`` is another measurement, without Ray: N apps hold all GPUs (``--gpus``) and exchange messages with the
arbiter's state machine five times a second each, on the virtual clock, for ``seconds`` in which leases end. ``cores``
is the processor time of the state machine divided by that time, ``by_event`` the same for each kind of event,
``rounds`` and ``events`` their numbers. Agents run elsewhere and are not counted.

``--users`` is a third one, on Ray: for ``seconds``, ten apps of one user and one of another want all GPUs. ``share`` is
by user the part of the leased GPU time that his apps had, from the time on at which both had GPUs first.

``--idle`` is a fourth one, on Ray: does the arbiter's memory grow while two apps hold all GPUs and nothing happens but
ticks and heartbeats? ``arbiter_mb`` is its resident memory after each minute (MB), ``empty_mb`` that of a Ray actor
beside it that does nothing, ``ticks`` how many ticks there were, and ``exchanges`` how often the apps spoke.

``first`` and ``last`` are the first and the last 1,000 ticks of the arbiter (of a short run, all ticks twice): ``p50``,
``p95`` and ``max`` of their durations (ms), ``arbiter_mb`` and ``gcs_mb`` (the resident memory of the arbiter's process
and of Ray's head, MB) when they were over. ``changes`` are the lease changes of the whole run, ``changes_per_second``
their rate, ``gcs_kb_per_change`` by how much Ray's head grew for each (it keeps removed groups), and
``round_seconds`` the duration of the last round.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks.common import finish, parser, result, say
from themis_bridge import JobInfo
from themis_bridge import messages as m
from themis_bridge.agent import Agent, Gained, Leave
from themis_bridge.arbiter import Arbiter
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.fairness import kinds_of
from themis_bridge.lease_manager import leases_of
from themis_bridge.locality import Gpu
from themis_bridge.shell.actor import TICK_S, ArbiterActor

#: Ticks whose durations are kept: the last minute and a half.
TICKS = 1000
#: Seconds between two lines of progress.
SAY_S = 10.0
#: Seconds between two exchanges of both apps. Judgement: a tick of the arbiter, which is when something can change.
EXCHANGE_S = 0.1
#: Lease with ``--users``, s. Judgement: the users' shares are even after a few leases.
USERS_LEASE_S = 12.0


class Work:
    """Jobs that never end, enough for all GPUs."""

    def __init__(self, gpus: int):
        self._report = m.Report((kinds_of([JobInfo(1.0, 1000.0)] * gpus),), peak=gpus)

    def report(self) -> m.Report:
        return self._report


class Measured(ArbiterActor):
    """The arbiter's process. Its status has ``ticks`` and the durations of the last `TICKS`, ``tick_ms``, too."""

    def __init__(self, *args: Any):
        self._times: deque[float] = deque(maxlen=TICKS)
        self._count = 0
        super().__init__(*args)

    def _tick(self) -> None:
        began = time.monotonic()
        super()._tick()
        self._times.append(time.monotonic() - began)
        self._count += 1

    def status(self) -> dict[str, Any]:
        last = sorted(self._times) or [0.0]
        at = {"p50": 0.5, "p95": 0.95, "max": 1.0}
        milliseconds = {name: 1000 * last[int(share * (len(last) - 1))] for name, share in at.items()}
        return super().status() | {"ticks": self._count, "tick_ms": milliseconds}


class App:
    """An app that gives each GPU back when it has it, or, unless it ``gives_back``, when its lease is not renewed."""

    def __init__(self, name: str, arbiter: Any, gpus: int, user: str = "", gives_back: bool = True):
        self._agent, self._arbiter = Agent(name, f"{name}/1", Work(gpus), user, bundle={"GPU": 1.0}), arbiter
        self._gives_back = gives_back
        self.changes = 0

    def exchange(self) -> None:
        import ray

        agent = self._agent
        for notice in agent.take(ray.get(self._arbiter.hear.remote(agent.heartbeat()))):
            if isinstance(notice, Leave) or (self._gives_back and isinstance(notice, Gained)):
                agent.vacated(notice.gpu.id, notice.token)
                self.changes += isinstance(notice, Gained)


def megabytes(process: psutil.Process) -> float:
    return process.memory_info().rss / 2**20


@contextmanager
def leasing(gpus: int, **settings: float) -> Iterator[Any]:
    """An arbiter with these settings that leases so many emulated GPUs of a Ray cluster of its own."""
    import ray

    from themis_bridge.shell import control

    ray.init(address="local", num_cpus=2, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
    try:
        control.ArbiterActor = Measured  # type: ignore[misc]
        yield control.start("GPU", **settings)
        control.stop()
    finally:
        ray.shutdown()


def measure(changes: int, gpus: int) -> dict[str, Any]:
    """The figures of one run."""
    from themis_bridge.shell import control

    with leasing(gpus) as arbiter:
        head = next(each for each in psutil.Process().children(recursive=True) if "gcs_server" in each.name())
        apps = [App(name, arbiter, gpus) for name in ("a", "b")]
        for app in apps:
            app.exchange()
        found: dict[str, Any] = {}
        began = said = time.monotonic()
        start_mb = megabytes(head)
        done = 0
        while done < changes or "first" not in found:
            for app in apps:
                app.exchange()
            time.sleep(EXCHANGE_S)
            done = sum(app.changes for app in apps)
            if "first" not in found or time.monotonic() - said >= SAY_S:
                status = control.status()
                figures = {
                    **status["tick_ms"],
                    "arbiter_mb": megabytes(psutil.Process(status["pid"])),
                    "gcs_mb": megabytes(head),
                }
                if "first" not in found and (status["ticks"] >= TICKS or done >= changes):
                    found["first"] = figures
                if time.monotonic() - said >= SAY_S:
                    said = time.monotonic()
                    shown = ", ".join(f"{key} {value:.1f}" for key, value in figures.items())
                    say(f"{done} of {changes} lease changes in {said - began:.0f} s: {shown}")
        seconds = time.monotonic() - began
        status = control.status()
        found["last"] = {
            **status["tick_ms"],
            "arbiter_mb": megabytes(psutil.Process(status["pid"])),
            "gcs_mb": megabytes(head),
        }
        return {
            **found,
            "changes": done,
            "ticks": status["ticks"],
            "rounds": status["rounds"],
            "round_seconds": status["round_seconds"],
            "changes_per_second": done / seconds,
            "gcs_kb_per_change": 1024 * (found["last"]["gcs_mb"] - start_mb) / done,
            "trouble": status["trouble"],
        }


def users(gpus: int, seconds: float) -> dict[str, Any]:
    """The shares of two users with ten apps and one, see the module."""
    from themis_bridge.shell import control

    with leasing(gpus, lease_s=USERS_LEASE_S, notice_s=USERS_LEASE_S / 6) as arbiter:
        apps = [App(f"many{i}", arbiter, gpus, "many", False) for i in range(10)] + [
            App("one", arbiter, gpus, "one", False)
        ]
        for app in apps:
            app.exchange()
        held: Counter[str] = Counter()
        began = last = time.monotonic()
        while last - began < seconds:
            for app in apps:
                app.exchange()
            now, there = time.monotonic(), Counter[str]()
            for each in control.status()["apps"].values():
                there[each["user"]] += len(each["leases"])
            if len(held) == 2 or min(there["many"], there["one"]) > 0:
                held.update({user: (now - last) * number for user, number in there.items()})
            else:
                began = now
            last = now
            time.sleep(EXCHANGE_S)
        return {"seconds": seconds, "share": {user: each / held.total() for user, each in held.items()}}


class Empty:
    """An actor that does nothing."""

    def pid(self) -> int:
        return psutil.Process().pid


def idle(gpus: int, minutes: int, minute_s: float) -> dict[str, Any]:
    """The arbiter's memory while nothing changes, see the module. ``minute_s``: seconds of a minute."""
    import ray

    from themis_bridge.shell import control

    with leasing(gpus) as arbiter:
        apps = [App(name, arbiter, gpus, gives_back=False) for name in ("a", "b")]
        for app in apps:
            app.exchange()
        process = psutil.Process(control.status()["pid"])
        empty = ray.remote(Empty).options(num_cpus=0).remote()
        beside = psutil.Process(ray.get(empty.pid.remote()))
        found: list[float] = []
        nothing: list[float] = []
        began, exchanges = time.monotonic(), 0
        while len(found) < minutes:
            for app in apps:
                app.exchange()
                exchanges += 1
            time.sleep(EXCHANGE_S)
            if time.monotonic() - began >= minute_s * (len(found) + 1):
                found.append(megabytes(process))
                nothing.append(megabytes(beside))
                say(f"minute {len(found)}: {found[-1]:.2f} MB, an empty actor {nothing[-1]:.2f} MB")
        ticks = control.status()["ticks"]
        return {"arbiter_mb": found, "empty_mb": nothing, "ticks": ticks, "exchanges": exchanges}


def machine_alone(apps: int, gpus: int, seconds: float) -> dict[str, Any]:
    """The figures of the state machine without Ray, see the module."""
    arbiter, agents, now = Arbiter(ArbiterState()), {}, 0.0
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    known: dict[str, str] = {}

    def send(*events: m.Event) -> None:
        queue = deque(events)
        while queue:
            event = queue.popleft()
            began = time.process_time()
            arbiter.handle(event, now)
            if isinstance(event, m.Tick):
                # As the shell does when it has written the books: after each tick at most.
                told = {name: leases_of(arbiter.state, name) for name in arbiter.state.apps}
            spent[type(event).__name__] += time.process_time() - began
            count[type(event).__name__] += 1
            if isinstance(event, m.Tick):
                for lease in arbiter.state.leases:
                    if not lease.group:
                        queue.append(m.Reservation(lease.gpu, lease.token, "group"))
                for name, each in told.items():
                    if known.get(name) != each.digest:
                        known[name] = each.digest
                        agents[name].take(each)

    send(m.Gpus(tuple(Gpu(f"g{i:05}", f"m{i // 8:04}") for i in range(gpus))))
    for number in range(apps):
        name = f"app{number:04}"
        agents[name] = Agent(name, name, Work(max(1, 2 * gpus // apps)))
        send(agents[name].heartbeat())
    names = list(agents)
    patience = arbiter.state.settings.patience_s
    while now + patience / 2 < arbiter.state.settings.lease_s / 2:
        # Until the first leases end nothing happens.
        now += patience / 2
        send(m.Tick(), *(agents[name].heartbeat() for name in names))
    spent.clear()
    count.clear()
    rounds = arbiter.state.rounds
    for tick in range(round(seconds / TICK_S)):
        now += TICK_S
        send(m.Tick())
        # Each app speaks at every second tick.
        send(*(agents[name].heartbeat() for name in names[tick % 2 :: 2]))
    return {
        "apps": apps,
        "seconds": seconds,
        "cores": sum(spent.values()) / seconds,
        "by_event": {kind: each / seconds for kind, each in spent.items()},
        "events": dict(count),
        "rounds": arbiter.state.rounds - rounds,
    }


def main() -> None:
    """The command."""
    arguments = parser("The arbiter's tick and memory over many lease changes.")
    arguments.add_argument("--lease-changes", type=int, help="how many (20,000; 100 with --quick)")
    arguments.add_argument("--gpus", type=int, default=32, help="emulated GPUs of the cluster (32)")
    arguments.add_argument("--apps", type=int, help="measure the state machine alone, without Ray, with so many apps")
    arguments.add_argument("--users", action="store_true", help="measure the shares of two users with ten apps and one")
    arguments.add_argument("--idle", action="store_true", help="measure the memory while nothing changes")
    options = arguments.parse_args()
    if options.idle:
        found = idle(options.gpus, 2 if options.quick else 10, 5.0 if options.quick else 60.0)
        finish(result("arbiter", f"{options.gpus} GPUs", "emulated", **found), options.json)
        return
    if options.users:
        found = users(options.gpus, 30.0 if options.quick else 120.0)
        say(", ".join(f"{user}: {share:.1%}" for user, share in found["share"].items()))
        finish(result("arbiter", f"{options.gpus} GPUs", "emulated", **found), options.json)
        return
    if options.apps:
        found = machine_alone(options.apps, options.gpus, 5.0 if options.quick else 60.0)
        say(f"{options.apps} apps, {options.gpus} GPUs: {found['cores']:.2f} cores")
        finish(result("arbiter", f"{options.gpus} GPUs", "twin", **found), options.json)
        return
    changes = options.lease_changes or (100 if options.quick else 20_000)
    figures = measure(changes, options.gpus)
    finish(result("arbiter", f"{options.gpus} GPUs", "emulated", **figures), options.json)


if __name__ == "__main__":
    main()

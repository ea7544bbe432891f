"""The arbiter's process and its agents over a stand-in of Ray, on a virtual clock, with faults in chosen calls.

The real `ArbiterActor`, its books and `reservations` run; only Ray's functions, the clock and the thread are replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Container, Iterable
from types import SimpleNamespace
from typing import Any

from tests.themis.cluster import Job
from themis_bridge.agent import Agent, Leave, Lost
from themis_bridge.shell import actor, books_file, reservations

#: Seconds between two exchanges of an agent.
EXCHANGE_S = 0.2
#: Settings of the arbiter: leases end often.
SETTINGS = {"lease_s": 12.0, "notice_s": 3.0, "pace_s": 1.0, "answer_s": 1.0}


class Finished(BaseException):
    """The time of `World.run` is over; no handler of the arbiter catches it."""


class Group:
    """Ray's handle of a placement group."""

    def __init__(self, id: bytes):
        self.id = id


class World:
    """See the module.

    fault: (function, number), or some of these: that call of the function, counted from 0, raises an exception.
    done: whether that call has its effect before it raises.
    gives_back: whether agents give each GPU back as soon as they know its group, so that leases change all the time.
    held: (app, GPU, token) of reservations that are there at the start.
    text: the books of an arbiter before this one.
    """

    def __init__(
        self,
        monkeypatch: Any,
        path: Any,
        fault: tuple[str, int] | Container[tuple[str, int]] = (),
        done: bool = False,
        gpus: int = 2,
        settings: dict[str, Any] | None = None,
        gives_back: bool = False,
        held: Iterable[tuple[str, str, int]] = (),
        text: str | None = None,
    ):
        self.now = 0.0
        self._gives_back = gives_back
        self._settings = SETTINGS if settings is None else settings
        self.books = path / "books" / "head.json"
        monkeypatch.setattr(actor, "books_path", lambda head: path / "books" / f"{head}.json")
        self.gpus, self.done = gpus, done
        self.faults = {fault} if isinstance(fault, tuple) and fault else fault
        #: Function -> how often it was called.
        self.calls: dict[str, int] = {}
        #: With this error every write of the books fails; None: writing works.
        self.disk: OSError | None = None
        #: What the clocks of the arbiter's machine say while they stand still; None: they go.
        self.stands_at: float | None = None
        #: By how much they are behind ``now``.
        self.behind = 0.0
        #: Placement group id -> its entry in Ray's table.
        self.table: dict[str, dict[str, str]] = {}
        #: GPUs that something outside Themis holds.
        self.outside = 0
        self.agents: dict[str, Agent] = {}
        self._ids = itertools.count(1)
        #: App -> the id of its driver's sign of life.
        self._lives: dict[str, str] = {}
        self._until = self._exchanged = 0.0
        for name in ("placement_group", "placement_group_table", "remove_placement_group", "get_placement_group"):
            monkeypatch.setattr(reservations, name, self._faulty(name, getattr(self, f"_{name}")))
        nodes = self._faulty("nodes", self._nodes)
        ray = SimpleNamespace(
            nodes=nodes,
            PlacementGroupID=bytes,
        )
        monkeypatch.setattr(reservations, "ray", ray)
        monkeypatch.setattr(reservations, "PlacementGroup", Group)
        write = books_file.write_books
        written = self._faulty("write_books", lambda *args: write(*args))
        monkeypatch.setattr(books_file, "write_books", written)
        monkeypatch.setattr(actor, "Gauges", lambda: SimpleNamespace(set=lambda *args: None))
        monkeypatch.setattr(actor, "threading", SimpleNamespace(RLock=threading.RLock, Thread=self._no_thread))
        clock = SimpleNamespace(monotonic=self._clock, time=lambda: 1e9 + self._clock(), sleep=self._sleep)
        monkeypatch.setattr(actor, "time", clock)
        for app, gpu, token in held:
            made = self._placement_group([], name=f"themis/{app}/{gpu}/{token}")
            self.table[made.id.hex()]["state"] = "CREATED"
        if text is not None:
            self.books.parent.mkdir()
            self.books.write_text(text)
        self.start()

    def _no_thread(self, **kwargs: Any) -> Any:
        return SimpleNamespace(start=lambda: None, ident=None)

    def _clock(self) -> float:
        return self.now - self.behind if self.stands_at is None else self.stands_at

    def start(self) -> None:
        """Start the arbiter's process; Ray starts it again if its constructor raises."""
        while True:
            try:
                self.actor = actor.ArbiterActor(self._settings, "CPU", "head")
                return
            except Exception:
                self.now += 1.0

    # --- Ray

    def _faulty(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = self.calls[name] = self.calls.get(name, -1) + 1
            if name == "write_books" and self.disk is not None:
                raise self.disk
            if (name, number) not in self.faults:
                return real(*args, **kwargs)
            if self.done:
                real(*args, **kwargs)
            raise (OSError(28, "No space left on device") if name == "write_books" else RuntimeError("injected"))

        return call

    def _nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": float(self.gpus), "node:one": 1.0}
        return [{"NodeID": "m", "NodeManagerAddress": "one", "Alive": True, "Resources": resources}]

    def _placement_group(
        self, bundles: Any, strategy: str = "PACK", name: str = "", lifetime: str | None = None
    ) -> Group:
        if any(name and each["name"] == name and each["state"] != "REMOVED" for each in self.table.values()):
            raise RuntimeError(f"{name} already exists")
        id = next(self._ids).to_bytes(4, "big")
        self.table[id.hex()] = {"name": name, "state": "PENDING", "placement_group_id": id.hex()}
        return Group(id)

    def _get_placement_group(self, name: str) -> Group:
        for id, group in self.table.items():
            if group["name"] == name and group["state"] != "REMOVED":
                return Group(bytes.fromhex(id))
        raise ValueError(name)

    def _remove_placement_group(self, group: Group) -> None:
        if group.id.hex() in self.table:
            self.table[group.id.hex()]["state"] = "REMOVED"

    def _placement_group_table(self, group: Group | None = None) -> dict[str, Any]:
        for each in self.table.values():
            if each["state"] == "PENDING" and each["name"] and len(self.there()) + self.outside < self.gpus:
                each["state"] = "CREATED"
        if group is None:
            self.calls["whole table"] = self.calls.get("whole table", 0) + 1
            return dict(self.table)
        return self.table.get(group.id.hex(), {})

    def there(self) -> list[tuple[str, str, int]]:
        """(app, GPU, token) of the groups in which something can run."""
        leases = [each for each in self.table.values() if each["name"]]
        names = [each["name"].split("/") for each in leases if each["state"] == "CREATED"]
        return [(app, gpu, int(token)) for _, app, gpu, token in names]

    # --- agents and time

    def join(self, name: str, job: Job, session: str = "") -> None:
        agent = self.agents[name] = Agent(name, session or f"{name}/1", job, bundle={"CPU": 1.0})
        agent.life = reservations.id_of(self._placement_group([{"head": 1.0}]))
        self._lives[name] = agent.life
        self._try(lambda: self._exchange(name))

    def end_driver(self, name: str) -> None:
        """The driver is dead, and Ray removes its sign of life."""
        self.table[self._lives[name]]["state"] = "REMOVED"

    def leave(self, name: str) -> None:
        """The job is done, and its driver does not call any more."""
        agent = self.agents.pop(name)
        self.end_driver(name)
        self._try(lambda: self.actor.leave(name, agent.session))

    def run(self, seconds: float) -> None:
        """Let the arbiter's loop run for so long."""
        self._until = self.now + seconds
        with contextlib.suppress(Finished):
            self.actor._loop()

    def _sleep(self, seconds: float) -> None:
        if self.now >= self._until:
            raise Finished
        self.now += seconds
        if self.now - self._exchanged >= EXCHANGE_S:
            self._exchanged = self.now
            for name in self.agents:
                self._try(lambda name=name: self._exchange(name))

    def _try(self, call: Any) -> None:
        with contextlib.suppress(Exception):  # A tenant calls again.
            call()

    def _exchange(self, name: str) -> None:
        agent = self.agents[name]
        for notice in agent.take(self.actor.hear(agent.heartbeat())):
            if isinstance(notice, Leave):
                agent.vacated(notice.gpu.id)
            assert not isinstance(notice, Lost) or notice.gpu.id not in agent.leases
        for gpu in list(agent.leases) if self._gives_back else ():
            agent.vacated(gpu)

    def unused(self) -> set[str]:
        """The GPUs that no agent holds under a lease that Ray has reserved for it."""
        held = {
            gpu
            for app, gpu, token in self.there()
            if app in self.agents and (view := self.agents[app].leases.get(gpu)) is not None and view.token == token
        }
        return {f"m-{i}" for i in range(self.gpus)} - held

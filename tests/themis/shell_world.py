"""The arbiter's process and its tenants over a stand-in of Ray, on a virtual clock.

The real `ArbiterActor`, its books, `Groups`, `reservations` and `Tenant` run. Only Ray's functions, the clocks and the
threads are replaced.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray

from tests.themis.cluster import Job
from themis_bridge.agent import Agent, Leave, Lost
from themis_bridge.errors import ThemisError
from themis_bridge.shell import actor, books_file, reservations, tenant

#: Seconds between two exchanges of a tenant, and between two ticks of the arbiter.
EXCHANGE_S, TICK_S = 0.2, actor.TICK_S
#: Settings of the arbiter: leases end often.
SETTINGS = {"lease_s": 12.0, "notice_s": 3.0, "pace_s": 1.0, "answer_s": 1.0}


class Handle:
    """Ray's handle of a placement group."""

    def __init__(self, id: bytes):
        self.id = id


def turns() -> Any:
    """In the place of a tenant's event, so that its loop makes one turn."""
    over = itertools.cycle([False, True])
    return SimpleNamespace(wait=lambda seconds: next(over), set=lambda: None)


class World:
    """See the module.

    cores: of each machine.
    held: (app, GPU, token) of reservations that are there at the start.
    text: the books of an arbiter before this one.
    """

    def __init__(
        self,
        monkeypatch: Any,
        path: Any,
        cores: Sequence[int] = (2,),
        settings: dict[str, Any] | None = None,
        held: Iterable[tuple[str, str, int]] = (),
        text: str | None = None,
    ):
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._settings = SETTINGS if settings is None else settings
        self.books = path / "books" / "head.json"
        #: Address of a machine -> its cores, how many of them something outside uses, and its node, if it is alive.
        self.cores = {str(number): each for number, each in enumerate(cores)}
        self.outside: Counter[str] = Counter()
        self.nodes = dict(zip(self.cores, "mnop", strict=False))
        #: Function -> how often it was called.
        self.calls: Counter[str] = Counter()
        #: With this error every write of the books fails; None: writing works.
        self.disk: OSError | None = None
        #: Placement group id -> its entry in Ray's table.
        self.table: dict[str, dict[str, Any]] = {}
        self.tenants: dict[str, tenant.Tenant] = {}
        self._ids, self._sessions = itertools.count(1), itertools.count(1)
        self._replace(monkeypatch)
        for app, gpu, token in held:
            made = self._placement_group([{"node:0": 1.0}], name=f"themis/{app}/{gpu}/{token}")
            self.table[made.id.hex()]["state"] = "CREATED"
        if text is not None:
            self.books.parent.mkdir()
            self.books.write_text(text)
        self.start()
        self.at(TICK_S, self._tick)

    def _replace(self, monkeypatch: Any) -> None:
        """Put the stand-ins into the modules."""
        monkeypatch.setattr(actor, "books_path", lambda head: self.books.with_name(f"{head}.json"))
        for name in ("placement_group", "placement_group_table", "remove_placement_group", "get_placement_group"):
            monkeypatch.setattr(reservations, name, self._counted(name, getattr(self, f"_{name}")))
        ids = self._counted("id", bytes)
        nodes = self._counted("nodes", self._nodes)
        monkeypatch.setattr(ray, "nodes", nodes)
        monkeypatch.setattr(ray, "PlacementGroupID", ids)
        monkeypatch.setattr(reservations, "PlacementGroup", Handle)
        write = books_file.write_books
        monkeypatch.setattr(books_file, "write_books", self._counted("write_books", lambda *args: write(*args)))
        monkeypatch.setattr(actor, "Gauges", lambda: SimpleNamespace(set=lambda *args: None))
        thread = SimpleNamespace(start=lambda: None, join=lambda seconds: None, ident=None)
        monkeypatch.setattr(actor, "threading", SimpleNamespace(RLock=threading.RLock, Thread=lambda **more: thread))
        monkeypatch.setattr(actor, "time", SimpleNamespace(monotonic=self.clock))
        threads = SimpleNamespace(Lock=threading.Lock, Event=turns, Thread=lambda **more: thread)
        monkeypatch.setattr(tenant, "threading", threads)
        monkeypatch.setattr(tenant, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=self.run))
        monkeypatch.setattr(uuid, "uuid4", lambda: SimpleNamespace(hex=str(next(self._sessions))))
        monkeypatch.setattr(tenant, "JOIN_S", 0.0)
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        methods = {name: SimpleNamespace(remote=partial(partial, self.ask, name)) for name in ("hear", "leave")}
        arbiter = SimpleNamespace(**methods)
        monkeypatch.setattr(ray, "get_actor", self._counted("get_actor", lambda name, namespace: arbiter))

    def start(self) -> None:
        """Start the arbiter's process; Ray starts it again if its constructor raises."""
        while True:
            try:
                self.actor = actor.ArbiterActor(self._settings, "CPU", "head")
                return
            except Exception:
                self.now += 1.0

    # --- time

    def clock(self) -> float:
        """What the arbiter's clock says."""
        return self.now

    def at(self, delay: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    def run(self, seconds: float) -> None:
        """Let the time pass, with all that happens in it."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until + 1e-9:
            at, _, action = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            action()
        self.now = max(self.now, until)

    def _tick(self) -> None:
        self.actor._tick()
        self.at(TICK_S, self._tick)

    # --- Ray

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if name == "write_books" and self.disk is not None:
                raise self.disk
            return self.call(name, lambda: real(*args, **kwargs), (*args, *kwargs.values()))

        return call

    def call(self, name: str, real: Callable[[], Any], args: Sequence[Any]) -> Any:
        """A call of Ray or of the disk. ``real``: makes it."""
        return real()

    def get(self, call: Callable[[], Any], timeout: float) -> Any:
        """A call of the arbiter by a tenant."""
        return call()

    def ask(self, method: str, *args: Any) -> Any:
        """The arbiter answers a call."""
        return getattr(self.actor, method)(*args)

    def _nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": node,
                "NodeManagerAddress": address,
                "Alive": True,
                "Resources": {"CPU": float(self.cores[address]), f"node:{address}": 1.0},
            }
            for address, node in self.nodes.items()
        ]

    def _placement_group(
        self, bundles: Sequence[dict[str, float]], strategy: str = "PACK", name: str = "", lifetime: str | None = None
    ) -> Handle:
        if name and any(each["name"] == name and each["state"] != "REMOVED" for each in self.table.values()):
            raise RuntimeError(f"{name} already exists")
        id = next(self._ids).to_bytes(4, "big")
        tied = [each[5:] for bundle in bundles for each in bundle if each[5:] in self.cores]
        self.table[id.hex()] = {
            "name": name,
            "state": "PENDING",
            "placement_group_id": id.hex(),
            "address": tied[0] if tied else "",
            #: When it may be made, and when it is gone.
            "from": self.now,
            "until": math.inf,
        }
        return Handle(id)

    def _get_placement_group(self, name: str) -> Handle:
        for id, group in self.table.items():
            if group["name"] == name and group["state"] != "REMOVED":
                return Handle(bytes.fromhex(id))
        raise ValueError(name)

    def _remove_placement_group(self, group: Handle) -> None:
        if group.id.hex() in self.table:
            self.table[group.id.hex()]["until"] = self.now

    def _placement_group_table(self, group: Handle | None = None) -> dict[str, Any]:
        self.settle()
        if group is None:
            self.calls["whole table"] += 1
            return dict(self.table)
        return self.table.get(group.id.hex(), {})

    def settle(self) -> None:
        """Ray removes and makes groups; those that wait for a machine in the order in which they were asked for."""
        live = [each for each in self.table.values() if each["state"] != "REMOVED"]
        used = self.outside.copy()
        for each in live:
            if each["until"] <= self.now:
                each["state"] = "REMOVED"
            used[each["address"]] += each["state"] == "CREATED"
        for each in live:
            address = each["address"]
            waits = each["state"] in ("PENDING", "RESCHEDULING") and address in self.nodes
            if waits and each["from"] <= self.now and used[address] < self.cores[address]:
                each["state"] = "CREATED"
                used[address] += 1

    def there(self) -> list[tuple[str, str, int]]:
        """(app, GPU, token) of the groups in which something can run."""
        self.settle()
        leases = [each for each in self.table.values() if each["name"]]
        names = [each["name"].split("/") for each in leases if each["state"] == "CREATED"]
        return [(app, gpu, int(token)) for _, app, gpu, token in names]

    # --- tenants

    @property
    def agents(self) -> dict[str, Agent]:
        """Of the tenants."""
        return {name: each._agent for name, each in self.tenants.items()}

    def join(self, name: str, job: Job) -> None:
        """A job comes."""
        self.tenants[name] = job_s = tenant.Tenant(name, job, {"CPU": 1.0}, "CPU")
        self.at(EXCHANGE_S, lambda: self._turn(name, job_s))

    def end_driver(self, job: tenant.Tenant) -> None:
        """The driver is dead, and Ray removes its sign of life."""
        self.table[job._agent.life]["state"] = "REMOVED"

    def leave(self, name: str) -> None:
        """The job is done, and its driver does not call any more."""
        self.tenants.pop(name).close()

    def _turn(self, name: str, job: tenant.Tenant) -> None:
        if self.tenants.get(name) is not job:
            return
        job._loop()
        with contextlib.suppress(ThemisError):
            for notice in job.poll():
                if isinstance(notice, Leave):
                    job.vacated(notice.gpu.id, notice.token)
                assert not isinstance(notice, Lost) or notice.gpu.id not in job._agent.leases
        self.at(EXCHANGE_S, lambda: self._turn(name, job))

    def unused(self) -> set[str]:
        """The GPUs that no tenant holds under a lease that Ray has reserved for it."""
        held = {
            gpu
            for app, gpu, token in self.there()
            if app in self.tenants and (view := self.agents[app].leases.get(gpu)) is not None and view.token == token
        }
        return {f"{node}-{i}" for address, node in self.nodes.items() for i in range(self.cores[address])} - held

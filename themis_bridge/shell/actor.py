"""The arbiter's process: a named, detached Ray actor that Ray starts again when it dies.

It feeds the state machine with what agents send, which GPUs Ray has, what became of reservations, and the time. It
writes the books before it carries instructions out, and once a second because of the clock in them. Nothing is decided
here.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from ray.util.metrics import Gauge

from themis_bridge import messages as m
from themis_bridge.arbiter import Arbiter
from themis_bridge.errors import ThemisError
from themis_bridge.settings import Settings
from themis_bridge.shell import reservations
from themis_bridge.shell.books_file import read_books, write_books

logger = logging.getLogger(__name__)

NAME, NAMESPACE = "themis-arbiter", "themis"
#: Seconds between two ticks, each with a look at the reservations under way. Judgement: short beside a round's answers.
TICK_S = 0.1
#: Seconds between two looks at Ray's nodes. Judgement: the look lists all nodes, and nodes rarely change.
NODES_S = 1.0
#: A reservation that Ray has not made after this many seconds is given up; a removal is asked for again. Judgement: Ray
#: needs milliseconds if the resources are free; if they are not, something outside Themis uses them.
CREATE_S = 5.0


class ArbiterActor:
    """See the module.

    settings: changes to the default `Settings`, used only if there are no books.
    unit: "GPU" or "CPU", what is leased.
    books: path of the file in which the state is stored.
    """

    def __init__(self, settings: dict[str, Any], unit: str, books: str):
        self._unit, self._books = unit, Path(books)
        self._lock = threading.RLock()
        #: Session -> instructions that its agent has not fetched yet.
        self._mail: dict[str, deque[m.Instruction]] = defaultdict(deque)
        #: App -> the resources that one of its devices reserves. They are stored in the books, too.
        self._bundles: dict[str, dict[str, float]] = {}
        #: Reservations that Ray is making or removing -> when that was asked for (monotonic clock, s).
        self._making: dict[reservations.Key, float] = {}
        self._removing: dict[reservations.Key, float] = {}
        self._written = ""
        self._round_seconds = 0.0
        self._round_began: tuple[int, float] = (0, 0.0)
        gpus, self._ties = reservations.cluster_gpus(unit)
        data = json.loads(read_books(self._books) or "{}")
        self._bundles = data.pop("bundles", {})
        known = {gpu.id for gpu in gpus}
        found = reservations.states()
        reservations.remove(*(key for key in found if key[1] not in known))
        there = {gpu: (app, token) for app, gpu, token in found if gpu in known}
        # The first arbiter of a cluster is "restored" as well, so that its tokens and versions are above those of an
        # arbiter that was stopped.
        self._arbiter, out = Arbiter.restored(data, there, gpus, time.time())
        if not data:
            self._arbiter.state.settings = Settings().changed(settings)
        logger.info("the arbiter begins: %d apps, %d reservations", len(self._arbiter.state.apps), len(there))
        self._write()
        self._carry_out(out)
        # Some reservations may have been under way when the last arbiter died.
        for lease in self._arbiter.state.leases:
            if not lease.closing:
                self._making.setdefault((lease.app, lease.gpu, lease.token), time.monotonic())
        self._rho = Gauge("themis_rho", "Finish-time fairness that an app last reported", ("app",))
        self._held = Gauge("themis_leases", "GPUs that an app holds", ("app",))
        self._busy = Gauge("themis_utilisation", "Share of the GPUs that are leased")
        self._duration = Gauge("themis_round_seconds", "Seconds of the last round")
        self._nodes_at = 0.0
        self._shown: set[str] = set()
        threading.Thread(target=self._loop, name="themis-loop", daemon=True).start()

    # --- called by agents and operators

    def join(self, app: str, session: str, bundle: dict[str, float]) -> None:
        """An app wants GPUs. ``bundle``: Ray resource -> amount, what one of its devices reserves.

        Raises ThemisError if the bundle does not have exactly one of the unit that is leased here.
        """
        if bundle.get(self._unit) != 1.0:
            raise ThemisError(
                f"app {app!r} asks for devices of {bundle}; the arbiter of this Ray cluster leases single "
                f"{self._unit}s: stop it and start it with the other unit, or run the job without an arbiter"
            )
        with self._lock:
            self._handle(m.AppJoined(app, session))
            if self._arbiter.state.apps[app].session == session:
                # The app was not refused. A job that was edited and started again may ask for another bundle.
                self._bundles[app] = bundle
                self._write()

    def exchange(self, app: str, session: str, events: list[m.AppEvent]) -> list[m.Instruction]:
        """Handle what an agent sends, and return the instructions that wait for it."""
        with self._lock:
            for event in events:
                self._handle(event)
            self._handle(m.Heard(app, session))
            mail = self._mail.pop(session, deque())
        # Of several messages about leases only the last one counts.
        last = max((i for i, each in enumerate(mail) if isinstance(each, m.Leases)), default=-1)
        return [each for i, each in enumerate(mail) if not isinstance(each, m.Leases) or i == last]

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings. Raises ThemisError for an unknown name or a value that is not allowed."""
        with self._lock:
            self._handle(m.Configured(changes))
            self._write()

    def status(self) -> dict[str, Any]:
        """What an operator may want to see, as plain data; times are seconds."""
        with self._lock:
            state, auctioneer = self._arbiter.state, self._arbiter.auctioneer
            return {
                "unit": self._unit,
                "pid": os.getpid(),
                "gpus": len(state.gpus),
                "leased": sum(1 for lease in state.leases if not lease.closing),
                "rounds": state.rounds,
                "round_seconds": self._round_seconds,
                "late_answers": auctioneer.late,
                "failed_rounds": auctioneer.failed,
                "settings": state.saved()["settings"],
                "apps": {
                    name: {
                        "rho": app.rho,
                        "age": state.clock - app.joined,
                        "contention": state.contention(name),
                        "leases": {
                            lease.gpu: {"token": lease.token, "remaining": lease.expires - state.clock}
                            for lease in state.leases.of(name)
                        },
                    }
                    for name, app in state.apps.items()
                },
            }

    def close(self) -> None:
        """End all leases and delete the books. The caller must kill the actor afterwards."""
        with self._lock:
            reservations.remove(*reservations.states())
            self._books.unlink(missing_ok=True)
            self._written = "closed"

    # --- the machine

    def _handle(self, event: m.Event) -> None:
        out = self._arbiter.handle(event, time.monotonic())
        round_ = self._arbiter.auctioneer.round
        if round_ is not None and round_.number != self._round_began[0]:
            self._round_began = (round_.number, time.monotonic())
        elif round_ is None and self._round_began[1]:
            self._round_seconds = time.monotonic() - self._round_began[1]
            self._round_began = (self._arbiter.state.rounds, 0.0)
        if not out:
            return
        if not isinstance(event, m.Heard) or len(out) > 1:
            # The answer to Heard is one Leases message. If that is all, only the clock in the books has changed.
            self._write()
        self._carry_out(out)

    def _write(self) -> None:
        if self._written == "closed":
            return
        text = json.dumps({**self._arbiter.saved(), "bundles": self._bundles})
        if text != self._written:
            write_books(self._books, text)
            self._written = text

    def _carry_out(self, instructions: list[m.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, m.Reserve):
                self._reserve(instruction)
            elif isinstance(instruction, m.Remove):
                key = (instruction.app, instruction.gpu, instruction.token)
                self._making.pop(key, None)
                self._removing[key] = time.monotonic()
                reservations.remove(key)
            elif isinstance(instruction, m.AppInstruction):
                self._mail[instruction.session].append(instruction)

    def _reserve(self, what: m.Reserve) -> None:
        gpu = self._arbiter.state.gpus[what.gpu]
        bundle = self._bundles.get(what.app, {self._unit: 1.0})
        self._making[what.app, what.gpu, what.token] = time.monotonic()
        reservations.reserve(what.app, gpu, what.token, bundle, self._ties[gpu.machine])

    # --- time and Ray

    def _loop(self) -> None:
        while True:
            time.sleep(TICK_S)
            try:
                with self._lock:
                    if self._written == "closed":
                        return
                    self._look_at_reservations()
                    if time.monotonic() >= self._nodes_at:
                        self._look_at_nodes()
                        self._nodes_at = time.monotonic() + NODES_S
                        self._forget_gone_apps()
                        self._set_gauges()
                        self._write()
                    self._handle(m.Tick())
            except Exception:
                # Ray may be shutting down, or a node may be half gone; the next look will tell.
                logger.exception("themis: a look at the cluster failed; it is repeated")

    def _look_at_reservations(self) -> None:
        if not self._making and not self._removing:
            return
        states = reservations.states()
        now = time.monotonic()
        for key, since in list(self._removing.items()):
            if key not in states:
                del self._removing[key]
                self._handle(m.Removed(key[1], key[2]))
            elif now - since > CREATE_S:
                self._removing[key] = now
                reservations.remove(key)
        for key, since in list(self._making.items()):
            if key not in self._making:
                continue  # An event handled in this loop has called it off.
            state = states.get(key)
            if state == "CREATED":
                del self._making[key]
                self._handle(m.Reserved(key[1], key[2]))
            elif now - since > CREATE_S:
                del self._making[key]
                reservations.remove(key)
                self._handle(m.ReserveFailed(key[1], key[2]))

    def _look_at_nodes(self) -> None:
        gpus, self._ties = reservations.cluster_gpus(self._unit)
        there = {gpu.id: gpu for gpu in gpus}
        for gpu in list(self._arbiter.state.gpus):
            if gpu not in there:
                lease = self._arbiter.state.leases.get(gpu)
                if lease is not None:
                    # Ray would make the placement group again on another node.
                    reservations.remove((lease.app, gpu, lease.token))
                self._handle(m.GpuLeft(gpu))
        for name, place in there.items():
            if name not in self._arbiter.state.gpus:
                self._handle(m.GpuJoined(place))

    def _forget_gone_apps(self) -> None:
        """Forget the mail and the bundles of apps that are gone; a refusal is fetched in the call that causes it."""
        apps = self._arbiter.state.apps
        sessions = {app.session for app in apps.values()}
        for session in self._mail.keys() - sessions:
            del self._mail[session]
        self._bundles = {app: bundle for app, bundle in self._bundles.items() if app in apps}

    def _set_gauges(self) -> None:
        state = self._arbiter.state
        for gone in self._shown - state.apps.keys():
            self._held.set(0, {"app": gone})
        self._shown = set(state.apps)
        for name, app in state.apps.items():
            self._held.set(len(state.leases.of(name)), {"app": name})
            if app.rho is not None:
                self._rho.set(app.rho, {"app": name})
        leased = sum(1 for lease in state.leases if not lease.closing)
        self._busy.set(leased / len(state.gpus) if state.gpus else 0.0)
        self._duration.set(self._round_seconds)


def check_unit(unit: str) -> None:
    """Raise ThemisError if ``unit`` cannot be leased."""
    if unit not in ("GPU", "CPU"):
        raise ThemisError(f'unit={unit!r}: the arbiter leases "GPU" or "CPU" (cores)')

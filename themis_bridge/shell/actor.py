"""The arbiter's process: a named, detached Ray actor that Ray starts again when it dies.

It feeds the state machine with what agents send, which GPUs Ray has, what became of reservations, and the time. At the
end of a tick it writes the books, if anything in them has changed, and once a second because of the clock in them. What
apps are told of their leases, and what `groups` makes Ray reserve and remove, follows from the books as they were
written last. Nothing is decided here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from themis_bridge import arbiter_view
from themis_bridge import messages as m
from themis_bridge.arbiter import Arbiter
from themis_bridge.errors import ThemisError, WrongArbiter
from themis_bridge.lease_manager import leases_of
from themis_bridge.leases import Lease
from themis_bridge.locality import Gpu
from themis_bridge.plain import text
from themis_bridge.settings import Settings
from themis_bridge.shell import reservations
from themis_bridge.shell.books_file import Books, books_path, loaded
from themis_bridge.shell.gauges import Gauges
from themis_bridge.shell.groups import Groups, Wanted
from themis_bridge.shell.reservations import Key

logger = logging.getLogger(__name__)

NAME, NAMESPACE = "themis-arbiter", "themis"
#: Seconds between two ticks.
TICK_S = 0.1
#: Seconds of a tick in which calls of Ray are made; the rest of them waits for the next ticks. Then a tick takes less
#: than 50 ms.
CALLS_S = 0.02
#: Seconds between two looks at Ray's nodes, which list all nodes.
NODES_S = 1.0
#: After this many seconds of silence, which are ten missed exchanges, the arbiter looks whether a driver is dead.
SILENT_S = 2.0
#: What the state machine raises for books that are damaged or of another version.
BAD_BOOKS = (ThemisError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


class ArbiterActor:
    """See the module.

    settings: changes to the default `Settings`, used only if there are no books.
    unit: "GPU" or "CPU", what is leased.
    head: id of the head node, on which this process runs and keeps its books.
    """

    def __init__(self, settings: dict[str, Any], unit: str, head: str):
        self._unit = unit
        self._lock = threading.RLock()
        self._books = Books(books_path(head), time.monotonic)
        #: Whether something has changed that is not in the books.
        self._unwritten = True
        #: As of the books: (app, session) -> its leases, and what Ray has to have reserved; None before they were
        #: written first.
        self._told: dict[tuple[str, str], m.Leases] = {}
        self._wanted: dict[Key, Wanted] | None = None
        self._groups = Groups(time.monotonic)
        self._closed = False
        #: Number of ticks so far.
        self._ticked = 0
        self._round_seconds = 0.0
        gpus, self._ties, self._left_out = reservations.cluster_gpus(unit)
        self._arbiter = restored(self._books, self._groups, gpus, settings)
        self._flush()
        self._gauges = Gauges()
        self._nodes_at = 0.0
        self._thread = threading.Thread(target=self._loop, name="themis-loop", daemon=True)
        self._thread.start()

    # --- called by agents and operators

    def hear(self, heard: m.Heartbeat) -> m.Leases | m.Refused | None:
        """Take what an agent says of its app. Returns the app's leases; None if the agent knows them.

        Raises ThemisError for a message that no agent can send; WrongArbiter if what one device reserves does not have
        exactly one of the unit that is leased here; ValueError for an id of a sign of life that cannot be one.
        """
        heard = m.plain_heartbeat(heard)
        reservations.check_app_name(heard.app)
        if heard.life:
            reservations.by_id(heard.life)
        if heard.bundle.get(self._unit) != 1.0:
            raise WrongArbiter(
                f"app {heard.app!r} asks for devices of {heard.bundle}; the arbiter of this Ray cluster leases single "
                f"{self._unit}s: stop it and start it with the other unit, or run the job without an arbiter"
            )
        with self._lock:
            refused, told = self._handle(heard), self._told.get((heard.app, heard.session))
            return told if refused is None and told is not None and told.digest != heard.known else refused

    def leave(self, app: str, session: str) -> None:
        """An app is done."""
        left = m.AppLeft(text(app, "app"), text(session, "session"))
        with self._lock:
            self._handle(left)

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings. Raises ThemisError for an unknown name or a value that is not allowed."""
        with self._lock:
            self._handle(m.Configured(changes))
            # When the operator gets an answer, it is done.
            self._flush()

    def status(self) -> dict[str, Any]:
        """What an operator may want to see, as plain data; times are seconds."""
        with self._lock:
            state, auctioneer = self._arbiter.state, self._arbiter.auctioneer
            return {
                "unit": self._unit,
                "pid": os.getpid(),
                "gpus": len(state.gpus),
                "leased": sum(not lease.waits for lease in state.leases),
                "rounds": state.rounds,
                "round_seconds": self._round_seconds,
                "failed_rounds": auctioneer.failed,
                "settings": state.saved()["settings"],
                "waiting": self._unwritten_leases() + self._groups.owed,
                "trouble": [each for each in (self._books.trouble(), self._groups.trouble, *self._left_out) if each],
                "apps": arbiter_view.view(state),
                "away": arbiter_view.away(state),
            }

    def close(self) -> None:
        """End all leases and delete the books. The caller must kill the actor afterwards.

        Raises ThemisError if Ray fails to remove some of the reservations; it may be called again.
        """
        with self._lock:
            self._closed = True
        if self._thread.ident is not None:
            self._thread.join()
        failed = []
        for _, group in reservations.found()[0].values():
            try:
                reservations.remove(group)
            except Exception as error:
                failed.append(str(error))
        if failed:
            raise ThemisError(f"{len(failed)} reservations could not be removed ({failed[0]}): stop the arbiter again")
        self._books.remove()

    # --- the machine

    def _handle(self, event: m.Event) -> m.Refused | None:
        """Let the state machine handle an event. Returns its answer to whoever sent it, if it refuses the event."""
        refused = self._arbiter.handle(event, time.monotonic())
        # What these two change is seen at the end of a tick, if it is more than the clock in the books.
        self._unwritten |= refused is None and not isinstance(event, m.Heartbeat | m.Tick)
        return refused

    def _flush(self) -> None:
        """Write the books if something in them has changed. From then on what follows from them is carried out."""
        if self._closed or not self._unwritten or not self._books.write(self._arbiter.state.saved()):
            return
        self._unwritten, state = False, self._arbiter.state
        self._told = {(name, app.session): leases_of(state, name) for name, app in state.apps.items()}
        self._wanted = {lease.key: self._need(lease) for lease in state.leases}

    def _unwritten_leases(self) -> int:
        """The number of leases that have begun or ended since the books were written."""
        return len({lease.key for lease in self._arbiter.state.leases} ^ (self._wanted or {}).keys())

    def _need(self, lease: Lease) -> Wanted:
        state = self._arbiter.state
        return Wanted(state.apps[lease.app].bundle or {self._unit: 1.0}, self._ties[state.gpus[lease.gpu].machine])

    # --- time and Ray

    def _loop(self) -> None:
        while not self._closed:
            time.sleep(TICK_S)
            self._tick()

    def _tick(self) -> None:
        """Make the calls of Ray that are due, look at the nodes, and let time pass; one that fails stops no other."""
        began = time.monotonic()
        self._try(self._work)
        self._try(self._look_at_a_driver)
        if began >= self._nodes_at:
            self._nodes_at = began + NODES_S
            self._try(self._look_at_nodes)
            self._try(self._keep_house)
        self._try(self._pass_time)
        self._ticked += 1

    def _try(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception:
            # Ray may be shutting down, or a node may be half gone; the next tick will tell.
            logger.exception("themis: a part of a tick failed; it is repeated")

    def _work(self) -> None:
        if self._wanted is not None:
            news = self._groups.work(self._wanted, CALLS_S)
            with self._lock:
                for each in news:
                    self._try(partial(self._handle, each))

    def _pass_time(self) -> None:
        with self._lock:
            rounds, began = self._arbiter.state.rounds, time.monotonic()
            self._try(partial(self._handle, m.Tick()))
            if self._arbiter.state.rounds != rounds:
                self._round_seconds = time.monotonic() - began
                self._unwritten = True
            self._unwritten |= self._unwritten_leases() > 0
            self._flush()

    def _keep_house(self) -> None:
        """Publish the gauges, and write the books with a clock that is not old."""
        with self._lock:
            self._gauges.set(self._arbiter.state, self._round_seconds)
            self._unwritten = True

    def _look_at_nodes(self) -> None:
        gpus, ties, left_out = reservations.cluster_gpus(self._unit)
        with self._lock:
            self._ties, self._left_out = ties, left_out
            self._handle(m.Gpus(tuple(gpus)))

    def _look_at_a_driver(self) -> None:
        """Ask Ray whether one of the silent drivers, each in turn, is dead. Then its app is forgotten."""
        with self._lock:
            silent = self._arbiter.state.silent(SILENT_S)
        if silent:
            app, session, life = silent[self._ticked % len(silent)]
            if reservations.is_gone(life):
                with self._lock:
                    self._handle(m.AppLeft(app, session, life))


def restored(books: Books, groups: Groups, gpus: list[Gpu], settings: dict[str, Any]) -> Arbiter:
    """The arbiter that goes on from the books.

    Without usable books the arbiter is what the reservations alone tell. The first arbiter of a cluster is restored as
    well, so that its tokens are above those of an arbiter that was stopped.

    ``books``: those that cannot be read are kept aside. ``groups``: gets the groups that exist. ``settings``: changes
    to the default `Settings`, if there are no books.
    """
    there: dict[Key, str] = {}
    found, newest = reservations.found()
    for key, (state, group) in found.items():
        made = state == reservations.CREATED
        groups.found(key, group, made)
        there[key] = reservations.id_of(group) if made else ""
    text = books.text()
    if text is not None:
        try:
            return Arbiter.restored(loaded(text), there, gpus, newest)
        except BAD_BOOKS as error:
            books.keep_aside(error)
    arbiter = Arbiter.restored({}, there, gpus, newest)
    arbiter.state.settings = Settings().changed(settings)
    return arbiter

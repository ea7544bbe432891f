"""The arbiter's process: a named, detached Ray actor that Ray starts again when it dies.

It feeds the state machine with what agents send, which GPUs Ray has, what became of reservations, and the time. At the
end of a tick it writes the books, if anything in them has changed, and once a second because of the clock in them. Only
then does it carry out the instructions since the last tick. They wait while the books cannot be written; what they ask
of Ray is carried out by `group_tasks`. Nothing is decided here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from themis_bridge import arbiter_view
from themis_bridge import messages as m
from themis_bridge.arbiter import Arbiter
from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu
from themis_bridge.settings import Settings
from themis_bridge.shell import reservations
from themis_bridge.shell.books_file import Books, books_path
from themis_bridge.shell.cluster_watch import ForeignUsage, SilentDrivers
from themis_bridge.shell.gauges import Gauges
from themis_bridge.shell.group_tasks import GroupTasks, Wanted
from themis_bridge.shell.write_ahead import WriteAhead

logger = logging.getLogger(__name__)

NAME, NAMESPACE = "themis-arbiter", "themis"
#: Seconds between two ticks.
TICK_S = 0.1
#: Seconds of a tick in which calls of Ray are made; the rest of them waits for the next ticks. Then a tick takes less
#: than 50 ms.
CALLS_S = 0.02
#: Seconds between two looks at Ray's nodes, which list all nodes.
NODES_S = 1.0
#: Ticks whose durations are kept for the status: the last minute and a half.
TICKS = 1000
#: What the state machine raises for books that are damaged or of another version.
BAD_BOOKS = (ThemisError, ValueError, TypeError, KeyError, AttributeError)


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
        self._write_ahead = WriteAhead(self._books, self._saved, self._carry_out)
        #: App -> the resources that one of its devices reserves. They are stored in the books, too.
        self._bundles: dict[str, dict[str, float]] = {}
        self._tasks = GroupTasks(time.monotonic, self._lock, self._asking_for)
        #: What the loop has to tell the state machine.
        self._news: list[m.Event] = []
        self._closed = False
        self._ticks: deque[float] = deque(maxlen=TICKS)
        self._ticked = 0
        self._foreign = ForeignUsage(time.monotonic)
        self._drivers = SilentDrivers(lambda life: reservations.is_gone(life), time.monotonic)
        self._round_seconds = 0.0
        self._round_began: tuple[int, float] = (0, 0.0)
        gpus, self._ties, self._left_out = reservations.cluster_gpus(unit)
        self._arbiter, out, self._bundles = restored(self._books, self._tasks, gpus, settings, time.time())
        # Some reservations may have been under way when the last arbiter died.
        for lease in self._arbiter.state.leases:
            key = lease.app, lease.gpu, lease.token
            if not lease.closing and key in self._tasks.found:
                self._tasks.reserve(key, self._wanted(lease.app, self._arbiter.state.gpus[lease.gpu]))
        self._write_ahead.take(out, write=True)
        self._write_ahead.flush()
        self._gauges = Gauges()
        self._nodes_at = 0.0
        self._thread = threading.Thread(target=self._loop, name="themis-loop", daemon=True)
        self._thread.start()

    # --- called by agents and operators

    def join(
        self, app: str, session: str, bundle: dict[str, float], user: str = "", life: str = "", together: int = 1
    ) -> None:
        """An app wants GPUs.

        Args:
            app, session, user, together: see `messages.AppJoined`.
            bundle: Ray resource -> amount, what one of its devices reserves.
            life: id of the driver's `reservations.sign_of_life`; "": it has none.

        Raises ThemisError if an argument cannot be true, or the bundle does not have exactly one of the unit that is
        leased here, and ValueError for an id that cannot be one.
        """
        joined = m.plain_event(m.AppJoined(app, session, user, life, together))
        app, session = joined.app, joined.session
        reservations.check_app_name(app)
        if life:
            reservations.by_id(life)
        bundle = reservations.plain_bundle(bundle)
        if bundle.get(self._unit) != 1.0:
            raise ThemisError(
                f"app {app!r} asks for devices of {bundle}; the arbiter of this Ray cluster leases single "
                f"{self._unit}s: stop it and start it with the other unit, or run the job without an arbiter"
            )
        with self._lock:
            self._handle(joined)
            known = self._arbiter.state.apps.get(app)
            if known is not None and known.session == session:
                # The app was not refused. A job that was edited and started again may ask for another bundle.
                self._bundles[app] = bundle
                self._write_ahead.unwritten = True

    def exchange(self, app: str, session: str, events: list[m.AppEvent]) -> list[m.Instruction]:
        """Handle what an agent sends, and return the instructions that wait for it.

        An app joins by `join` alone; a `messages.AppJoined` of an agent of an earlier version is ignored.

        Raises ThemisError for a message that no agent can send; then none of them is handled.
        """
        events = m.plain_events(events)
        with self._lock:
            for event in events:
                if not isinstance(event, m.AppJoined):
                    self._handle(event)
            mail = self._write_ahead.fetch(session)
            return [self._with_groups(each) if isinstance(each, m.Leases) else each for each in mail]

    def _with_groups(self, told: m.Leases) -> m.Leases:
        """The message with the group of each lease that Ray has reserved."""
        views = []
        for view in told.leases:
            group = self._tasks.there.get((told.app, view.gpu.id, view.token))
            views.append(view if group is None else replace(view, group=reservations.id_of(group)))
        return replace(told, leases=tuple(views))

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings. Raises ThemisError for an unknown name or a value that is not allowed."""
        with self._lock:
            self._handle(m.Configured(changes))
            # When the operator gets an answer, it is done.
            self._write_ahead.unwritten = True
            self._flush()

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
                "tick_ms": self._tick_ms(),
                "ticks": self._ticked,
                "waiting": len(self._write_ahead.waiting) + self._tasks.owed(),
                "trouble": [
                    each for each in (self._books.trouble(), self._tasks.trouble(), *self._left_out) if each
                ],
                "tally": asdict(auctioneer.tally),
                "apps": arbiter_view.view(state),
                "away": arbiter_view.away(state),
            }

    def _tick_ms(self) -> dict[str, float]:
        """Median, 95th percentile and largest of the last ticks' durations, in milliseconds."""
        last = sorted(self._ticks) or [0.0]
        at = {"p50": 0.5, "p95": 0.95, "max": 1.0}
        return {name: 1000 * last[int(share * (len(last) - 1))] for name, share in at.items()}

    def close(self) -> None:
        """End all leases and delete the books. The caller must kill the actor afterwards.

        Raises ThemisError if Ray fails to remove some of the reservations; it may be called again.
        """
        with self._lock:
            self._closed = True
        if self._thread.ident is not None:
            self._thread.join()
        failed = []
        for _, group in reservations.found().values():
            try:
                reservations.remove(group)
            except Exception as error:
                failed.append(str(error))
        if failed:
            raise ThemisError(f"{len(failed)} reservations could not be removed ({failed[0]}): stop the arbiter again")
        self._books.remove()

    # --- the machine

    def _handle(self, event: m.Event) -> None:
        out = self._arbiter.handle(event, time.monotonic())
        round_ = self._arbiter.auctioneer.round
        if round_ is not None and round_.number != self._round_began[0]:
            self._round_began = (round_.number, time.monotonic())
        elif round_ is None and self._round_began[1]:
            self._round_seconds = time.monotonic() - self._round_began[1]
            self._round_began = (self._arbiter.state.rounds, 0.0)
        # The answer to Heard is one Leases message. If that is all, only the clock in the books has changed.
        self._write_ahead.take(out, write=bool(out) and (not isinstance(event, m.Heard) or len(out) > 1))

    def _saved(self) -> dict[str, Any]:
        return {**self._arbiter.state.saved(), "bundles": self._bundles}

    def _flush(self) -> None:
        if not self._closed:
            self._write_ahead.flush()

    def _carry_out(self, instruction: m.Instruction) -> None:
        if isinstance(instruction, m.Reserve):
            gpu = self._arbiter.state.gpus.get(instruction.gpu)
            if gpu is None or gpu.machine not in self._ties:
                # Its node has left since the GPU was granted.
                self._news.append(m.ReserveFailed(instruction.gpu, instruction.token))
            else:
                key = (instruction.app, instruction.gpu, instruction.token)
                self._tasks.reserve(key, self._wanted(instruction.app, gpu))
        elif isinstance(instruction, m.Remove):
            self._tasks.remove((instruction.app, instruction.gpu, instruction.token))

    def _wanted(self, app: str, gpu: Gpu) -> Wanted:
        return Wanted(self._bundle(app), self._ties[gpu.machine])

    def _bundle(self, app: str) -> dict[str, float]:
        return self._bundles.get(app, {self._unit: 1.0})

    def _asking_for(self, bundle: Mapping[str, float]) -> frozenset[str]:
        """The apps that ask for at least as much as this bundle with one of their devices."""
        least = [(name, amount) for name, amount in bundle.items() if amount > 0]
        asked = self._bundles.items()
        return frozenset(app for app, each in asked if all(each.get(name, 0.0) >= amount for name, amount in least))

    # --- time and Ray

    def _loop(self) -> None:
        while not self._closed:
            time.sleep(TICK_S)
            self._tick()

    def _tick(self) -> None:
        """Make the calls of Ray that are due, look at the nodes, and let time pass; one that fails stops no other."""
        began = time.monotonic()
        self._try(self._work)
        if began >= self._nodes_at:
            self._nodes_at = began + NODES_S
            self._try(self._look_at_nodes)
            self._try(self._look_at_foreign_usage)
            self._try(self._look_at_drivers)
            self._try(self._keep_house)
        self._try(self._pass_time)
        self._ticks.append(time.monotonic() - began)
        self._ticked += 1

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:
            # Ray may be shutting down, or a node may be half gone; the next tick will tell.
            logger.exception("themis: a part of a tick failed; it is repeated")

    def _work(self) -> None:
        news = self._tasks.work(CALLS_S)
        with self._lock:
            self._news += news
            while self._news:
                self._handle(self._news.pop(0))

    def _pass_time(self) -> None:
        with self._lock:
            self._handle(m.Tick())
            self._flush()

    def _keep_house(self) -> None:
        """Forget the mail and the bundles of apps that are gone, and publish the gauges."""
        with self._lock:
            apps = self._arbiter.state.apps
            self._write_ahead.forget_others({app.session for app in apps.values()})
            self._bundles = {app: bundle for app, bundle in self._bundles.items() if app in apps}
            self._gauges.set(self._arbiter.state, self._round_seconds)
            self._write_ahead.unwritten = True

    def _look_at_nodes(self) -> None:
        gpus, ties, left_out = reservations.cluster_gpus(self._unit)
        there = {gpu.id: gpu for gpu in gpus}
        with self._lock:
            self._ties, self._left_out = ties, left_out
            state = self._arbiter.state
            for gpu in state.gpus.keys() - there.keys():
                lease = state.leases.get(gpu)
                if lease is not None:
                    # Ray would make the placement group again on another node.
                    self._tasks.remove((lease.app, gpu, lease.token))
                self._handle(m.GpuLeft(gpu))
            for name in there.keys() - state.gpus.keys():
                self._handle(m.GpuJoined(there[name]))

    def _look_at_foreign_usage(self) -> None:
        """End the pauses if something outside Themis has given back what a reservation may have lacked."""
        with self._lock:
            state = self._arbiter.state
            if self._tasks.owed() or not any(state.backoff.retry_times(state.clock)):
                self._foreign.busy()
            if not self._foreign.worth_a_look():
                return
        taken = reservations.taken()
        with self._lock:
            ours = [self._bundle(app) for app, _, _ in self._tasks.there]
            wanted = {name for bundle in self._bundles.values() for name in bundle}
            if not self._tasks.owed() and self._foreign.freed(taken, ours, wanted):
                self._handle(m.Freed())

    def _look_at_drivers(self) -> None:
        """Forget the apps whose drivers are dead; a name is kept for those that are only silent."""
        with self._lock:
            silent = self._drivers.silent(self._arbiter.state)
        dead = self._drivers.look(silent, CALLS_S)
        with self._lock:
            for each in dead:
                self._handle(each)


def check_unit(unit: str) -> None:
    """Raise ThemisError if ``unit`` cannot be leased."""
    if unit not in ("GPU", "CPU"):
        raise ThemisError(f'unit={unit!r}: the arbiter leases "GPU" or "CPU" (cores)')


def restored(
    books: Books, tasks: GroupTasks, gpus: list[Gpu], settings: dict[str, Any], wall: float
) -> tuple[Arbiter, list[m.Instruction], dict[str, dict[str, float]]]:
    """The arbiter, its first instructions, and the bundle of each app.

    Without usable books the arbiter is what the reservations alone tell. The first arbiter of a cluster is restored as
    well, so that its tokens and versions are above those of an arbiter that was stopped.

    ``books``: those that cannot be read are kept aside. ``tasks``: gets the groups that exist, and has to remove those
    that no app can hold. ``settings``: changes to the default `Settings`, if there are no books. ``wall``: time of
    day, s.
    """
    known = {gpu.id for gpu in gpus}
    there: dict[str, tuple[str, int]] = {}
    for key, (state, group) in sorted(reservations.found().items(), key=lambda each: each[0][2]):
        app, gpu, token = key
        (tasks.there if state == reservations.CREATED else tasks.found)[key] = group
        if gpu not in known:
            tasks.remove(key)
            continue
        if gpu in there:
            # It could not be made, and was being removed.
            tasks.remove((there[gpu][0], gpu, there[gpu][1]))
        there[gpu] = app, token
    newest = reservations.newest_token()
    data = books.read()
    bundles = data.pop("bundles", {})
    try:
        if not isinstance(bundles, dict):
            raise TypeError(f"bundles={bundles!r}: expected one for each app")
        arbiter, out = Arbiter.restored(data, there, gpus, wall, newest)
    except BAD_BOOKS as error:
        books.keep_aside(error)
        data, bundles = {}, {}
        arbiter, out = Arbiter.restored(data, there, gpus, wall, newest)
    if not data:
        arbiter.state.settings = Settings().changed(settings)
    logger.info("the arbiter begins: %d apps, %d reservations", len(arbiter.state.apps), len(there))
    return arbiter, out, bundles

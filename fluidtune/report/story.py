"""`fluidtune why`: one trial's story in sentences, from the event log alone.

Decides what of a trial is told, in which words, and what is summed up. Which trial is meant is decided in
trial_lookup.py, and which trial held which device in occupancy.py. Reasons are the log's own words.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fluidtune.report.causes import NO_REASON, OFTEN, Resizes, label_of, words_of
from fluidtune.report.events import EventDict, iterations_in
from fluidtune.report.growth_story import GrowthFacts
from fluidtune.report.occupancy import Replay
from fluidtune.report.summary import duration, plural

#: A story of at most this many entries, which fit a terminal, is told whole.
TOLD_WHOLE = 40
#: A longer one tells this many entries of each kind, the first ones, and the last one. What alternates shows the second
#: time, and the third says that it goes on.
TOLD_FIRST = 3
#: Event -> its kind, and its sentence. ``reason``: a colon and the event's reason in words, if it has one; ``because``:
#: the same, or that the log has none.
SENTENCES = {
    "can_grow": ("can grow", "turned out to be able to have several workers"),
    "not_committed": ("not committed", "its last iteration has no commit{reason}"),
    "growth_ended": ("growth ended", "must have one worker from now on{reason}"),
    "trial_suspended": ("left", "left its devices, to go on later{because}"),
    "recovered": ("recovered", "goes on from iteration {iteration}{reason}"),
    "room_lacking": ("no room", "device {device} had no room for it{reason}"),
    "worker_lost": ("worker lost", "its worker on device {device} died{reason}"),
    "device_lost": ("device lost", "it lost device {device}{reason}"),
    "device_returned": ("device returned", "it had to give up device {device}{reason}"),
}
#: What a user asks for -> in words.
STEERED = {
    "stop": "that it ends at its next result",
    "keep": "that it goes on when the algorithm wants to stop it",
    "clone": "for a clone of it",
}
#: What the trial does after an event. After `trial_ended` it has the event's ending.
STATES = {"trial_added": "waits", "trial_started": "runs", "trial_suspended": "waits", "worker_lost": "waits"}


@dataclass(frozen=True)
class Entry:
    """One thing that happened to the trial, at ``at`` (unix seconds), after ``iteration``.

    ``kind``: what entries are counted by. ``width``: the trial's width in devices from now on; None if the entry
    does not change it.
    """

    at: float
    iteration: int
    text: str
    kind: str
    width: float | None = None


@dataclass(frozen=True)
class Story:
    """All that happened to one trial, oldest first. ``head`` and ``end`` are sentences about the whole."""

    began: float
    head: str
    entries: tuple[Entry, ...]
    end: tuple[str, ...]

    def told(self) -> list[tuple[float, int, str]]:
        """What is told: when (unix seconds), after which iteration, and in which words; at most one for each entry.

        A story of more than `TOLD_WHOLE` entries has of each kind the first `TOLD_FIRST` and the last one. One line
        stands for all the others between two entries that are told: it counts them by kind and names their widths.
        """
        told: list[tuple[float, int, str]] = []
        for stretch in _stretches(self.entries):
            first = stretch[0]
            text = first.text if len(stretch) == 1 else _summed_up(stretch, self.began)
            told.append((first.at, first.iteration, text))
        return told

    def lines(self) -> list[str]:
        """The story for a terminal: `told` between its two sentences about the whole."""
        told = self.told()
        times = [duration(max(0.0, at - self.began)) for at, _, _ in told]
        wide = max(map(len, times), default=0)
        rows = [
            f"{when:>{wide}}  " + (f"[{iteration}] " if iteration else "") + text
            for when, (_, iteration, text) in zip(times, told, strict=True)
        ]
        return [self.head, *rows, *self.end]


def _stretches(entries: Sequence[Entry]) -> Iterable[list[Entry]]:
    """The entries: each alone if it is told, else together with those beside it."""
    if len(entries) <= TOLD_WHOLE:
        yield from ([entry] for entry in entries)
        return
    last = {entry.kind: place for place, entry in enumerate(entries)}
    seen: Counter[str] = Counter()
    silent: list[Entry] = []
    for place, entry in enumerate(entries):
        seen[entry.kind] += 1
        if seen[entry.kind] > TOLD_FIRST and place != last[entry.kind]:
            silent.append(entry)
            continue
        if silent:
            yield silent
            silent = []
        yield [entry]


def _summed_up(stretch: Sequence[Entry], began: float) -> str:
    """One sentence for several entries whose kinds the story has told. ``began``: unix seconds of its start."""
    kinds = Counter(entry.kind for entry in stretch)
    counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    until = duration(max(0.0, stretch[-1].at - began))
    text = f"{len(stretch)} events like those before, until {until}: {counts}"
    widths = sorted({entry.width for entry in stretch if entry.width is not None})
    return text + (f"; widths {', '.join(f'{width:.3g}' for width in widths)}" if widths else "")


def story_of(events: Iterable[EventDict], trial: str) -> Story:
    """The story of ``trial``, by its id. Without an event of the trial it has no entries."""
    teller = _Teller(trial)
    for event in events:
        teller.hear(event)
    return teller.story()


def _devices(devices: Sequence[int]) -> str:
    numbers = ", ".join(map(str, devices))
    return f"device {numbers}" if len(devices) == 1 else f"{len(devices)} devices ({numbers})"


def _because(event: EventDict | None) -> str:
    return f": {words_of(event) or NO_REASON}"


def _with(event: EventDict) -> str:
    """The event's reason behind a colon; nothing if it has none."""
    words = words_of(event)
    return f": {words}" if words else ""


def _values(steered: EventDict) -> str:
    """The parameters of a clone that differ, and from where it goes on."""
    parameters = steered.get("parameters")
    given = parameters.items() if isinstance(parameters, dict) else ()
    values = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given)
    start = " from its last checkpoint" if steered.get("from_checkpoint") else ""
    return start + (f" with {values}" if values else "")


def _kind_of(verb: str, cause: EventDict | None) -> str:
    label = label_of(cause)
    return f"{verb} ({label})" if label else verb


class _Teller:
    """Hears all events of a run, and notes what happens to one trial."""

    def __init__(self, trial: str) -> None:
        self._trial = trial
        self._use = Replay()
        self._resizes = Resizes()
        self._growth = GrowthFacts(trial)
        self._entries: list[Entry] = []
        self._began: float | None = None
        self._at, self._iteration, self._iterations = 0.0, 0, 0
        self._run, self._name, self._kind = "", "", ""
        self._state = "never ran"
        #: Its width now, or when it last had devices, and these.
        self._width = 0.0
        self._last: tuple[int, ...] = ()

    def hear(self, event: EventDict) -> None:
        """Take in the next event of the log."""
        name = event["event"]
        self._at = max(self._at, float(event["t"]))
        if self._began is None:
            self._began = self._at
        if name in OFTEN:
            self._use.step(event)
            self._growth.hear(event, self._use, None)
            if name == "trial_result" and event["trial"] == self._trial:
                self._iteration = int(event["iteration"])
                self._iterations += iterations_in(event)
            return
        before, neighbours = self._held(), self._neighbours()
        if before:
            self._width = self._use.of(self._trial).width
        cause, begun = self._resizes.step(event), self._resizes.under_way(self._trial)
        self._use.step(event)
        own = event.get("trial") == self._trial
        if own:
            self._own(event, before, cause)
        elif name == "steered" and event.get("clone") == self._trial:
            values = _values(event)
            self._tell("cloned", f"is a clone of trial {event['trial']}{values}, for {event['by']} ({event['via']})")
        elif name == "run_started":
            self._driver(event)
        elif name in ("worker_lost", "device_lost", "device_returned") and event["device"] in before:
            self._sentence(event)
        if not own and self._held() and self._held() == before:
            self._tell_neighbours(event, neighbours)
        self._growth.hear(event, self._use, begun)

    def story(self) -> Story:
        """What was heard so far."""
        named = f" ({self._name})" if self._name and self._name != self._trial else ""
        run = f" of {self._run}" if self._run else ""
        kind = f"{self._kind}, " if self._kind else ""
        count = plural(self._iterations, "iteration") + " reported"
        state = self._state + (" at the end of the log" if self._state in ("runs", "waits") else "")
        head = f"trial {self._trial}{named}{run}: {kind}{count}, {state}"
        end = [self._growth.sentence()] if self._entries else []
        return Story(self._began or 0.0, head, tuple(self._entries), tuple(filter(None, end)))

    # --- what is known of the moment

    def _held(self) -> tuple[int, ...]:
        return self._use.of(self._trial).devices

    def _neighbours(self) -> list[str]:
        """The other trials on its device, where it has one."""
        held = self._held()
        return [other for other in self._use.holders(held[0]) if other != self._trial] if len(held) == 1 else []

    def _tell(self, kind: str, text: str, width: float | None = None) -> None:
        self._entries.append(Entry(self._at, self._iteration, text, kind, width))

    def _tell_neighbours(self, event: EventDict, before: list[str]) -> None:
        now = self._neighbours()
        count = f"which {plural(len(now) + 1, 'trial')} {'have' if now else 'has'} now"
        for other in now:
            if other not in before:
                self._tell("another trial came", f"trial {other} came to its device, {count}{_with(event)}")
        for other in before:
            if other not in now:
                self._tell("another trial left", f"trial {other} left its device, {count}")

    # --- what happens to its devices, and to the run

    def _driver(self, event: EventDict) -> None:
        self._run = str(event.get("run") or "")
        if self._entries:
            self._tell("driver restarted", "the run goes on in another driver, with no trial on a device")

    # --- its own events

    def _own(self, event: EventDict, before: tuple[int, ...], cause: EventDict | None) -> None:
        """``before``: the devices that it had. ``cause``: the event that says why a resize was done or failed."""
        name = event["event"]
        self._state = STATES.get(name, self._state)
        if name in SENTENCES:
            self._sentence(event)
        elif name == "resized":
            self._resized(event, cause)
        elif name == "resize_failed":
            self._resize_failed(event, before, cause)
        elif (tell := getattr(self, f"_on_{name}", None)) is not None:
            tell(event)

    def _sentence(self, event: EventDict) -> None:
        kind, text = SENTENCES[event["event"]]
        self._tell(kind, text.format_map({**event, "reason": _with(event), "because": _because(event)}))

    def _on_trial_added(self, event: EventDict) -> None:
        self._name = str(event.get("name") or self._name)
        self._kind = str(event["kind"])
        left = event["iterations"]
        todo = "an unknown number of iterations" if left is None else plural(round(left), "iteration")
        again = "waits again" if self._entries else f"added to group {event['group']}, waits"
        self._tell("waits", f"{again} with {todo} to do")

    def _on_kind_found(self, event: EventDict) -> None:
        self._kind = str(event["kind"])
        self._tell("kind found", f"turned out to be {self._kind}")

    def _on_trial_started(self, event: EventDict) -> None:
        devices, share = tuple(event["devices"]), float(event["share"])
        moved = self._last and devices[:1] != self._last[:1]
        verb = ("moved and went on" if moved else "went on") if event["resumed"] else "started"
        part = "" if share >= 1 else f", at a share of {share:.3g}"
        self._width, self._last = len(devices) * share, devices
        text = f"{verb} on {_devices(devices)}{part}{_because(event)}"
        self._tell(_kind_of(verb, event), text, self._width)

    def _note_width(self, devices: tuple[int, ...]) -> None:
        held = self._use.of(self._trial)
        # After the run's end nothing is held; such a log has no share.
        self._width, self._last = len(devices) * (held.share if held.devices else 1.0), devices

    def _on_trial_silent(self, event: EventDict) -> None:
        self._tell("silent", f"did not report for {duration(float(event['seconds']))}")

    def _resized(self, event: EventDict, cause: EventDict | None) -> None:
        devices = tuple(event["devices"])
        was = self._width
        self._note_width(devices)
        width = self._width
        verb = "grew" if width > was else "shrank" if width < was else "changed devices"
        change = f"from width {was:.3g} to {width:.3g}" if width != was else f"at width {width:.3g}"
        pause = f", with a pause of {duration(float(event['seconds']))}" if event["seconds"] else ""
        self._tell(_kind_of(verb, cause), f"{verb} {change}, {_devices(devices)}{pause}{_because(cause)}", width)

    def _resize_failed(self, event: EventDict, before: tuple[int, ...], cause: EventDict | None) -> None:
        devices = tuple(event["devices"])
        wanted = f" to {_devices(cause['devices_to'])}, wanted because{_because(cause)}," if cause is not None else ""
        stays = f"it stays on {_devices(devices)}" if devices else "it has no device"
        width = None
        if devices and devices != before:
            self._note_width(devices)
            width = self._width
        self._tell("resize failed", f"a change{wanted} failed, {stays}{_with(event)}", width)

    def _on_growth_checked(self, event: EventDict) -> None:
        found = "are divided among its workers" if event["verdict"] == "divided" else "stay whole"
        self._tell("growth checked", f"calls of {event.get('module', 'a module')} {found}{_with(event)}")

    def _on_divided(self, event: EventDict) -> None:
        took = f"{duration(event['seconds'])} after the last of them had come"
        self._tell("divided", f"its calls are divided among {event['workers']} workers, {took}")

    def _on_suspend_asked(self, event: EventDict) -> None:
        kind = _kind_of("asked to leave", event)
        self._tell(kind, f"was asked to leave its device and to go on later{_because(event)}")

    def _on_steered(self, event: EventDict) -> None:
        kind, by = str(event["kind"]), f"{event['by']} ({event['via']})"
        asked = f"{by} asked {STEERED.get(kind, kind)}{_values(event)}"
        if event["state"] == "asked":
            self._tell("steered", asked)
        elif event["state"] == "refused":
            self._tell("steered", f"that was refused{_with(event)}")
        elif event["state"] == "done":
            done = {"stop": f"ended, as {by} had asked", "clone": f"trial {event.get('clone')} is its clone"}.get(kind)
            self._tell("steered", done or f"what {by} had asked for is done{_with(event)}")

    def _on_trial_ended(self, event: EventDict) -> None:
        ending, words = event["ending"], words_of(event)
        if ending == "paused":
            text = f"left its devices{_with(event)}" if words else "was paused by Tune"
        else:
            text = f"{'failed' if ending == 'failed' else 'was stopped'}{_with(event)}"
        self._tell("left" if words and ending == "paused" else ending, text)
        self._state = str(ending)

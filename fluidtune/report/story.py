"""`fluidtune why`: one trial's story in sentences, from the event log alone.

Decides what of a trial is told, in which words, and what is summed up. Which trial is meant is decided in
trial_lookup.py, and which trial held which device in fold.py. Reasons are the log's own words.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from fluidtune.report.causes import NO_REASON, label_of, remedy_of, wait_of, words_of
from fluidtune.report.events import EventDict
from fluidtune.report.fold import Fold, Note, Resize, Run, Span, Trial, fold_of
from fluidtune.report.growth_story import never_grew
from fluidtune.report.summary import duration, plural, restored
from fluidtune.report.terminal_text import listed

#: A story of at most this many entries, which fit a terminal, is told whole.
TOLD_WHOLE = 40
#: A longer one tells this many entries of each kind, the first ones, and the last one. What alternates shows the second
#: time, and the third says that it goes on.
TOLD_FIRST = 3
#: Event -> its kind, and its sentence. ``reason``: a colon and the event's reason in words, if it has one; ``because``:
#: the same, or that the log has none. ``took``: its seconds.
SENTENCES = {
    "trial_waits": ("waits", "waits{because}"),
    "trial_silent": ("silent", "did not report for {took}"),
    "divided": ("divided", "its calls are divided among {workers} workers, {took} after the last of them had come"),
    "can_grow": ("can grow", "can have several workers, as a trial of its trainable has shown"),
    "not_committed": ("not committed", "its last iteration has no commit{reason}"),
    "growth_ended": ("growth ended", "does not grow from now on{reason}"),
    "suspend_asked": ("asked to leave", "was asked to leave its device and to go on later{because}"),
    "trial_suspended": ("left", "left its devices, to go on later{because}"),
    "recovered": ("recovered", "another worker has it, with {iteration} iterations reported{reason}"),
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
#: States of a trial that was neither paused nor has ended.
GOING = ("waiting", "running", "resizing", "silent")


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

    def as_dict(self) -> dict[str, Any]:
        """All of it for a program: times in seconds since ``began``, unix seconds."""
        entries = [{**asdict(each), "at": round(each.at - self.began, 3)} for each in self.entries]
        return {"began": self.began, "head": self.head, "entries": entries, "end": list(self.end)}

    def lines(self) -> list[str]:
        """The story for a terminal: `told` between its two sentences about the whole."""
        told = self.told()
        times = [duration(round(max(0.0, at - self.began), 1)) for at, _, _ in told]
        wide = max(map(len, times), default=0)
        rows = [
            f"{when:>{wide}}  " + (f"[{iteration}] " if iteration else "") + text
            for when, (_, iteration, text) in zip(times, told, strict=True)
        ]
        return [self.head, *rows, *self.end]


def _stretches(entries: Sequence[Entry]) -> Iterable[list[Entry]]:
    """The entries: each alone if it is told, else together with those beside it."""
    last = {entry.kind: place for place, entry in enumerate(entries)}
    seen: Counter[str] = Counter()
    #: Of each entry its place, if it is told.
    places: list[int | None] = []
    for place, entry in enumerate(entries):
        seen[entry.kind] += 1
        told = len(entries) <= TOLD_WHOLE or seen[entry.kind] <= TOLD_FIRST or place == last[entry.kind]
        places.append(place if told else None)
    for _, stretch in groupby(zip(places, entries, strict=True), key=itemgetter(0)):
        yield [entry for _, entry in stretch]


def _summed_up(stretch: Sequence[Entry], began: float) -> str:
    """One sentence for several entries whose kinds the story has told. ``began``: unix seconds of its start."""
    kinds = Counter(entry.kind for entry in stretch)
    counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    until = duration(max(0.0, stretch[-1].at - began))
    text = f"{len(stretch)} events like those before, until {until}: {counts}"
    widths = sorted({entry.width for entry in stretch if entry.width is not None})
    return text + (f"; widths {', '.join(f'{width:.3g}' for width in widths)}" if widths else "")


def story_of(run: Run, trial: str, died: bool = False) -> Story:
    """The story of ``trial``, by its id. Without an event of the trial it has no entries.

    ``died``: whether the run's driver is gone, which its log does not say.
    """
    fold = fold_of(run)
    its = fold.trials.get(trial) or Trial(trial, 0, 0.0, 0.0)
    entries = _Teller(fold, its).entries()
    named = f" ({its.name})" if its.name and its.name != trial else ""
    of = f" of {fold.head['run']}" if fold.head.get("run") else ""
    kind = f"{its.sort}, " if its.sort else ""
    count = plural(its.iterations, "iteration") + " reported"
    state = f"{its.state} at the end of the log" if its.state in GOING else its.state
    head = f"trial {trial}{named}{of}: {kind}{count}, {state}"
    end = [_wait(fold, its, died), never_grew(fold, its)] if entries else []
    return Story(fold.origin, head, tuple(entries), tuple(filter(None, end)))


def _wait(fold: Fold, trial: Trial, died: bool) -> str | None:
    """What the trial waits for at the end of the log, or why it was refused, and what can be done.

    Once its driver has ended or died, a trial waits for nothing until the next driver has added it.
    """
    event = wait_of(trial)
    left = fold.over or died or (trial.state == "waiting" and trial.stamp <= fold.began)
    if event is None or (left and trial.state != "failed"):
        return None
    going = [other.trial for other in fold.trials.values() if other.group == trial.group and other.state in GOING]
    others = f", and {listed(going)} of its group did not" if going and trial.state == "paused" else ""
    said = "was refused" if trial.state == "failed" else "waits"
    return f"It {said}: {words_of(event)}{others}. What can be done: {remedy_of(event)}."


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
    """Tells the notes of one trial, and those of others that concern its devices."""

    def __init__(self, fold: Fold, trial: Trial) -> None:
        self._fold, self._trial = fold, trial
        self._lines = list(trial.lines())
        #: The entries, each with the number of its event.
        self._entries: list[tuple[int, Entry]] = []
        #: The note that is told.
        self._note = Note(0, 0.0, {})
        #: Its width now, or when it last had devices, and these.
        self._width = 0.0
        self._last: tuple[int, ...] = ()

    def entries(self) -> list[Entry]:
        """What there is to tell, oldest first."""
        name = self._trial.trial
        for note in self._trial.notes:
            self._note = note
            if note.event.get("trial", name) == name:
                self._own(note.event)
            else:
                by = f"for {note.event['by']} ({note.event['via']})"
                self._tell("cloned", f"is a clone of trial {note.event['trial']}{_values(note.event)}, {by}")
        if not self._entries:
            return []
        first, spans = self._entries[0][0], self._fold.spans_of(name)
        for note in self._fold.breaks:
            self._note = note
            if note.number < first:
                continue
            if note.restore is not None:
                self._tell("driver restarted", f"{restored(note.restore)}, with no trial on a device")
            elif note.event.get("trial") != name:
                here = (span for span in spans if span.first < note.number and not 0 <= span.last < note.number)
                if any(note.event["device"] in span.devices for span in here):
                    self._sentence(note.event)
        self._tell_neighbours(spans)
        return [entry for _, entry in sorted(self._entries, key=lambda told: told[0])]

    def _tell(self, kind: str, text: str, width: float | None = None) -> None:
        note, past = self._note, bisect_left(self._lines, (self._note.number,))
        iteration = int(self._lines[past - 1].iteration) if past else 0
        self._entries.append((note.number, Entry(note.at, iteration, text, kind, width)))

    def _tell_neighbours(self, spans: list[Span]) -> None:
        """The other trials that came to its device, and left it, while it had this device alone."""
        own = {note.number for note in self._trial.notes}
        for device in {span.devices[0] for span in spans if len(span.devices) == 1}:
            came: dict[int, dict[str, None]] = defaultdict(dict)
            left: dict[int, dict[str, None]] = defaultdict(dict)
            for span in self._fold.on(device):
                came[span.first][span.trial] = left[span.last][span.trial] = None
            there: set[str] = set()
            it_was_alone = False
            held = {span.first: span.devices for span in spans} | {
                span.last: () for span in spans if span.last not in {each.first for each in spans}
            }
            for number in sorted((came.keys() | left.keys() | held.keys()) - {-1}):
                there = (there - left[number].keys()) | came[number].keys()
                alone = held.get(number, (device,) if it_was_alone else ()) == (device,)
                if alone and it_was_alone and number not in own:
                    self._note = self._fold.note(number)
                    self._moved(came[number].keys(), left[number].keys(), len(there))
                it_was_alone = alone

    def _moved(self, came: Iterable[str], left: Iterable[str], count: int) -> None:
        now = f"which {plural(count, 'trial')} {'has' if count == 1 else 'have'} now"
        for other in came:
            if other not in left and other != self._trial.trial:
                because = _with(self._note.event)
                self._tell("another trial came", f"trial {other} came to its device, {now}{because}")
        for other in left:
            if other not in came and other != self._trial.trial:
                self._tell("another trial left", f"trial {other} left its device, {now}")

    # --- its own events

    def _own(self, event: EventDict) -> None:
        if event["event"] in SENTENCES:
            self._sentence(event)
        elif self._note.resize is not None:
            self._resized(self._note.resize, event)
        elif (tell := getattr(self, f"_on_{event['event']}", None)) is not None:
            tell(event)

    def _sentence(self, event: EventDict) -> None:
        kind, sentence = SENTENCES[event["event"]]
        more = {"reason": _with(event), "because": _because(event), "took": duration(event.get("seconds", 0.0))}
        self._tell(_kind_of(kind, event), sentence.format_map({**event, **more}))

    def _on_trial_added(self, event: EventDict) -> None:
        left = event["iterations"]
        todo = "an unknown number of iterations" if left is None else plural(round(left), "iteration")
        again = "waits again" if self._entries else f"added to group {event['group']}, waits"
        self._tell("waits", f"{again} with {todo} to do")

    def _on_kind_found(self, event: EventDict) -> None:
        here = "turned out to be" if self._note.before.devices else "is, as another trial of its trainable has shown,"
        self._tell("kind found", f"{here} {event['kind']}")

    def _on_trial_started(self, event: EventDict) -> None:
        devices, share = tuple(event["devices"]), float(event["share"])
        moved = self._last and devices[:1] != self._last[:1]
        verb = ("moved and went on" if moved else "went on") if event["resumed"] else "started"
        part = "" if share >= 1 else f", at a share of {share:.3g}"
        self._width, self._last = len(devices) * share, devices
        text = f"{verb} on {_devices(devices)}{part}{_because(event)}"
        self._tell(_kind_of(verb, event), text, self._width)

    def _resized(self, resize: Resize, event: EventDict) -> None:
        cause, devices, width = self._note.cause, resize.after.devices, resize.after.width
        was = resize.before.width or self._width
        verb = "grew" if width > was else "shrank" if width < was else "changed devices"
        change = f"from width {was:.3g} to {width:.3g}" if width != was else f"at width {width:.3g}"
        self._width, self._last = width, devices
        self._tell(_kind_of(verb, cause), f"{verb} {change}, {_devices(devices)}{_because(cause)}", width)

    def _on_resize_failed(self, event: EventDict) -> None:
        devices, cause, before = tuple(event["devices"]), self._note.cause, self._note.before
        wanted = f" to {_devices(cause['devices_to'])}, wanted because{_because(cause)}," if cause is not None else ""
        stays = f"it stays on {_devices(devices)}" if devices else "it has no device"
        width = None
        if devices and devices != before.devices:
            same = len(devices) == len(before.devices)
            width = self._width = before.width if same else float(len(devices))
            self._last = devices
        self._tell("resize failed", f"a change{wanted} failed, {stays}{_with(event)}", width)

    def _on_went_on(self, event: EventDict) -> None:
        start = f"goes on from iteration {event['iteration']}" if event["iteration"] else "begins anew"
        twice = f"; {plural(self._note.again, 'iteration')} of it {'is' if self._note.again == 1 else 'are'} done twice"
        self._tell("goes on from", start + (twice if self._note.again else ""))

    def _on_growth_checked(self, event: EventDict) -> None:
        found = "are divided among its workers" if event["verdict"] == "divided" else "stay whole"
        self._tell("growth checked", f"calls of {event.get('module', 'a module')} {found}{_with(event)}")

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
            held = self._note.before.devices
            by_tune = not words or (not held and remedy_of(event))
            text = "was paused by Tune" if by_tune else f"{'left its devices' if held else 'was paused'}{_with(event)}"
        else:
            failed = "was refused" if remedy_of(event) else "failed"
            text = f"{failed if ending == 'failed' else 'was stopped'}{_with(event)}"
        self._tell("left" if words and ending == "paused" else ending, text)

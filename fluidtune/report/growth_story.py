"""Why a trial never had more than one worker, as far as the event log shows it."""

from __future__ import annotations

from fluidtune.report.causes import NO_REASON, OFTEN, words_of
from fluidtune.report.events import EventDict
from fluidtune.report.occupancy import Replay
from fluidtune.report.summary import duration, plural


class GrowthFacts:
    """Hears all events of a run, and remembers what kept one trial from growing."""

    def __init__(self, trial: str) -> None:
        self._trial = trial
        #: It can have several workers; and whether its log is an older one, by which exactly elastic trials can.
        self._growable, self._older, self._asked = False, False, 1.0
        self._widest, self._most_devices, self._ran, self._results = 0, 0, False, 0
        self._max_workers: int | None = None
        #: How many growths began.
        self._begun = 0
        #: Why its growth ended, and why single growths failed, in words.
        self._ended: str | None = None
        self._failed: list[str] = []
        #: Trials that wait.
        self._waiting: set[str] = set()
        #: Seconds in which it ran while a device was idle, and those of them in which no trial waited.
        self._beside_idle, self._unused = 0.0, 0.0
        #: Since the last event: when that was, and which of the two seconds count.
        self._at, self._counts, self._alone = 0.0, False, False

    def hear(self, event: EventDict, use: Replay, begun: EventDict | None) -> None:
        """Take in the next event. ``use``: after it. ``begun``: the trial's `resize_started` under way, if any."""
        seconds = max(0.0, use.now - self._at)
        self._beside_idle += seconds if self._counts else 0.0
        self._unused += seconds if self._counts and self._alone else 0.0
        self._at = use.now
        self._note(event)
        if event["event"] in OFTEN:
            return
        devices = use.of(self._trial).devices
        self._widest = max(self._widest, len(devices))
        self._most_devices = max(self._most_devices, len(use.there))
        self._ran = self._ran or bool(devices)
        self._counts = False
        if devices and begun is None and self._ended is None:
            self._counts, self._alone = bool(use.there.keys() - use.busy), not self._waiting

    def _note(self, event: EventDict) -> None:
        name, trial = event["event"], event.get("trial")
        if name == "run_started":
            settings = event.get("settings")
            limit = settings.get("max_workers") if isinstance(settings, dict) else None
            self._max_workers = limit if isinstance(limit, int) else None
            self._waiting.clear()
        elif name in ("trial_added", "trial_suspended") and isinstance(trial, str):
            self._waiting.add(trial)
        elif name in ("trial_started", "trial_ended"):
            self._waiting.discard(str(trial))
        if trial != self._trial:
            return
        if name == "trial_added":
            self._older = "growable" not in event
            self._asked = float(event.get("share") or self._asked)
        if name in ("trial_added", "kind_found", "can_grow"):
            older = self._older and event.get("kind") == "elastic"
            self._growable = self._growable or older or name == "can_grow" or event.get("growable") is True
        elif name == "trial_result":
            self._results += 1
        elif name == "resize_started":
            self._begun += len(event["devices_to"]) > len(event["devices_from"])
        elif name == "growth_ended":
            self._ended = words_of(event) or NO_REASON
        elif name == "resize_failed" and words_of(event):
            self._failed.append(str(words_of(event)))

    def sentence(self) -> str | None:
        """Why it never grew; None if it did."""
        if self._asked > 1:
            return f"It was never resized: it asks for {plural(int(self._asked), 'device')} at once."
        if self._widest > 1:
            return None
        return f"It never grew: {self._reason()}."

    def _reason(self) -> str:
        if not self._ran:
            return "it has not been on a device"
        if self._ended is not None:
            return f"several workers do not help it: {self._ended}"
        if self._max_workers == 1:
            return "max_workers=1"
        if not self._growable:
            return "no call of a torch module with parameters was seen in it"
        if self._failed:
            return f"{plural(len(self._failed), 'growth')} failed, the last one because {self._failed[-1]}"
        if self._begun:
            return f"{plural(self._begun, 'growth')} began, and it left its devices before the growth was done"
        if self._most_devices <= 1:
            return "the job never had a second device"
        if not self._results:
            return "it has reported nothing, and a trial grows when its speed is known"
        if not self._beside_idle:
            return "no device was idle while it ran"
        if not self._unused:
            return f"other trials waited whenever a device was idle ({duration(self._beside_idle)} in all)"
        return (
            f"devices were idle for {duration(self._unused)} while it ran and no trial waited, but a trial grows only"
            " after a result, with two iterations or more to do, and where that is expected to end it sooner"
        )

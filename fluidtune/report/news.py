"""What a run is like at this moment: the latest news, and what its trials do."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from fluidtune.report.causes import words_of
from fluidtune.report.fold import Fold, Note
from fluidtune.report.summary import restored

#: The events that a person should see, and what is said of them.
NEWS = {
    "device_lost": "device {device} is lost{because}",
    "worker_lost": "the worker {worker} on device {device} died{because}",
    "recovered": "{trial} is in another worker, with {iteration} iterations reported",
    "resize_failed": "{trial} was not resized{because}",
    "not_committed": "{trial} has no commit of its last iteration{because}",
    "growth_ended": "{trial} does not grow from now on{because}",
    "room_lacking": "device {device} has no room for {trial}{because}",
    "trial_silent": "{trial} has not reported for {seconds:.0f} s",
    "serving_failed": "the models cannot be served{because}",
}


def line_of(note: Note) -> str | None:
    """What is said of an event that a person should see; None of another one."""
    if note.restore is not None:
        return restored(note.restore)
    if note.event.get("ending") == "failed":
        return f"{note.event['trial']} failed"
    words = words_of(note.event)
    fields = {**note.event, "because": f": {words}" if words else ""}
    return NEWS[note.name].format_map(fields) if note.name in NEWS else None


def news_of(fold: Fold, most: int) -> list[tuple[float, str]]:
    """The latest news, at most so many, oldest first: unix seconds, and a line."""
    lines = ((float(note.event["t"]), line) for note in reversed(fold.notes) if (line := line_of(note)))
    return list(islice(lines, most))[::-1]


def states_of(fold: Fold) -> Counter[str]:
    """How many trials are in each state."""
    return Counter(trial.state for trial in fold.trials.values())


def ended_since(fold: Fold, when: float) -> int:
    """How many iterations ended since ``when``, unix seconds. Those that share a line ended at equal distances."""
    count = 0.0
    for trial in fold.trials.values():
        for place in range(trial.line_count - 1, -1, -1):
            line = trial.line(place)
            if line.at <= when:
                break
            began = line.began if line.times > 1 else line.at
            count += line.times * min(1.0, (line.at - when) / (line.at - began) if line.at > began else 1.0)
    return round(count)

"""The states of a trial in the driver, and every change between them.

A trial has three of them at a time: where it is (`Place`), what its group does (`Change`) and what it is asked to do
(`Wish`). docs/trials.md shows the tables as diagrams, and a test holds the two equal.
"""

from __future__ import annotations

from typing import Literal

#: ``queued``: it waits for devices. ``placed``: it has devices and waits for a worker of the first one. ``loading``:
#: its leader loads it. ``live``: its leader takes calls. ``moving``: its leader unloads it, so that it can go on on
#: other devices. ``released``: Tune has let go of it, and its workers do not know yet. ``ended``: it has no worker.
Place = Literal["queued", "placed", "loading", "live", "moving", "released", "ended"]

#: ``steady``: its workers stay. ``attaching``: processes of new devices are found, and attach themselves to the leader,
#: which trains on. Always ``steady`` unless the trial is ``live`` or ``released``.
Change = Literal["steady", "attaching"]

#: ``stay``, or ``leave``: it is to leave its devices at its next checkpoint or commit.
Wish = Literal["stay", "leave"]

#: Every change of place, with the events that cause it; no other event may. A trial is ``queued`` at first.
PLACES: dict[tuple[Place, Place], str] = {
    ("queued", "placed"): "Start, Resume",
    ("queued", "released"): "Released",
    ("placed", "loading"): "WorkerFound",
    ("placed", "live"): "Resumed",
    ("placed", "queued"): "MustReschedule, Release, Start, Resume",
    ("placed", "released"): "Released",
    ("loading", "live"): "Loaded",
    ("loading", "queued"): "LeaderDied, MustReschedule, RoomLacking, Release, Start, Resume",
    ("loading", "ended"): "LeaderDied, Raised",
    ("loading", "released"): "Released",
    ("live", "queued"): "LeaderDied, MustReschedule, RoomLacking, Release, Start, Resume",
    (
        "live",
        "moving",
    ): "MethodCalled, Loaded, IterationDone, Answered, CheckpointRestored, CheckpointKept, Raised, RoomLacking",
    ("live", "ended"): "LeaderDied, Raised",
    ("live", "released"): "Released",
    ("moving", "queued"): "Unloaded",
    ("moving", "placed"): "Start, Resume",
    ("moving", "released"): "Released",
    ("released", "ended"): "Left",
}

#: Every change of the group. Whatever takes the trial off its workers (see `PLACES`) makes it ``steady``, too.
CHANGES: dict[tuple[Change, Change], str] = {
    ("steady", "attaching"): "Resize, Loaded",
    ("attaching", "steady"): "Attached, NotAttached, IterationDone, FollowerEnded, Resize",
}

#: Every change of wish.
WISHES: dict[tuple[Wish, Wish], str] = {
    ("stay", "leave"): "Suspend, RoomLacking, Resize, Loaded",
    ("leave", "stay"): (
        "Start, Resume, MethodCalled, Loaded, IterationDone, Answered, CheckpointRestored, CheckpointKept, Raised, "
        "RoomLacking"
    ),
}

#: The places in which the trial has devices from the engine.
HELD: tuple[Place, ...] = ("placed", "loading", "live")

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

#: ``steady``: its workers stay. ``gathering``: new workers run its code up to their first boundary. ``announced``: they
#: are told to enter the new group, and the leader is told of it with its next iteration. ``reforming``: the leader is
#: told, and takes them in at a boundary. Always ``steady`` unless the trial is ``live`` or ``released``.
Change = Literal["steady", "gathering", "announced", "reforming"]

#: ``stay``, or ``leave``: it is to leave its devices at its next checkpoint or commit.
Wish = Literal["stay", "leave"]

#: Every change of place, with the events that cause it; no other event may. A trial is ``queued`` at first.
PLACES: dict[tuple[Place, Place], str] = {
    ("queued", "placed"): "Placed",
    ("queued", "released"): "Released",
    ("placed", "loading"): "WorkerFound",
    ("placed", "queued"): "PlaceDied, PlaceTaken, Placed",
    ("placed", "released"): "Released",
    ("loading", "live"): "Loaded",
    ("loading", "queued"): "LeaderBuried, RoomLacking, DeviceJudged, PlainProcessNeeded, PlaceTaken, Placed",
    ("loading", "ended"): "LeaderBuried, Raised, DeviceJudged",
    ("loading", "released"): "Released",
    ("live", "queued"): (
        "LeaderBuried, GroupBroken, RoomLacking, FollowerEnded, DeviceJudged, PlainProcessNeeded, PlaceTaken, Placed"
    ),
    ("live", "moving"): "Asked, Loaded, IterationDone, Answered, Restored, CheckpointKept, Raised, RoomLacking",
    ("live", "ended"): "LeaderBuried, Raised, DeviceJudged",
    ("live", "released"): "Released",
    ("moving", "queued"): "Unloaded",
    ("moving", "placed"): "Placed",
    ("moving", "released"): "Released",
    ("released", "ended"): "Left",
}

#: Every change of the group. Whatever takes the trial off its workers (see `PLACES`) makes it ``steady``, too.
CHANGES: dict[tuple[Change, Change], str] = {
    ("steady", "gathering"): "ResizeWanted, IterationDone",
    ("steady", "announced"): "ResizeWanted, IterationDone",
    ("gathering", "announced"): "Joined",
    ("gathering", "steady"): "Joined, JoinFailed, JoinerDied, JoinerLate, IterationDone, GroupBroken, FollowerEnded",
    ("announced", "reforming"): "Asked, Answered, Restored, CheckpointKept, IterationDone, Raised",
    ("announced", "steady"): "FollowerEnded",
    ("reforming", "steady"): "IterationDone, FollowerEnded",
}

#: Every change of wish.
WISHES: dict[tuple[Wish, Wish], str] = {
    ("stay", "leave"): "LeaveWanted, RoomLacking, ResizeWanted, IterationDone",
    ("leave", "stay"): "Placed, Asked, Loaded, IterationDone, Answered, Restored, CheckpointKept, Raised, RoomLacking",
}

#: The places in which the trial has devices from the engine.
HELD: tuple[Place, ...] = ("placed", "loading", "live")

"""Readers of recorded measurements: adaptdl's placements (scaling) and Lucid's pairs (packing).

The files are the user's; FluidTune has none of them. Both give figures per step; a profile made of them says
so, and `Profile.scaled` gives an iteration any other length.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from fluidtune.profiles.profile import Profile, ProfileError


def pollux_scaling(path: str | Path, global_batch: int) -> Profile:
    """The scaling of one job of the Pollux paper, from its ``placements.csv``.

    ``path``: a file with the columns placement, local_bsz and step_time (s). A placement of k devices is used
    if a batch of ``global_batch`` / k a device was measured, or lies between two that were: then in between.

    Raises ProfileError if the file has other columns or nothing for one device at this batch.
    """
    measured: dict[str, list[tuple[int, float]]] = {}
    for row in _rows(path, ("placement", "local_bsz", "step_time")):
        batch, seconds = int(row["local_bsz"]), float(row["step_time"])
        measured.setdefault("".join(sorted(row["placement"])), []).append((batch, seconds))
    seconds_by: dict[str, float] = {}
    for placement, points in measured.items():
        found = _between(sorted(points), global_batch / sum(map(int, placement)))
        if found is not None:
            seconds_by[placement] = found
    if "1" not in seconds_by:
        batches = sorted(batch for batch, _ in measured.get("1", []))
        raise ProfileError(f"{path}: no batch of {global_batch} on one device; measured there: {batches}")
    return Profile(Path(path).parent.name, seconds_by, source=f"{path}, global batch {global_batch}")


def lucid_pairs(path: str | Path, model: str, dataset: str, batch: int, amp: int = 0) -> Profile:
    """The packing of two equal jobs of the Lucid paper, from its ``colocate_info.csv``; one second a step alone.

    Only a pair of a job with itself is taken: its neighbours in a tuning job are its like. ``memory`` is half of
    what the pair took, of a 24 GiB device.

    Raises ProfileError if the file has other columns or no such pair.
    """
    names = ("model", "dataset", "batchsize", "amp")
    wanted = (model, dataset, str(batch), str(amp))
    known = set()
    for row in _rows(path, (*[f"{name}{side}" for side in "12" for name in names], "speed1", "speed2", "gmem")):
        first, second = (tuple(row[f"{name}{side}"] for name in names) for side in "12")
        if first != second:
            continue
        known.add(first[:3])
        if first == wanted:
            speed = (float(row["speed1"]) + float(row["speed2"])) / 2
            memory = min(1.0, float(row["gmem"]) / 2 / 24576)
            return Profile(model.lower(), {"1": 1.0}, {2: 1 / speed}, memory, source=f"{path}, {' '.join(wanted)}")
    listed = ", ".join("/".join(job) for job in sorted(known))
    raise ProfileError(f"{path}: no pair of {'/'.join(wanted)} with itself; there are: {listed}")


def combined(scaling: Profile, packing: Profile) -> Profile:
    """The scaling of one profile with the packing of another, on the first one's times."""
    return Profile(
        f"{scaling.name}+{packing.name}",
        scaling.seconds,
        packing.scaled(scaling.seconds["1"]).packed,
        packing.memory,
        scaling.resize,
        f"{scaling.source}; {packing.source}",
    )


def _rows(path: str | Path, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from None
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise ProfileError(f"{path} has no column {missing[0]!r}; it has {reader.fieldnames}")
    yield from reader


def _between(points: list[tuple[int, float]], batch: float) -> float | None:
    """Seconds at a batch within a device's measured ones, linear between the nearest two; None outside them.

    Recorded batches are rounded (513 for 1024 on two), so that a batch up to 5 % outside counts as inside.
    """
    low, high = points[0], points[-1]
    if not low[0] * 0.95 <= batch <= high[0] * 1.05:
        return None
    batch = min(max(batch, low[0]), high[0])
    for at, seconds in points:
        if at <= batch:
            low = (at, seconds)
        if at >= batch:
            high = (at, seconds)
            break
    if low[0] == high[0]:
        return low[1]
    return low[1] + (high[1] - low[1]) * (batch - low[0]) / (high[0] - low[0])

"""Readers of published measurements: of adaptdl's placements (scaling) and of Lucid's pairs of jobs (packing).

The user provides the files; FluidTune contains none of them. Their times are per training step, and so are those of the
profiles made of them; `Profile.scaled` gives an iteration any other length.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from fluidtune.profiles.profile import Profile, ProfileError

#: Memory of the devices on which Lucid's pairs were recorded, MiB: 24 GiB.
_DEVICE_MIB = 24 * 1024
#: By which part a batch may lie outside the recorded ones. Judgement: above their rounding, below another batch size.
_OUTSIDE = 0.05


def pollux_scaling(path: str | Path, global_batch: int) -> Profile:
    """The scaling of one job of the Pollux paper, from the ``placements.csv`` of the paper's artefact.

    ``path``: a file with the columns placement, local_bsz (samples per device) and step_time (s). A placement of k
    devices is used if ``global_batch`` / k samples per device were measured, or lie between two batches that were; then
    the time is interpolated.

    Raises ProfileError if a column is missing, or if one device was not measured at this batch.
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
    """The packing of two equal jobs of the Lucid paper, from the ``colocate_info.csv`` of its artefact.

    A step alone takes 1 s in the profile. Only pairs of a job with itself are used, since the trials of a tuning job
    are alike. The profile's ``memory`` is half of what the pair took, as a part of the recorded devices' memory.

    Raises ProfileError if a column is missing, or if there is no such pair.
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
            memory = min(1.0, float(row["gmem"]) / 2 / _DEVICE_MIB)
            return Profile(model.lower(), {"1": 1.0}, {2: 1 / speed}, memory, source=f"{path}, {' '.join(wanted)}")
    listed = ", ".join("/".join(job) for job in sorted(known))
    raise ProfileError(f"{path}: no pair of {'/'.join(wanted)} with itself; there are: {listed}")


def combined(scaling: Profile, packing: Profile) -> Profile:
    """The scaling of one profile with the packing of another; the times are on the scale of the first one."""
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
    """Seconds at ``batch``, linear between the nearest two of ``points`` (batch, seconds); None outside them.

    Recorded batches are rounded (513 for 1024 on two devices), so that a batch that is little outside counts as inside.
    """
    low, high = points[0], points[-1]
    if not low[0] * (1 - _OUTSIDE) <= batch <= high[0] * (1 + _OUTSIDE):
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

"""The job script that `fluidtune slurm` hands to sbatch, from the words of its command line. Pure.

The words before the first option, and those after "--", are those of `fluidtune run`. The others are sbatch's, but for
--print and --notice. sbatch's own words are not checked here: sbatch knows them, and which a site allows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fluidtune.errors import FluidTuneError

#: Seconds from the notice to the time limit. A driver ends within 30 s of it (`FluidExecutor.notice_s`), and the
#: processes on the nodes within 10 s.
NOTICE_S = 60
#: Seconds that a job must have before its notice. Judgement: Ray starts in 5 s on a quiet node, and a trial too.
LEAST_S = 30
#: sbatch(1), --time: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes" and
#: "days-hours:minutes:seconds".
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)?(\d+):(\d+)|(\d+))")


@dataclass(frozen=True)
class Submission:
    """What the command line says.

    ``options``: sbatch's, a line each. ``run``: the words of `fluidtune run`. ``notice_s``: seconds from the notice to
    the time limit. ``shown``: the script is printed, and no job is submitted.
    """

    options: tuple[str, ...]
    run: tuple[str, ...]
    notice_s: int = NOTICE_S
    shown: bool = False


def submission(words: Sequence[str]) -> Submission:
    """What these words after `fluidtune slurm` say.

    Raises:
        FluidTuneError: a word of ours has no value that it can have, or the time limit is too short for the notice.
    """
    ours, sbatchs = list(words), []
    after: list[str] = []
    if "--" in ours:
        after = ours[ours.index("--") + 1 :]
        ours = ours[: ours.index("--")]
    first = next((place for place, word in enumerate(ours) if word.startswith("-")), len(ours))
    run = [*ours[:first], *after]
    lines: list[list[str]] = []
    for word in ours[first:]:
        if word.startswith("-"):
            lines.append([])
        lines[-1].append(word)
    notice, shown, time = NOTICE_S, False, None
    for line in lines:
        name, _, value = line[0].partition("=")
        value = value or " ".join(line[1:])
        if name == "--print":
            shown = True
            continue
        if name == "--notice":
            if not re.fullmatch("[0-9]{1,6}", value) or not int(value):
                raise FluidTuneError(f"--notice {value}: expected seconds before the time limit, as in --notice 60")
            notice = int(value)
            continue
        time = value if name in ("--time", "-t") else line[0][2:] if re.match(r"-t\d", name) else time
        sbatchs.append(" ".join(map(_word, line)))
    limit = seconds_of(time) if time is not None else None
    if limit is not None and limit < notice + LEAST_S:
        raise FluidTuneError(
            f"--time {time} is {limit} s, and {notice} s before its end the search is told to end, which leaves it "
            f"less than {LEAST_S} s: give a longer --time, or a shorter --notice"
        )
    return Submission(tuple(sbatchs), tuple(run), notice, shown)


def seconds_of(time: str) -> int | None:
    """The seconds of a time limit as sbatch reads it; None: it is no such time, or 0, which is no limit."""
    found = _TIME.fullmatch(time)
    if found is None:
        return None
    days, hours, minutes, seconds, h, m, s, alone = (int(each or 0) for each in found.groups())
    return ((days * 24 + hours + h) * 60 + minutes + m + alone) * 60 + seconds + s or None


def script(asked: Submission, name: str, python: str) -> str:
    """The job script, which sbatch reads from a file or its standard input.

    ``name``: the job's. ``python``: the program on the nodes.
    """
    settings = (
        f"--job-name={_word(name)}",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{asked.notice_s}",
        *asked.options,
    )
    lines = "".join(f"#SBATCH {setting}\n" for setting in settings)
    command = shlex.join([python, "-m", "fluidtune", "run", *asked.run])
    return f"#!/bin/bash\n{lines}exec {command}\n"


def _word(word: str) -> str:
    """The word as it stands after "#SBATCH", where quotes hold as in a shell."""
    if "\n" in word or "\r" in word:
        raise FluidTuneError(f"{word!r} has a line break, which no line of a job script can hold; leave it out")
    return shlex.quote(word)

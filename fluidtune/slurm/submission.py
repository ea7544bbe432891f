"""The job script that `fluidtune slurm` hands to sbatch, from the words of its command line. Pure.

The words before the first option, and those after "--", are those of `fluidtune run`. The others are sbatch's, but for
--print, --notice and --elastic. sbatch's own words are not checked here: sbatch knows them, and which a site allows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fluidtune.errors import FluidTuneError

#: Seconds from the notice to the time limit. A driver ends within 30 s of it (`FluidExecutor.notice_s`).
NOTICE_S = 60
#: Of these, the seconds in which the processes on the nodes end, after the driver.
END_S = 10
#: The variable by which a job's driver learns how many seconds its notice leaves it.
DRIVER_S = "FLUIDTUNE_NOTICE_S"
#: Seconds that a job must have before its notice. Judgement: Ray starts in 5 s on a quiet node, and a trial too.
LEAST_S = 30
#: Seconds that a job of an array must have left to become the head (`joined`). Judgement.
LATE_S = NOTICE_S + 2 * LEAST_S
#: sbatch(1), --time: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours[:minutes[:seconds]]".
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)?(\d+):(\d+)|(\d+))")


@dataclass(frozen=True)
class Submission:
    """What the command line says.

    ``options``: sbatch's, a line each. ``run``: the words of `fluidtune run`. ``notice_s``: seconds from the notice to
    the time limit. ``shown``: the script is printed, and no job is submitted. ``jobs``: as many join one search.
    """

    options: tuple[str, ...]
    run: tuple[str, ...]
    notice_s: int = NOTICE_S
    shown: bool = False
    jobs: int = 1


def submission(words: Sequence[str]) -> Submission:
    """What these words after `fluidtune slurm` say. FluidTuneError: notice or limit is too short."""
    end = words.index("--") if "--" in words else len(words)
    first = next((place for place in range(end) if words[place].startswith("-")), end)
    lines: list[list[str]] = []
    for word in words[first:end]:
        lines = [*lines, [word]] if word.startswith("-") else [*lines[:-1], [*lines[-1], word]]
    kept, limit, own = [], "", {"--notice": str(NOTICE_S), "--elastic": "1"}
    for line in lines:
        name, _, value = line[0].partition("=")
        value = value or " ".join(line[1:])
        if name in (*own, "--print"):
            own[name] = value
        else:
            limit = value if name in ("--time", "-t") else name[2:] if re.match(r"-t\d", name) else limit
            kept.append(" ".join(map(_word, line)))
    notice, jobs = own["--notice"], own["--elastic"]
    if not re.fullmatch("[0-9]{1,6}", notice) or int(notice) <= END_S:
        raise FluidTuneError(f"--notice {notice}: expected seconds before the limit, above {END_S}, as in --notice 60")
    if not re.fullmatch("[0-9]{1,5}", jobs) or not int(jobs):
        raise FluidTuneError(f"--elastic {jobs}: expected the number of jobs that join the search, as in --elastic 3")
    seconds, least = seconds_of(limit), max(int(notice), LATE_S if int(jobs) > 1 else 0) + LEAST_S
    if seconds is not None and seconds < least:
        told = f"and the search is told {notice} s before its end: give {least} s, or a shorter --notice"
        raise FluidTuneError(f"--time {limit} is {seconds} s, {told}")
    return Submission(tuple(kept), (*words[:first], *words[end + 1 :]), int(notice), "--print" in own, int(jobs))


def seconds_of(time: str) -> int | None:
    """The seconds of a time limit as sbatch reads it; None: it is no such time, or 0, which is no limit."""
    found = _TIME.fullmatch(time)
    if found is None:
        return None
    days, hours, minutes, seconds, h, m, s, alone = (int(each or 0) for each in found.groups())
    return ((days * 24 + hours + h) * 60 + minutes + m + alone) * 60 + seconds + s or None


def script(asked: Submission, name: str, python: str) -> str:
    """The job script, which sbatch reads. ``name``: the job's. ``python``: the program on the nodes."""
    own = [f"--job-name={_word(name)}", "--requeue", "--open-mode=append", f"--signal=B:USR1@{asked.notice_s}"]
    program = ["fluidtune", "run"] if asked.jobs == 1 else ["fluidtune.slurm.joined"]
    own += [f"--array=1-{asked.jobs}"] if asked.jobs > 1 else []
    lines = "".join(f"#SBATCH {setting}\n" for setting in [*own, *asked.options])
    command = f"export {DRIVER_S}={asked.notice_s - END_S}\nexec {shlex.join([python, '-m', *program, *asked.run])}"
    return f"#!/bin/bash\n{lines}{command}\n"


def _word(word: str) -> str:
    """The word as it stands after "#SBATCH", where quotes hold as in a shell."""
    if "\n" in word:
        raise FluidTuneError(f"{word!r} has a line break, which no line of a job script can hold; leave it out")
    return shlex.quote(word)

"""The way of an act from a user's process to the driver: a file in the run's folder, and the answer beside it.

    RUN_DIR/steer/ID.ask       an act, by the user's process. The driver takes it in its next turn
    RUN_DIR/steer/ID.taken     the same file, from then on until it is answered
    RUN_DIR/steer/ID.answer    the answer. Who has asked removes it

Each change is one rename or removal, so an act is either taken or withdrawn. It works from each node that has the run's
folder. The folder is the run's user's alone (mode 0700). The files are JSON, and nothing is unpickled.
Whether the driver lives, `driver_state` says.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fluidtune.errors import FluidTuneError
from fluidtune.report.fold import fold_of
from fluidtune.report.log_tail import driver_state
from fluidtune.report.run_logs import find_log
from fluidtune.steering.acts import Act, Kind
from fluidtune.steering.json_values import LONGEST, cut, read_json

#: The folder, in the run's.
FOLDER = "steer"
#: Seconds that a driver may take for an act. It serves acts in each turn of Tune's loop, which takes 0.1 s, or longer
#: where a searcher thinks or a large state is saved. Judgement.
PATIENCE_S = 60.0
#: Seconds between two looks for the answer. Judgement.
LOOK_S = 0.05
#: The longest name of a trial, in characters, and of what else is a name. Judgement: Linux' for a path is 4,096.
_LONGEST_NAME = 4096
ENDED = "the run has ended"


class SteeringRefused(FluidTuneError):
    """Nothing was done. The message says why."""


#: What becomes of an act: whether it is refused, and what its user is told. To be called once.
Answer = Callable[[bool, str], None]


def act_from(said: Any, by: str = "") -> Act:
    """The act that a message means. ``by``: as in `Act`. Raises `ValueError` if it means none."""
    texts = ("id", "kind", "trial", "via")
    good = isinstance(said, dict) and all(isinstance(said.get(name), str) for name in texts)
    good = good and all(0 < len(said[name]) <= _LONGEST_NAME for name in texts)
    good = good and said["kind"] in get_args(Kind) and isinstance(said.get("from_checkpoint", False), bool)
    if not good or not isinstance(said.get("parameters"), dict):
        raise ValueError(f"this is no act: {cut(str(said))}")
    more = {"parameters": said["parameters"], "from_checkpoint": said.get("from_checkpoint", False)}
    return Act(**{name: said[name] for name in texts}, by=by, **more)


def parameters_from(pairs: Iterable[str]) -> dict[str, Any]:
    """The values of ``NAME=VALUE``, each value as JSON.

    Raises:
        SteeringRefused: there is no ``=``, the value is no JSON (`read_json`), or a name comes twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        text, equals, value = pair.partition("=")
        name = text.strip()
        if name in found:
            raise SteeringRefused(f"{cut(name)} is set twice")
        try:
            if not name or not equals:
                raise ValueError("there is no name or no =")
            found[name] = read_json(value)
        except ValueError as error:
            shown = cut(name) or "NAME"
            raise SteeringRefused(
                f"{cut(pair)!r} is no NAME=VALUE with a value in JSON, such as {shown}=0.01, {shown}=true or "
                f'{shown}="text": {error}'
            )
    return found


def _write(path: Path, what: Any) -> None:
    """Write JSON so that whoever sees the file sees all of it."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(what))
    part.replace(path)


class SteeringFiles:
    """The driver's end. ``run_dir``: the directory of its event log. Raises OSError if the folder cannot be made."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)
        for left in self._folder.glob("*.taken"):  # whether that was done, the event log says
            left.unlink()
        self._refuse("the driver that it was for has ended; ask again")

    def requests(self) -> Iterator[tuple[Act, Answer]]:
        """What was asked for and has no answer yet, oldest first. What is no act is refused."""
        found = []
        for ask in self._folder.glob("*.ask"):
            with contextlib.suppress(FileNotFoundError):  # it was withdrawn
                found.append((ask.lstat().st_mtime_ns, ask))
        for _, ask in sorted(found):
            taken = ask.with_suffix(".taken")
            try:
                ask.rename(taken)
            except FileNotFoundError:
                continue
            try:
                fd = os.open(taken, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with open(fd, "rb") as file:
                    said, owner = read_json(file.read(LONGEST)), os.fstat(fd).st_uid
                yield act_from({**said, "id": taken.stem}, _name_of(owner)), partial(_answer, taken)
            except (ValueError, TypeError, OSError) as error:
                _answer(taken, True, str(error))

    def _refuse(self, words: str) -> None:
        for _, answer in self.requests():
            answer(True, words)

    def close(self) -> None:
        """Refuse what has no answer yet. What is asked for later finds no driver."""
        self._refuse("the run has just ended")
        with contextlib.suppress(OSError):  # somebody's answer is in it
            self._folder.rmdir()


def _answer(taken: Path, refused: bool, words: str) -> None:
    with contextlib.suppress(OSError):  # its user learns from the event log what was done
        _write(taken.with_suffix(".answer"), {"refused": refused, "words": words})
        taken.unlink()


def ask_driver(log: Path, act: Act, patience_s: float = PATIENCE_S) -> str:
    """Have the driver that writes this log do what is asked for. Returns what was done, in words.

    Raises:
        SteeringRefused: nothing was done.
        FluidTuneError: no answer came within ``patience_s``, and it is not known whether anything was done.
    """
    folder = log.parent / FOLDER
    ask, taken, answer = (folder / f"{act.id}.{what}" for what in ("ask", "taken", "answer"))
    if (length := len(json.dumps(asdict(act)))) > LONGEST:
        raise SteeringRefused(f"the act is too long: it has {length} bytes, of at most {LONGEST}")
    try:
        _write(ask, asdict(act))
    except (FileNotFoundError, NotADirectoryError):
        raise SteeringRefused(_why_silent(log))
    except OSError as error:
        raise SteeringRefused(f"{folder} cannot be written: {error.strerror}; the user who runs the search steers it")
    until = time.monotonic() + patience_s
    while True:
        state = driver_state(log, lambda: fold_of(log).last_driver())
        with contextlib.suppress(FileNotFoundError):
            found = json.loads(answer.read_text())
            answer.unlink()
            if found["refused"]:
                raise SteeringRefused(found["words"])
            return str(found["words"])
        if (gone := state in ("ended", "died")) or time.monotonic() > until:
            with contextlib.suppress(FileNotFoundError):
                ask.unlink()
                raise SteeringRefused(_why_silent(log))
            if gone and (state == "ended" or not taken.exists()):
                raise SteeringRefused(ENDED)
            words = f"the driver has not answered for {patience_s:.0f} s, and may do it yet: see fluidtune why"
            if gone:
                words = "the driver ended before it answered, and may have saved the act: see fluidtune why, once the"
                words += " run is restored"
            raise FluidTuneError(words)
        time.sleep(LOOK_S)


def _why_silent(log: Path) -> str:
    """Why no driver answers, from the run's log."""
    fold = fold_of(log)
    if fold.over:
        return ENDED
    if not (fold.head.get("settings") or {}).get("steer"):
        how = "start it with `fluidtune run --steer SCRIPT`, or with FluidExecutor(steer=True)"
        return f"this search cannot be steered: {how}"
    return "no driver of this run answers: it has just ended, or has died; Tuner.restore goes on with a run"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def ask(
    run_dir: str | os.PathLike[str],
    kind: Kind,
    trial: str,
    pairs: Iterable[str] = (),
    from_checkpoint: bool = False,
) -> str:
    """Steer a trial of the run in ``run_dir`` from the command line.

    ``trial``: see `fluidtune.report.trial_lookup.trial_called`; the driver finds it, also before it is in the log.
    Returns what was done, in words.

    Raises:
        SteeringRefused: nothing was done.
        FluidTuneError: there is no such run.
    """
    act = Act(uuid.uuid4().hex, kind, trial, "", "command line", parameters_from(pairs), from_checkpoint)
    return ask_driver(find_log(run_dir), act)

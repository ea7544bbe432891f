"""What the process is to be that a launcher asks for: read of the launcher itself, as the kernel describes it.

On a quick node Ray's own program has not run, which changes the environment as Ray's context says. So that is done
here, for contexts that are known whole. For others the launcher becomes Ray's own program.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
from dataclasses import dataclass
from typing import Any

from fluidtune.cluster.forks.fork_launcher import CONTEXT

_LANGUAGE = "--language="
#: All that Ray 2.44 to 2.60 say in a context (``RuntimeEnvContext``).
_KNOWN = {"command_prefix", "env_vars", "py_executable", "override_worker_entrypoint", "java_jars"}


@dataclass(frozen=True)
class Launched:
    """``program``: options of Python's, the program and its arguments. All else is the launcher's own."""

    program: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    nice: int
    oom_score: str
    cores: set[int]
    limits: list[tuple[int, tuple[int, int]]]

    @classmethod
    def by(cls, pid: int, name: str) -> Launched:
        """What the launcher with this process id asks for. ``name``: the server's.

        Raises:
            OSError: it has ended.
            ValueError: Ray's own program must read its context. Other errors: it is no launcher.
        """
        words = _read(pid, "cmdline").split("\0")[:-1]
        environment = dict(each.split("=", 1) for each in _read(pid, "environ").split("\0") if "=" in each)
        folder = os.readlink(f"/proc/{pid}/cwd")
        if name in words:
            program = words[words.index(name) + 1 :]
        else:
            context = [each for each in words if each.startswith((CONTEXT, _LANGUAGE))]
            program = [each for each in words[2:] if each not in context]
            folder = _set_up(context, environment, name) or folder
        (umask,) = (each.split()[1] for each in _read(pid, "status").splitlines() if each.startswith("Umask:"))
        kinds = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
        return cls(
            program,
            environment,
            folder,
            int(umask, 8),
            os.getpriority(os.PRIO_PROCESS, pid),
            _read(pid, "oom_score_adj"),
            os.sched_getaffinity(pid),
            [(kind, resource.prlimit(pid, kind)) for kind in kinds],
        )


def _read(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return os.fsdecode(file.read())


def _set_up(arguments: list[str], environment: dict[str, str], name: str) -> str | None:
    """Change the environment as Ray's own program would. Returns another working directory; None: it stays."""
    said = dict(each.split("=", 1) for each in arguments)
    context: dict[str, Any] = json.loads(said[CONTEXT[:-1]])
    given = context.get("env_vars") or {}
    before = context.get("command_prefix") or []
    folder = before[1] if len(before) == 3 and (before[0], before[2]) == ("cd", "&&") else None
    known = (
        context.keys() <= _KNOWN
        and said == {CONTEXT[:-1]: said[CONTEXT[:-1]], _LANGUAGE[:-1]: "PYTHON"}
        and not context.get("override_worker_entrypoint")
        and shlex.split(context["py_executable"])[-1] == name
        and not any("$" in value for value in given.values())
        and (not before or (folder is not None and shlex.quote(folder) == folder and os.path.isdir(folder)))
    )
    if not known:
        raise ValueError("Ray's own program must read the context")
    environment.update(given)
    return folder

"""What a new process costs in a plain Ray program, forked and not: seconds to the first answer, and memory of its own.

``python -m benchmarks.forks --json [--repeats N]``. An actor imports torch and Ray Tune. Both sides run in turn on one
Ray node of this machine: `forked` with the runtime environment of `fluidtune.forked`, `plain` with one that sets a
variable, as Ray Tune gives its trials. ``seconds``: from the request for one actor to its answer. ``mib``: memory that
only its process has (USS); ``computed_mib``: after its first product of two matrices. ``together_seconds``,
``together_mib``: of twelve actors that are asked for at once. ``ready_seconds``: from ``ray.init`` until the first
process is a fork. ``ratio`` is that of ``seconds``. Each measurement waits until the former processes have ended.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import psutil
import ray
import torch

import fluidtune
from benchmarks.common import finish, parser, result, say
from fluidtune.cluster.forks.child import is_forked

#: Actors that are asked for at once.
TOGETHER = 12
#: Seconds within which the server must be ready. It takes four on a quiet machine of two cores.
READY_S = 120.0
#: Seconds of quiet before a measurement. A server has imported what it was taught in less.
QUIET_S = 5.0


@ray.remote(num_cpus=1)
class Asked:
    def answer(self) -> bool:
        """Whether this process is a fork."""
        import ray.tune  # noqa: F401

        return is_forked()

    def pid(self) -> int:
        return os.getpid()

    def mib(self, computes: bool = False) -> float:
        """The process' own memory in MiB. ``computes``: after its first product of two matrices."""
        if computes:
            torch.ones(10, 10) @ torch.ones(10, 10)
        return psutil.Process(os.getpid()).memory_full_info().uss / 2**20


def end(actors: list[Any]) -> None:
    """End the actors, and wait until the machine is quiet."""
    processes = [psutil.Process(pid) for pid in ray.get([each.pid.remote() for each in actors])]
    for each in actors:
        ray.kill(each)
    psutil.wait_procs(processes, timeout=READY_S)
    time.sleep(QUIET_S)


def one(options: dict[str, Any], forked: bool) -> tuple[float, float, float]:
    """Seconds and memory of one actor, and its memory after it has computed."""
    began = time.perf_counter()
    actor = Asked.options(**options).remote()  # type: ignore[attr-defined]
    if ray.get(actor.answer.remote()) != forked:
        raise RuntimeError(f"the process was {'not ' if forked else ''}forked")
    seconds = time.perf_counter() - began
    mib, computed = ray.get([actor.mib.remote(), actor.mib.remote(computes=True)])
    end([actor])
    return seconds, mib, computed


def together(options: dict[str, Any]) -> tuple[float, float]:
    """Seconds until `TOGETHER` actors have answered that were asked for at once, and their memory."""
    began = time.perf_counter()
    actors = [Asked.options(**options).remote() for _ in range(TOGETHER)]  # type: ignore[attr-defined]
    ray.get([each.answer.remote() for each in actors])
    seconds = time.perf_counter() - began
    mib = sum(ray.get([each.mib.remote() for each in actors]))
    end(actors)
    return seconds, mib


def wait_until_forked(options: dict[str, Any]) -> float:
    """Seconds until a process is a fork."""
    began = time.perf_counter()
    while time.perf_counter() - began < READY_S:
        actor = Asked.options(**options).remote()  # type: ignore[attr-defined]
        forked = ray.get(actor.answer.remote())
        ray.kill(actor)
        if forked:
            ready = time.perf_counter() - began
            time.sleep(QUIET_S)  # the server imports what that process has taught it
            return ready
    raise RuntimeError(f"no process was forked within {READY_S:.0f} s")


def main() -> None:
    options = parser(__doc__.splitlines()[0], repeats=True).parse_args()
    import ray.tune

    environments = {
        "forked": {"runtime_env": fluidtune.forked()},
        "plain": {"runtime_env": {"env_vars": {"FLUIDTUNE_BENCHMARK": "1"}}},
    }
    ray.init(num_cpus=16, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ready = wait_until_forked(environments["forked"])
    say(f"forks after {ready:.1f} s")
    runs: dict[str, dict[str, list[float]]] = {side: {} for side in environments}
    for turn in range(1 if options.quick else max(3, options.repeats)):
        for side in sorted(environments, reverse=bool(turn % 2)):
            figures = one(environments[side], side == "forked")
            found = dict(zip(("seconds", "mib", "computed_mib"), figures, strict=True))
            if not options.quick or not turn:
                names = ("together_seconds", "together_mib")
                found |= dict(zip(names, together(environments[side]), strict=True))
            say(f"{side}: { ({name: round(value, 2) for name, value in found.items()}) }")
            for name, value in found.items():
                runs[side].setdefault(name, []).append(value)
    ray.shutdown()
    sides = {side: {name: median(values) for name, values in found.items()} for side, found in runs.items()}
    ratios = {name: sides["plain"][name] / value for name, value in sides["forked"].items()}
    shown = {"ready_seconds": ready, "sides": sides, "all": runs, "ratios": ratios, "ratio": ratios["seconds"]}
    finish(result("forks", "cpu:2", "real", **shown), options.json)


if __name__ == "__main__":
    main()

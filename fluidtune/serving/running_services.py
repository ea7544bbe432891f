"""The services that run in a Ray cluster: which of them somebody means, and what is asked of it.

A service is known by its front's name in Ray, which has the service's own name and its user. No two have one name.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import ray
from ray.tune import ResultGrid

from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.job_metadata import user_of_job
from fluidtune.report.terminal_text import printable
from fluidtune.serving.model_versions import operators_command
from fluidtune.serving.process import HUNG_S, LOAD_S, LOOK_S
from fluidtune.serving.winners import run_directory, winner_named, winners
from symphony_serve.errors import ServeError

logger = logging.getLogger(__name__)

#: The first word of a front's name in Ray, and the namespace of that.
APP, NAMESPACE = "serving", "fluidtune"
#: Seconds for a front to answer, and for its process to start: it imports what this process has, on a busy machine.
ANSWER_S, START_S = 30.0, 120.0


def known() -> list[RunningService]:
    """The services of this Ray cluster, none of an older version, also those that start or whose front does anew."""
    named = ray.util.list_named_actors(all_namespaces=True)
    words = [one["name"].split("/", 2) for one in named if one["namespace"] == NAMESPACE]
    return sorted(RunningService(*some[1:]) for some in words if some[0] == APP and len(some) == 3)


def check_name(one: RunningService, there: Sequence[RunningService]) -> None:
    """Raises FluidTuneError if the name is none, or if another one of the services that are there has it."""
    if not one.name or "/" in one.name or not one.name.isprintable():
        raise FluidTuneError(f"name is {one.name!r}, expected printable characters without '/', one at least")
    for other in there:
        if other.name == one.name:
            said = f"this Ray cluster has a service {one.name!r} already, of user {other.user}"
            end = f", or end that one first: {operators_command(one.user, 'stop', one.name)}" if other == one else ""
            raise FluidTuneError(f"{said}; give another name (--name){end}")


def chosen(there: Sequence[RunningService], name: str | None, user: str, changes: bool) -> RunningService:
    """The one of this name. None: the only one, of the user's own if there are any.

    changes: it is to be changed or stopped, which only its user may. Raises FluidTuneError if there is no such one.
    """
    listed = ", ".join(f"{one.name} (user {one.user})" for one in there)
    if not there:
        raise FluidTuneError("nothing is served in this Ray cluster; start it with: fluidtune serve start")
    own = [one for one in there if one.user == user]
    found = own or there if name is None else [one for one in there if one.name == name]
    if not found:
        raise FluidTuneError(f"this Ray cluster has no service {name!r}; it has {listed}")
    if len(found) > 1:
        raise FluidTuneError(f"this Ray cluster has several services; give the name (--name) of one of them: {listed}")
    if changes and found[0].user != user:
        said = f"service {found[0].name!r} is of user {found[0].user}, and you are {user}"
        raise FluidTuneError(f"{said}; if you act for them: fluidtune serve --user {shlex.quote(found[0].user)}")
    return found[0]


def find(name: str | None = None, user: str | None = None, changes: bool = False) -> RunningService:
    """As `chosen`, of this Ray cluster. user: None is the one of this process's job."""
    return chosen(known(), name, user_of_job(user), changes)


@dataclass(frozen=True, order=True)
class RunningService:
    """What runs as a service of this Ray cluster: its name, and whose it is."""

    name: str
    user: str

    @property
    def actor(self) -> str:
        """The front's name in Ray."""
        return f"{APP}/{self.name}/{self.user}"

    def front(self) -> Any:
        """The front's actor; None: there is none."""
        try:
            return ray.get_actor(self.actor, namespace=NAMESPACE)
        except ValueError:
            return None

    def status(self) -> dict[str, Any]:
        """As `fluidtune serve status --json` prints it; docs/serving.md has the keys."""
        return self._told("status")

    def picture(self, path: str) -> Path:
        """Draw the batches of the last minute over devices as a PNG."""
        from fluidtune.report.serving_report import Batch, batches_png
        from fluidtune.serving.watching import MINUTE_S

        batches = [Batch(*one) for one in self._told("minute")]
        devices = max(self.status()["devices"], *(one.device + 1 for one in batches), 1)
        return batches_png(batches, devices, MINUTE_S, path)

    def deploy(
        self,
        results: ResultGrid | str | Path,
        trial: str | None = None,
        canary: float = 1.0,
        metric: str | None = None,
        mode: str | None = None,
    ) -> dict[str, Any]:
        """Load another checkpoint beside the one that serves, measure it, and move the requests over to it.

        trial: its id; None: the best one. canary: the part of the requests that it gets until `promote`; 1: it gets all
        at once. metric, mode: as for `fluidtune.serve`. Returns the version as it is in `status`. Raises FluidTuneError
        if it cannot be served; the version before serves on.
        """
        if not isinstance(canary, Real) or not 0 < canary <= 1:
            raise FluidTuneError(f"canary is {canary!r}, expected the part of the requests, above 0 and at most 1")
        winner = winners(results, 1, metric, mode)[0] if trial is None else winner_named(results, trial, metric)
        # What is copied first takes as long as to load it.
        wait_s = LOAD_S if winner.goes_on else ANSWER_S
        number = self._told("deploy", winner, run_directory(results), float(canary), wait_s=wait_s)
        until = time.monotonic() + START_S
        while True:
            time.sleep(LOOK_S)
            try:
                found = {one["version"]: one for one in self.status()["trials"]}
            except FluidTuneError:  # The front may be starting anew.
                if time.monotonic() > until:
                    raise
                continue
            until = time.monotonic() + START_S
            version = found.get(number)
            if version is None:
                raise FluidTuneError(f"version {number} was given up, as the front was restarted; deploy it again")
            if version["state"] in ("refused", "ended"):
                why = version["why"] or "it was rolled back"
                raise FluidTuneError(f"version {number} (trial {winner.name}) does not serve: {why}")
            if version["state"] not in ("loading", "measuring"):
                return version

    def promote(self) -> None:
        """Let the canary answer all requests. Raises FluidTuneError if there is none."""
        self._told("promote", wait_s=HUNG_S + ANSWER_S)

    def rollback(self) -> None:
        """Put the version before the last deploy back. Raises FluidTuneError if there is none."""
        self._told("rollback", wait_s=HUNG_S + ANSWER_S)

    def stop(self) -> None:
        """Answer what runs, refuse what waits, and end all processes. Nothing happens if it has ended."""
        front = self.front()
        if front is None:
            return
        try:
            ray.get(front.stop.remote(), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            logger.warning("the front does not answer (%s); it is ended all the same", type(error).__name__)
        ray.kill(front, no_restart=True)
        until = time.monotonic() + ANSWER_S
        while self.front() is not None and time.monotonic() < until:
            time.sleep(LOOK_S / 10)

    def _told(self, method: str, *given: Any, wait_s: float = ANSWER_S) -> Any:
        front = self.front()
        if front is None:
            raise FluidTuneError(f"service {self.name!r} has ended; start it with: fluidtune serve start")
        try:
            return ray.get(front.ask.remote(method, *given), timeout=wait_s)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, ServeError):  # It has understood, and says no.
                raise FluidTuneError(str(cause)) from None
            said = f"the front does not answer ({type(error).__name__})"
            raise FluidTuneError(f"{said}; it may be starting anew, try again") from None


@dataclass(frozen=True)
class Served(RunningService):
    """Trials or models that answer requests. `url` is where: POST an input to it, or to url/TRIAL or url/MODEL.

    It goes on until `stop`, or until the Ray cluster ends. Use it as a context manager, or `stop` it.
    """

    url: str
    trials: list[str]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def status_text(found: dict[str, Any]) -> str:
    """The status for a terminal. Names and errors in it come from elsewhere."""
    why = f" ({found['why']})" if found["why"] else ""
    leased, plain = " leased" if found["app"] else "", "" if found["devices"] == 1 else "s"
    groups = found.get("stages", [])
    lines = [
        f"{found['name']}, of user {found['user']}, at {found['url']}",
        f"{found['state']}{why}: SLO {1e3 * found['slo_s']:.0f} ms, {found['devices']}{leased} device{plain} with "
        f"{len(found['device_pids'])} of {found['processes_wanted']} processes, "
        f"{found['unanswered']} requests wait, {found['seconds']:.0f} s",
    ]
    if found["devices_wanted"] not in (None, found["devices"]):
        lines.append(f"  the load wants {found['devices_wanted']} devices")
    for number, stages in enumerate(groups):
        whole = sum(one["weights"] for one in stages)
        lines += [
            f"  group {number}, stage {place}: layers {one['first']} to {one['end'] - 1}, {1e3 * one['seconds']:.1f} "
            f"ms, {one['weights'] / 1e6:.4g} of {whole / 1e6:.4g} MB of weights, {one['activations'] / 1e3:.4g} kB out"
            for place, one in enumerate(stages)
        ]
    placement = found.get("placement")
    if placement:
        lines += [f"  device {one}: {', '.join(models) or 'no model'}" for one, models in placement["devices"].items()]
        there = {model for models in placement["devices"].values() for model in models}
        counts = placement.get("loads", {})  # A service that was started by an earlier revision says none.
        loads = [f"{one} {n}{'' if one in there else ' (in no memory)'}" for one, n in counts.items()]
        lines += [f"  loads: {', '.join(loads)}"] if loads else []
        lines.append(f"  {placement['phase']}: {placement['why']}")
    for trial in found["trials"]:
        batches = {int(size): count for size, count in trial["batches"].items()}
        mean = sum(size * count for size, count in batches.items()) / max(1, sum(batches.values()))
        became = ", ".join(f"{count} {what}" for what, count in sorted(trial["requests"].items())) or "no request yet"
        alone = "not measured" if trial["batch_1_s"] is None else f"{1e3 * trial['batch_1_s']:.1f} ms alone"
        formed = f", formed by {trial['batching']}" if trial["batching"] == "orloj" else ""
        p99 = "" if trial["p99_s"] is None else f", p99 {1e3 * trial['p99_s']:.1f} ms"
        share = f" of {100 * trial['share']:g} %" if trial.get("share") else ""
        alone += f", SLO {1e3 * trial['slo_s']:.0f} ms" if "slo_s" in trial else ""
        lines += [
            f"  {trial['trial']} (version {trial['version']}, {trial['state']}{share}): {became}; {alone}, "
            f"{mean:.1f} requests in a batch{formed}",
            f"    last minute: {trial['goodput']:.1f} requests/s answered{p99}",
            *([f"    {trial['why']}"] if trial.get("why") else []),
        ]
    return "\n".join(map(printable, lines))

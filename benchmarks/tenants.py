"""Several tuning jobs that arrive one after the other on one Ray cluster: stock Ray, FluidTune alone, and Themis.

``python -m benchmarks.tenants --json [--devices emulated:8|cpu:2] [--seconds S] [--lease S] [--quick]``. There are four
jobs (job.py), each a process: a large one, and smaller ones that arrive while it runs. The side ``stock`` runs them as
they are, the side ``fluid`` through ``fluidtune run``, without an arbiter, and the side ``themis`` through
``fluidtune run --shared``, with the same cluster, arrivals and configurations. On the side ``fluid`` each job asks Ray
for the devices that it can use at the moment, of all that the cluster has, and gives back those of no use to it. That
side is there on real cores only: without an arbiter an emulated device takes nothing of Ray's, so that two jobs would
have eight of them each.

A job's rho is T_sh / T_id (eq. 1), the one of `themis_bridge.independent_finish_time`. T_sh is the time from the start
of its process to its end. T_id is B / min(devices / N, trials): B is the sum of its trials' training seconds on the
stock side, where each trial has a device to itself, and N is, on each side, the number of jobs, averaged over this
job's life.

A side has ``rho`` and ``seconds`` by job, ``worst_rho`` and ``makespan`` (s, from the first arrival to the last end).
``ratios`` are stock's figures divided by those of Themis: of ``worst_rho`` (also in ``ratio``) and of ``makespan``;
``ratios_without_arbiter``, if there is that side, are those of ``fluid`` divided by those of Themis. On both these
sides trials share devices and grow as in any run under FluidTune, so that their difference is what the arbiter does.

A side that takes longer than ``--limit`` is ended (side_limit.py). If that is ``fluid``, ``not_ended`` names it and the
others are compared; without one of the others nothing can be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, NotEnded, cores, finish, kill_tree, parser, result, say
from benchmarks.head import Head, head
from benchmarks.scaled_profile import scaled
from benchmarks.side_limit import SideLimit
from benchmarks.sides import JOB
from fluidtune.profiles import DEFAULT
from themis_bridge import independent_finish_time

#: The sides, in the order in which they are run.
SIDES = STOCK, FLUID, THEMIS = "stock", "fluid", "themis"
#: Those on emulated devices.
EMULATED_SIDES = STOCK, THEMIS


@dataclass(frozen=True)
class Tenant:
    """One job. ``arrives``: its distance from the first job, in iterations on one device."""

    name: str
    arrives: float
    trials: int
    epochs: int


#: The jobs on emulated devices. Judgement: as in the paper's workloads, few jobs are large and many are small.
EMULATED = [
    Tenant("large", 0, 64, 10),
    Tenant("middle", 15, 16, 10),
    Tenant("small", 30, 8, 10),
    Tenant("last", 40, 8, 10),
]
#: The jobs of ``--quick``: fewer trials and epochs.
QUICK = [Tenant("large", 0, 24, 5), Tenant("middle", 10, 8, 5), Tenant("small", 15, 4, 5), Tenant("last", 20, 4, 5)]
#: The jobs on real cores, of which there are few.
REAL = [Tenant("large", 0, 10, 6), Tenant("middle", 15, 4, 6), Tenant("small", 25, 2, 6), Tenant("last", 35, 2, 6)]


def run_side(
    side: str, tenants: list[Tenant], options: Any, profile: str | None, limit: float
) -> dict[str, dict[str, float]]:
    """Run the jobs on a new cluster. Returns job -> when it began and ended (s), and what it measured itself.

    ``side``: one of `SIDES`. Raises NotEnded if the jobs take longer than ``limit`` seconds.
    """
    emulated = profile is not None
    count = cores(options.devices, ("cpu", "emulated"))
    resources = {"num_cpus": os.cpu_count() or 1, "num_gpus": count} if emulated else {"num_cpus": count}
    with tempfile.TemporaryDirectory(prefix="fluidtune-tenants-") as directory, head(**resources) as cluster:
        if side == THEMIS:
            lease = ["--lease", str(options.lease), "--notice", str(options.lease / 3)]
            _call(cluster, ["arbiter", "--address", cluster.address, "start", *lease])
        begun = time.time()
        processes: list[tuple[Tenant, subprocess.Popen[Any], float]] = []
        ends: dict[str, float] = {}
        waiting = list(tenants)
        try:
            while waiting or len(ends) < len(processes):
                now = time.time() - begun
                while waiting and now >= waiting[0].arrives * options.seconds:
                    tenant = waiting.pop(0)
                    command = command_of(tenant, side, options.devices, cluster.address, directory, profile, count)
                    with open(Path(directory, f"{tenant.name}.log"), "w") as log:
                        process = subprocess.Popen(
                            command, cwd=ROOT, env=cluster.environment, stdout=log, stderr=subprocess.STDOUT
                        )
                    processes.append((tenant, process, now))
                for tenant, process, _ in processes:
                    if tenant.name not in ends and process.poll() is not None:
                        ends[tenant.name] = time.time() - begun
                        if process.returncode:
                            said = Path(directory, f"{tenant.name}.log").read_text()[-3000:]
                            raise RuntimeError(f"job {tenant.name} ended with {process.returncode}:\n{said}")
                if now > limit:
                    left = ", ".join(each.name for each in tenants if each.name not in ends)
                    raise NotEnded(f"after {limit:.0f} s these jobs had not ended: {left}")
                time.sleep(0.05)
        finally:
            for _, process, _ in processes:
                if process.poll() is None:
                    kill_tree(process)
        found = {}
        for tenant, _, start in processes:
            own = json.loads(Path(directory, f"{tenant.name}.json").read_text())
            own.pop("launches", None)
            found[tenant.name] = {"start": start, "end": ends[tenant.name], **own}
        return found


def _call(cluster: Head, command: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "fluidtune", *command],
        cwd=ROOT,
        env=dict(cluster.environment),
        check=True,
        stdout=sys.stderr,
        timeout=120,
    )


def command_of(
    tenant: Tenant, side: str, devices: str, address: str, directory: str, profile: str | None, count: int
) -> list[str]:
    """The command of a job on a side. ``address``: of the Ray cluster. ``count``: its devices."""
    own = ["--address", address, "--name", tenant.name, "--algorithm", "grid", "--cpus", str(count)]
    own += ["--trials", str(tenant.trials), "--epochs", str(tenant.epochs), "--storage", directory]
    own += ["--out", str(Path(directory, f"{tenant.name}.json"))]
    if profile is not None:
        own += ["--trainable", "emulated", "--gpus", str(count), "--profile", profile]
    if side == STOCK:
        return [sys.executable, JOB, *own, *(["--pace"] if profile is not None else [])]
    ours = ["--devices", devices, *(["--profile", profile] if profile is not None else [])]
    ours += ["--shared"] if side == THEMIS else []
    return [sys.executable, "-m", "fluidtune", "run", *ours, JOB, *own]


def fairness(
    found: dict[str, dict[str, float]], budgets: dict[str, float], tenants: list[Tenant], devices: int
) -> dict[str, Any]:
    """The figures of a side. ``budgets``: job -> B, device seconds."""
    rho, seconds = {}, {}
    for tenant in tenants:
        start, end = found[tenant.name]["start"], found[tenant.name]["end"]
        together = sum(max(0.0, min(end, other["end"]) - max(start, other["start"])) for other in found.values())
        seconds[tenant.name] = end - start
        jobs = max(1.0, together / (end - start))
        fair = independent_finish_time(budgets[tenant.name], devices, tenant.trials, jobs)
        rho[tenant.name] = (end - start) / fair
    return {
        "rho": rho,
        "worst_rho": max(rho.values()),
        "makespan": max(each["end"] for each in found.values()),
        "seconds": seconds,
        "iterations": sum(each["iterations"] for each in found.values()),
        "errors": sum(each["errors"] for each in found.values()),
    }


def main(given: Sequence[str] | None = None, run: Callable[..., Any] = run_side) -> None:
    """The command. ``run``: what runs a side."""
    arguments = parser("Tuning jobs that share a Ray cluster: stock Ray, FluidTune alone, and Themis.", limit=True)
    arguments.add_argument("--devices", default="emulated:8", help="emulated:N or cpu:N (emulated:8)")
    arguments.add_argument(
        "--seconds", type=float, help="seconds of an emulated iteration on one device (2; 0.4 with --quick)"
    )
    arguments.add_argument("--lease", type=float, help="seconds of a lease (eight iterations, at least 12)")
    options = arguments.parse_args(given)
    count = cores(options.devices, ("cpu", "emulated"))
    emulated = options.devices.startswith("emulated")
    tenants = QUICK if options.quick else EMULATED if emulated else REAL
    options.seconds = options.seconds or (0.4 if options.quick else 2.0 if emulated else 1.0)
    options.lease = options.lease or max(12.0, 8 * options.seconds)
    with tempfile.TemporaryDirectory(prefix="fluidtune-profile-") as directory:
        profile = None
        if emulated:
            profile = str(Path(directory) / "profile.json")
            scaled(DEFAULT, options.seconds).save(profile)
        limit = SideLimit(options.limit)
        found = {}
        for name in EMULATED_SIDES if emulated else SIDES:
            ended = limit.run(name, partial(run, name, tenants, options, profile))
            if ended is not None:
                found[name] = ended
                ends = ", ".join(f"{job} {each['end'] - each['start']:.0f} s" for job, each in ended.items())
                say(f"{name}: {ends}")
    for needed in (STOCK, THEMIS):
        limit.require(needed)
    budgets = {job: each["trial_seconds"] for job, each in found[STOCK].items()}
    sides = {name: fairness(side, budgets, tenants, count) for name, side in found.items()}
    against, *alone = (
        {key: side[key] / sides[THEMIS][key] for key in ("worst_rho", "makespan")}
        for name, side in sides.items()
        if name != THEMIS
    )
    finish(
        result(
            "tenants",
            options.devices,
            "emulated" if emulated else "real",
            iteration_seconds=options.seconds if emulated else None,
            lease_s=options.lease,
            budgets=budgets,
            sides=sides,
            ratios=against,
            not_ended=limit.not_ended,
            **({"ratios_without_arbiter": alone[0]} if alone else {}),
            ratio=against["worst_rho"],
        ),
        options.json,
    )


if __name__ == "__main__":
    main()

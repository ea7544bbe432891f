"""How well the twin predicts a run: its makespan against that of a real run on emulated devices or cores.

``python -m benchmarks.twin --json [--devices emulated:8] [--algorithm A ...]``. For each algorithm the job of
`tune_vs_fluid` is run under FluidTune. The job (profile, costs, stages) is read from that run's event log, and the twin
runs the same engine on it in virtual time. The ratio is ``predicted`` / ``measured``; the measured makespan is the time
from the first to the last event of the log. ``bound`` is the least makespan that any schedule of the job could have had
(docs/engine.md), ``bound_ratio`` the measured makespan divided by it. With ``--from N`` the job is read from another
run on N emulated devices, so that there are two runs for each algorithm.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.algorithms import ALGORITHMS
from benchmarks.common import cores, cpu_or_emulated, finish, parser, result, say
from benchmarks.scaled_profile import scaled
from benchmarks.sides import OURS, sides
from benchmarks.tune_vs_fluid import FULL, QUICK, emulated_job
from fluidtune.profiles import DEFAULT
from fluidtune.report import EVENT_LOG_NAME, read_events
from fluidtune.report.recorded import read_job
from fluidtune.twin import RecordedJob, forecast, least_makespan


def run(devices: str, algorithm: str, job: list[str], profile: str) -> tuple[RecordedJob, float, int]:
    """Run the job under FluidTune. Returns it as its event log says, its seconds, and its number of devices."""
    with tempfile.TemporaryDirectory(prefix="fluidtune-twin-") as keep:
        sides(devices, ["--algorithm", algorithm, *job], profile, keep)[OURS]()
        events = read_events(Path(keep) / OURS / EVENT_LOG_NAME)
        return read_job(events), events[-1]["t"] - events[0]["t"], len(events[0]["devices"])


def main() -> None:
    options = parser("The twin's prediction beside the run.")
    options.add_argument("--devices", default="emulated:8", type=cpu_or_emulated, help="emulated:N or cpu:N")
    options.add_argument("--algorithm", choices=ALGORITHMS, nargs="*", help="algorithms to run (all)")
    options.add_argument(
        "--from", dest="small", type=int, help="emulated devices of the run from which the job is read"
    )
    options.add_argument("--seconds", type=float, help="duration of an emulated iteration on one device (1; quick 0.2)")
    args = options.parse_args()
    emulated = args.devices.startswith("emulated")
    if args.small and not emulated:
        options.error(f"--from {args.small}: cores of one machine are not measured on fewer; give --devices emulated:N")
    digits = ["--trainable", "elastic", *(QUICK if args.quick else FULL)["digits"]]
    algorithms = args.algorithm or (ALGORITHMS[:2] if args.quick else ALGORITHMS)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fluidtune-profile-") as directory:
        path = str(Path(directory) / "profile.json")
        scaled(DEFAULT, args.seconds or (0.2 if args.quick else 1.0)).save(path)
        for algorithm in algorithms:
            job = emulated_job(algorithm, args.quick) if emulated else digits
            whole, seconds, devices = run(args.devices, algorithm, job, path)
            seen = run(f"emulated:{args.small}", algorithm, job, path)[0] if args.small else whole
            predicted = forecast(seen, devices)
            bound = least_makespan(whole, devices).seconds
            found[algorithm] = {
                "measured": seconds,
                "predicted": predicted.makespan,
                "ratio": predicted.makespan / seconds,
                "held": predicted.held,
                "bound": bound,
                "bound_ratio": seconds / bound,
            }
            say(f"{algorithm}: {json.dumps(found[algorithm])}")
    errors = [abs(one["ratio"] - 1) for one in found.values()]
    figures = result(
        "twin",
        args.devices,
        "emulated" if emulated else "real",
        algorithms=found,
        worst_error=max(errors),
        mean_error=sum(errors) / len(errors),
        measured_on=args.small or cores(args.devices, ("cpu", "emulated")),
    )
    finish(figures, args.json)


if __name__ == "__main__":
    main()

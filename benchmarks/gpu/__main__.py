"""All that needs a GPU, in less than half an hour: ``make gpu``, or ``python -m benchmarks.gpu --out DIR``.

It goes through the parts below, each in processes of its own and with an end, and writes a page that says what held
and what did not, ``DIR/README.md``; ``DIR/gpu.json`` has the figures, with the GPU's name. Both are written anew after
each part, so that a run that is ended has what was found until then. A part that fails or has no time left stops no
other. It needs FluidTune with its extra ``dev``; nothing here changes the GPU's own settings.

``--rehearse`` goes the same way on two cores, in about two minutes: this shows that the script is whole, and
measures nothing. ``--budget``: the seconds for all parts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, kill_tree, machine, parser, say
from benchmarks.gpu.probes import PROBES
from benchmarks.gpu.salus import ADMISSIONS
from benchmarks.gpu.search import RUNS, keep_run, unfinished
from benchmarks.sides import under_fluidtune

#: Seconds for all parts. Issue 22 asks for less than half an hour.
BUDGET_S = 1750.0
#: A part with less time than this is left out, seconds. To import torch and Ray takes as long on a busy
#: machine.
LEAST_S = 15.0
#: Seconds in which NVML says which GPUs there are. It takes one where the driver is well, and a driver that
#: has lost a GPU may never answer.
NVML_S = 60.0
#: Seconds of each part of `benchmarks.gpu.salus`. A few times what the parts take on two cores, to start
#: CUDA in nine processes included.
SALUS_S = {"pack": 70.0, "mps": 40.0, "admissions": 130.0, "greedy": 40.0, "resident": 45.0, "overhead": 30.0}
#: Issue 22: a search whose trials leave the GPU idle half of the time, against stock with a whole GPU for each trial.
FASTER = 1.5
#: Issue 22: the part of an iteration that a trial alone may lose.
LONE_LOSS = 0.02
#: Section 2.5.3 of the dissertation, and issue 22: models that are resident at once.
MODELS = 42
#: How far the best accuracies of two sides may be apart: cuDNN chooses kernels by the machine's mood, and a
#: picture of the 2,000 held-out ones is 0.0005.
BEST_APART = 0.02
#: The part of an epoch in which a trial alone leaves the GPU idle. Issue 22: half of the time.
IDLE = (0.4, 0.6)
#: What the sides of the search are, for a reader who has not seen this script.
SIDES = (
    "The same search runs four times. `fluid`: FluidTune finds out how many trials share the GPU. `lanes`: FluidTune"
    " with lanes and MPS, at most four trials on the GPU. `stock-quarter`: Ray Tune without FluidTune, a quarter of the"
    " GPU for each trial. `stock`: the same with the whole GPU for each trial."
)
#: Seconds of a side of the search. On an H200 stock had reported 30 iterations, about half of them, after 137 s: its
#: trials' starts take as long as `search.EPOCH_S` makes them train. On a core nothing waits.
SEARCH_S = 300.0
#: How many times as long a question of `benchmarks.gpu.probes` may take on a core that is shared with others.
CORE_PATIENCE = 4.0
SEARCH = str(ROOT / "benchmarks" / "gpu" / "search.py")
TESTS = [f"tests/salus/test_{name}.py" for name in ("memory", "telemetry", "mps")]


@dataclass(frozen=True)
class Claim:
    """What should hold, whether it does (None: nothing here can tell), and what was found."""

    text: str
    held: bool | None
    found: str


@dataclass(frozen=True)
class Outcome:
    """How a part's command ended. ``status``: None if it was ended because its time was over, or left out."""

    status: int | None
    seconds: float
    output: str
    figures: Any = None


@dataclass(frozen=True)
class Part:
    """``limit``: its seconds. ``read``: its figures, from the command's standard output; ``judge``: what they show."""

    name: str
    command: Sequence[str]
    limit: float
    judge: Callable[[Outcome], list[Claim]]
    read: Callable[[str], Any] = field(default=lambda output: None)


def last_object(output: str) -> Any:
    """The JSON object on the last line, as benchmarks print it; None if there is none."""
    try:
        return json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None


def ended(outcome: Outcome) -> str:
    return "had not ended in its time" if outcome.status is None else f"ended with status {outcome.status}"


def judge_doctor(outcome: Outcome, rehearsal: bool = False) -> list[Claim]:
    missing = [line.removeprefix("MISS").strip() for line in outcome.output.splitlines() if line.startswith("MISS")]
    well = None if rehearsal else outcome.status == 0 and not missing
    return [Claim("`fluidtune doctor` misses nothing", well, "; ".join(missing) or ended(outcome))]


def judge_tests(outcome: Outcome) -> list[Claim]:
    last = last_line(outcome.output)
    held = outcome.status == 0
    all_left_out = held and " passed" not in last
    return [Claim("the tests marked `gpu` and `mps` pass", None if all_left_out else held, f"{ended(outcome)}: {last}")]


def judge_salus(outcome: Outcome) -> list[Claim]:
    found = outcome.figures
    if found is None:
        return [Claim("the benchmark of lanes ends", False, f"{ended(outcome)}: {last_line(outcome.output)}")]
    claims = []
    if "sides" in found:
        shown = ", ".join(f"{name} {side['seconds']:.2f} s" for name, side in found["sides"].items())
        claims.append(Claim("small models are trained side by side", None, shown))
    if "mps" in found:
        had = found["mps"]["had"]
        text = "MPS starts, and holds a client to its limit of memory"
        claims.append(Claim(text, found["mps"]["held_to_its_limit"] if had else None, str(found["mps"])))
    if "admissions" in found:
        short, count = found["admissions"]["out_of_memory"], found["admissions"]["admitted"]
        well = None if not short and 0 < count < ADMISSIONS else count > 0 and short == 0
        claims.append(Claim(f"none of {ADMISSIONS:,} trials runs out of memory", well, f"{short} of {count}"))
    if "greedy" in found:
        held = bool(found["greedy"]["losses_as_alone"])
        claims.append(Claim("a trial that allocates until it fails disturbs no other", held, str(found["greedy"])))
    if "resident" in found:
        there, requests = found["resident"]["models"], found["resident"]["requests"]
        claims.append(Claim(f"{MODELS} models are resident", there == MODELS and requests > 0, str(found["resident"])))
    if "overhead" in found:
        loss = found["overhead"]["worker"]
        held = None if found["rehearsal"] else loss < LONE_LOSS
        claims.append(Claim(f"a trial alone loses less than {LONE_LOSS:.0%}", held, f"{loss:.2%}"))
    return claims


def judge_resize(outcome: Outcome) -> list[Claim]:
    text = "a trial grows to two GPUs and shrinks"
    if outcome.figures is None:
        return [Claim(text, False, f"{ended(outcome)}: {last_line(outcome.output)}")]
    return [Claim(text, True, f"{outcome.figures['by_kind']['stock']} times as fast as stock's pause")]


def judge_search(outcome: Outcome) -> list[Claim]:
    well = outcome.status == 0
    return [] if well else [Claim("the search ends", False, f"{ended(outcome)}: {last_line(outcome.output)}")]


def judge_probe(outcome: Outcome, expected: str) -> list[Claim]:
    found = outcome.figures
    if found is None:
        return [Claim(expected, False, f"{ended(outcome)}: {last_line(outcome.output)}")]
    return [Claim(expected, found["right"], str(found["answer"]))]


def judge_searches(sides: Mapping[str, Mapping[str, Any]], rehearsal: bool) -> list[Claim]:
    """What the sides of the search show together. ``sides``: by name, those that ended."""
    if not sides:
        return []
    errors = {name: side["errors"] for name, side in sides.items() if side["errors"]}
    best = {name: side["best"] for name, side in sides.items() if "ended_after" not in side}
    known = [value for value in best.values() if value is not None]
    alike = len(known) == len(best) and max(known, default=0) - min(known, default=0) <= BEST_APART if best else None
    claims = [
        Claim("no trial of the searches fails", not errors, str(errors or "none")),
        Claim("all sides that ended find the same best trial", alike, str(best)),
    ]
    idle = sides.get("stock", {}).get("idle")
    if idle is not None:
        held = None if rehearsal else IDLE[0] <= idle <= IDLE[1]
        claims.append(Claim("a trial alone leaves the GPU idle half of the time", held, f"{idle:.0%}"))
    for name in ("fluid", "lanes"):
        if name in sides:
            most, samples = sides[name]["most_at_a_time"], sides[name]["samples"]
            claims.append(Claim(f"trials share the GPU ({name})", None if rehearsal else most > 1, f"{most} at a time"))
            claims.append(Claim(f"NVML was asked ({name})", None if rehearsal else samples > 0, f"{samples} samples"))
    for other, least in (("stock", FASTER), ("stock-quarter", None)):
        if other in sides and "fluid" in sides and pace_of(sides[other]):
            ratio = pace_of(sides["fluid"]) / pace_of(sides[other])
            held = None if rehearsal or least is None or "ended_after" in sides["fluid"] else ratio >= least
            wanted = "" if least is None else f" at least {least} times as fast"
            claims.append(Claim(f"the search is{wanted or ' compared'} (beside {other})", held, f"{ratio:.2f} times"))
    return claims


def pace_of(side: Mapping[str, Any]) -> float:
    """Iterations a second of the side's process, its start included."""
    return float(side["iterations"] / (side.get("ended_after") or side["process_seconds"]))


def last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1][:300]


def parts(out: Path, rehearsal: bool, gpus: int) -> list[Part]:
    """What is gone through, in this order."""
    python = sys.executable
    doctor = [python, "-m", "fluidtune", "doctor"]
    tests = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", *TESTS, "-m", "gpu or mps"]
    core = ["--gpu", "0"] if rehearsal else []
    small = [*core, "--trials", "3", "--epochs", "3"] if rehearsal else []
    devices = "cpu:2" if rehearsal else "gpu:1"
    packed = ["--max-packing", "2" if rehearsal else "4", "--lanes", "FAIR"]
    searches = {
        "fluid": under_fluidtune(devices, SEARCH),
        "stock": [python, SEARCH],
        "lanes": under_fluidtune(devices, SEARCH, settings=packed),
        "stock-quarter": [python, SEARCH, "--gpu", "0.25"],
    }
    found = [
        Part("doctor", doctor, 40.0, partial(judge_doctor, rehearsal=rehearsal)),
        # They tell most a second, so that they come to it in a run of any budget.
        *probes(rehearsal),
        Part("tests", tests, 120.0, judge_tests),
    ]
    found.append(Part("search, pace", [python, SEARCH, "--pace", "--out", str(out), *core], 40.0, judge_search))
    for side, command in searches.items():
        where = ["--side", side, "--out", str(out), *small]
        found.append(Part(f"search, {side}", [*command, *where], SEARCH_S, judge_search))
    if gpus > 1:
        resize = [python, "-m", "benchmarks.resize", "--devices", "gpu:2", "--quick", "--json"]
        found.append(Part("resize", resize, 150.0, judge_resize, last_object))
    salus = [python, "-m", "benchmarks.gpu.salus", "--json", "--only"]
    for name, limit in SALUS_S.items():
        # Of the admissions as many are made as the issue asks for.
        size = ["--rehearse"] if rehearsal else [] if name == "admissions" else ["--quick"]
        if not rehearsal or name == "overhead":
            found.append(Part(f"salus, {name}", [*salus, name, *size], limit, judge_salus, last_object))
    return found


def probes(rehearsal: bool) -> list[Part]:
    """A part for each question of `benchmarks.gpu.probes`; on a core, for those that can be asked there."""
    asked = []
    for name, probe in PROBES.items():
        if not probe.named and (probe.cores or not rehearsal):
            command = [sys.executable, "-m", "benchmarks.gpu.probes", name, *(["--rehearse"] if rehearsal else [])]
            limit = probe.limit * (CORE_PATIENCE if rehearsal else 1.0)
            asked.append(
                Part(f"probe, {name}", command, limit, partial(judge_probe, expected=probe.expected), last_object)
            )
    return asked


def not_run(rehearsal: bool, gpus: int) -> list[str]:
    """What a reader may miss on the page, and why it is not there."""
    found = [
        "A client of MPS that is killed while it computes: ask by `python -m benchmarks.gpu.probes mps_killed`."
        " Nobody knows what becomes of this user's other programs on that GPU.",
        "A kernel that fails under MPS: ask by `python -m benchmarks.gpu.probes mps_fault`. It ends every program of"
        " this user on that GPU.",
        "A GPU that falls off the bus, errors of its memory, and MIG: nothing here can bring them about.",
    ]
    if gpus < 2:
        found.append("A trial that grows to a second GPU, with NCCL (`benchmarks.resize`): it needs two GPUs.")
    if rehearsal:
        found.append(
            "CUDA, NCCL and MPS: two cores stood for GPUs, and `lanes` had two trials at most on each."
            " Of `benchmarks.gpu.salus` only the part `overhead` ran, and of the probes those that a core can answer."
        )
    return found


def run(part: Part, seconds: float, log: Path) -> Outcome:
    """Run a part's command for ``seconds`` at most. Its standard error, and then its output, go to ``log``.

    Whoever ends this process (`ended_by`) ends the part, too: it would keep the GPU.
    """
    began = time.monotonic()
    status: int | None = None
    # What a part has said so far must not be lost in a buffer when it is killed.
    unbuffered = environment() | {"PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as output, log.open("w") as errors:
        process = subprocess.Popen(
            list(part.command), cwd=ROOT, env=unbuffered, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_tree(process)
        except BaseException:
            kill_tree(process)
            raise
        output.seek(0)
        text = output.read()
        errors.write(text)
    return Outcome(status, time.monotonic() - began, text or log.read_text(), part.read(text))


def page(
    title: str,
    about: Sequence[str],
    rows: Sequence[tuple[str, float | None, Sequence[Claim]]],
    missing: Sequence[str] = (),
) -> str:
    """The page as Markdown.

    ``rows``: a part's name, its seconds (None: left out) and its claims. ``missing``: what was not run, in words.
    """
    lines = [f"# {title}", "", *about, "", "| part | what should hold | held | found |", "| --- | --- | --- | --- |"]
    for name, seconds, claims in rows:
        if seconds is None:
            lines.append(f"| {name} | | left out | no time |")
        for claim in claims:
            held = "not measured" if claim.held is None else "yes" if claim.held else "**no**"
            found = claim.found.replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {name} | {claim.text} | {held} | {found} |")
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds, _ in rows if seconds)
    lines += ["", f"Time: {took}.", ""]
    if missing:
        lines += ["## What was not run", "", *(f"- {each}" for each in missing), ""]
    return "\n".join(lines)


#: Prints what NVML says of each GPU, as one JSON object.
ASK_NVML = """
import json
from salus_share.telemetry import Telemetry
gpus = Telemetry().sample()
print(json.dumps([{"name": gpu.name, "driver": gpu.driver, "memory": gpu.memory_total} for gpu in gpus]))
"""


def visible_gpus(ask: str = ASK_NVML, seconds: float = NVML_S) -> list[dict[str, Any]]:
    """The GPUs that NVML finds. It is asked in a process of its own, since it may hang where a driver is broken."""
    with tempfile.TemporaryDirectory() as folder:
        part = Part("nvml", [sys.executable, "-c", ask], seconds, lambda outcome: [], last_object)
        outcome = run(part, seconds, Path(folder) / "log.txt")
    if outcome.figures is None:
        sys.exit(f"NVML does not say which GPUs there are: asking {ended(outcome)}: {last_line(outcome.output)}")
    found: list[dict[str, Any]] = outcome.figures
    return found


def searches_of(out: Path) -> dict[str, dict[str, Any]]:
    """By side, what the sides of the search have written down."""
    path = out / "searches.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {side["side"]: side for side in map(json.loads, lines)}


@dataclass
class Report:
    """What was found so far. ``write`` puts it into the folder ``out``."""

    out: Path
    rehearsal: bool
    gpus: Sequence[Mapping[str, Any]]
    rows: list[tuple[str, float | None, list[Claim]]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def write(self, unfinished: Sequence[str] = ()) -> list[Claim]:
        """Write the page and the figures. ``unfinished``: the parts that are still to come. Returns what was judged."""
        sides = searches_of(self.out)
        rows = [*self.rows, ("searches", 0.0, judge_searches(sides, self.rehearsal))]
        where = ", ".join(f"{gpu['name']}, driver {gpu['driver']}" for gpu in self.gpus) or "no GPU"
        title = "Rehearsal on cores: nothing was measured" if self.rehearsal else "FluidTune on this GPU"
        about = [
            f"{where}. {machine()}.",
            "",
            SIDES,
            "",
            "`logs` has what each part said; `fluid` and `lanes` have pictures.",
        ]
        missing = not_run(self.rehearsal, len(self.gpus))
        if unfinished:
            missing.insert(0, f"The run had not ended when this was written. To come: {'; '.join(unfinished)}.")
        figures = {"rehearsal": self.rehearsal, "machine": machine(), "gpus": list(self.gpus), **self.figures}
        _replace(self.out / "gpu.json", json.dumps(figures | {"searches": sides}, indent=2) + "\n")
        _replace(self.out / "README.md", page(title, about, rows, missing))
        return [claim for _, _, claims in rows for claim in claims]


def _replace(path: Path, text: str) -> None:
    """Write a file so that whoever reads it finds all of the old text or all of the new."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


def ended_by(number: int, frame: Any) -> None:
    """A signal that ends this process: what runs is killed on the way out, which a signal alone would leave behind."""
    sys.exit(128 + number)


def go_through(found: Sequence[Part], report: Report, budget: float) -> None:
    """Run the parts within ``budget`` seconds, and write the report after each."""
    began = time.monotonic()
    logs = report.out / "logs"
    for at, part in enumerate(found):
        report.write([each.name for each in found[at:]])
        left = budget - (time.monotonic() - began)
        if left < LEAST_S:
            report.rows.append((part.name, None, []))
            continue
        name = part.name.replace(", ", "-")
        outcome = run(part, min(part.limit, left), logs / f"{name}.txt")
        # Of a search that was ended before it removed its own.
        if outcome.status is None and (report.out / RUNS).exists():
            with suppress(OSError, ValueError), open(report.out / "searches.jsonl", "a") as file:
                side = unfinished(part.name.removeprefix("search, "), report.out / RUNS / "search", outcome.seconds)
                file.write(json.dumps(side) + "\n")
        keep_run(report.out / RUNS / "search", logs / name)
        shutil.rmtree(report.out / RUNS, ignore_errors=True)
        try:
            claims = part.judge(outcome)
        except (KeyError, TypeError, ValueError) as error:
            claims = [Claim("the figures of this part can be read", False, repr(error)[:300])]
        report.rows.append((part.name, outcome.seconds, claims))
        report.figures[part.name] = outcome.figures
        say(f"{part.name}: {ended(outcome)} after {outcome.seconds:.0f} s")


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--rehearse", action="store_true", help="on two cores: measures nothing")
    arguments.add_argument("--out", type=Path, default=Path("gpu-report"), help="the folder for all that is found")
    arguments.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all parts")
    arguments.add_argument("--only", nargs="+", metavar="PART", help="parts whose names begin with one of these words")
    options = arguments.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, ended_by)
    gpus = [] if options.rehearse else visible_gpus()
    if not gpus and not options.rehearse:
        sys.exit("no GPU here: NVML finds none; --rehearse goes through the script on two cores")
    out = options.out.resolve()
    shutil.rmtree(out / "logs", ignore_errors=True)
    (out / "logs").mkdir(parents=True)
    (out / "searches.jsonl").unlink(missing_ok=True)
    report = Report(out, options.rehearse, gpus)
    chosen = parts(out, options.rehearse, len(gpus))
    if options.only:
        chosen = [part for part in chosen if part.name.startswith(tuple(options.only))]
    go_through(chosen, report, options.budget)
    claims = report.write()
    say(f"see {out / 'README.md'}")
    sys.exit(1 if any(claim.held is False for claim in claims) else 0)


if __name__ == "__main__":
    main()

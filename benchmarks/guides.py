"""The examples of Ray's documentation for Tune, unedited, under ``fluidtune run`` beside stock Ray Tune.

``python -m benchmarks.guides --json [--only NAME ...] [--ray CHECKOUT] [--keep DIR] [--quick]``.

The scripts are those in ``tune/examples`` of the installed Ray. With ``--ray``, a checkout of Ray's repository,
its notebooks in ``doc/source/tune/examples`` come too: their code cells one after the other. ``--only`` takes names
of these or paths of any other scripts. ``--quick`` runs one script.

Each script runs once under stock and once under FluidTune, with a home directory, temporary files and a Ray cluster of
its own. `guide_hook` gives both sides seeds, and each search eight trials. `guide_outcomes` compares what they leave;
seconds are not compared. Nothing is fetched: the images of MNIST are made up.

``guides`` has by script ``stock`` and ``fluid`` (in words what came of it), ``processes`` by side (in how many
processes the trials ran), ``decides`` (scheduler, search algorithm and ``reuse_actors``, with which less is compared)
and ``differs``. The exit status is 1 if a script differs. ``--table FILE`` prints the table of docs/kinds-of-scripts.md
from such an object. ``--keep`` keeps all that the runs leave, and what they print.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import ray

from benchmarks.common import ROOT, environment, finish, kill_tree, parser, result, say
from benchmarks.guide_outcomes import NOT_ENDED, Outcome, differences, read
from benchmarks.sides import OURS

EXAMPLES = Path(ray.__file__).parent / "tune" / "examples"
#: Side -> what comes before the script on the command line.
COMMANDS = {"stock": [sys.executable], OURS: [sys.executable, "-m", "fluidtune", "run"]}
#: Trials of a search.
TRIALS = 8
#: Searches in which a grid makes several trials of a sample: script -> samples.
SAMPLES = {"lightgbm_example": 4, "tf_mnist_example": 3, "tune_basic_example": 4}
#: Scripts that are not run, each with the reason.
LEFT_OUT = {
    "mnist_ptl_mini": "its data is only on the Hugging Face hub, and it asks Lightning 1 for what 2 has not",
    "mlflow_ptl": "needs mnist_ptl_mini",
    "pbt_dcgan_mnist_func": "fetches a network",
    "pbt_dcgan_mnist_trainable": "fetches a network",
    "pbt_transformers": "fetches a network",
    "pbt_memnn_example": "fetches its data",
    "pbt_tune_cifar10_with_keras": "its trials wait for a GPU",
    "pb2_ppo_example": "needs RLlib",
    "pbt_ppo_example": "needs RLlib",
    "utils": "no script",
}
#: Scripts without the option --smoke-test that want another one to be short, or several ways of running.
ARGUMENTS: dict[str, list[str]] = {}
#: Seconds that a side of a script may take.
LIMIT_S = 600.0
#: What Ray says when its cluster is not there within 30 s. On a busy machine a script is tried again, so many times.
LATE, TRIES = "timed out during startup", 4
#: The script of --quick.
QUICK = "tune_basic_example"


def scripts(checkout: Path | None) -> dict[str, Path]:
    """By name the examples of the installed Ray, and the notebooks of a checkout, which need `code`."""
    found = [each for each in sorted(EXAMPLES.rglob("*.py")) if "__main__" in each.read_text()]
    notebooks = sorted((checkout / "doc/source/tune/examples").rglob("*.ipynb")) if checkout else []
    return {each.stem: each for each in [*notebooks, *found] if each.stem not in LEFT_OUT}


def code(notebook: Path) -> str:
    """The code of a notebook; lines for a shell or for IPython alone are left out."""
    cells = [each for each in json.loads(notebook.read_text())["cells"] if each["cell_type"] == "code"]
    lines = "\n".join("".join(each["source"]) for each in cells).splitlines()
    return "\n".join(re.sub(r"^(\s*)[!%].*", r"\1pass", line) for line in lines) + "\n"


def mnist(directory: Path) -> None:
    """Write made-up images of digits as MNIST's own files, where torchvision does not download them again."""
    directory.mkdir(parents=True)
    random = numpy.random.default_rng(0)
    for name, count in (("train", 2048), ("t10k", 512)):
        labels = random.integers(0, 10, count, dtype=numpy.uint8)
        images = random.integers(0, 64, (count, 28, 28), dtype=numpy.uint8)
        images[numpy.arange(count), labels * 2 + 3] = 255  # a bright row says which digit it is
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            shape = struct.pack(f">{values.ndim}I", *values.shape)
            content = struct.pack(">HBB", 0, 8, values.ndim) + shape + values.tobytes()
            (directory / f"{name}-{kind}-ubyte").write_bytes(content)
            (directory / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content, 1))


def run(name: str, script: Path, side: str, keep: Path | None, limit: float) -> Outcome:
    """Run a script on a side, to its end or for ``limit`` seconds, and say what it has left."""
    # The name is short because the path of a Unix socket, such as Ray's, has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gd-", ignore_cleanup_errors=True) as temporary:
        directory = Path(temporary)
        home, notes, printed = directory / "home", directory / "home" / "notes", directory / "home" / "printed"
        mnist(home / "data" / "MNIST" / "raw")
        if script.suffix == ".ipynb":
            file = directory / f"{script.stem.replace('-', '_')}.py"
            file.write_text(code(script))
        else:
            file = script
        environ = environment() | {
            "HOME": str(home),
            "TMPDIR": temporary,
            "RAY_TMPDIR": temporary,
            "RAY_USAGE_STATS_ENABLED": "0",
            "WANDB_MODE": "offline",
            "HF_HUB_OFFLINE": "1",
            "MLFLOW_ALLOW_FILE_STORE": "true",
            # The examples with TensorFlow are written for Keras 2.
            **({"TF_USE_LEGACY_KERAS": "1"} if importlib.util.find_spec("tf_keras") else {}),
            "GUIDE_SAMPLES": str(SAMPLES.get(name, TRIALS)),
            "GUIDE_NOTES": str(notes),
        }
        environ["PYTHONPATH"] = f"{ROOT / 'benchmarks' / 'guide_hook'}:{environ['PYTHONPATH']}"
        command = [*COMMANDS[side], str(file), *ARGUMENTS.get(name, ["--smoke-test"])]
        with printed.open("w") as output:
            process = subprocess.Popen(
                command, cwd=home, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(limit)
            except BaseException as error:
                kill_tree(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status = NOT_ENDED
        outcome = read(home, status, printed.read_text(errors="replace"), notes)
        if keep is not None:
            place = keep / f"{name}.{side}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(home, place, symlinks=True, ignore=shutil.ignore_patterns("MNIST", "*.sock"))
        return outcome


def trials(outcome: Outcome) -> list[dict[str, Any]]:
    """All trials of a run."""
    return [trial for of in outcome["experiments"].values() for trial in of.values()]


def words(outcome: Outcome) -> str:
    """What came of a run, in words."""
    ran = trials(outcome)
    said = f"{len(ran)} trials, {sum(len(trial['reports']) for trial in ran)} reports"
    errors = [trial["error"] for trial in ran if trial["error"] is not None]
    if errors:
        said += f", {len(errors)} failed ({'; '.join(sorted(set(errors)))[:160]})"
    if outcome["status"] == NOT_ENDED:
        return f"not ended; {said}"
    if outcome["status"]:
        return f"{said + '; ' if ran else ''}ends with {outcome['error'] or outcome['status']}"
    return said


def compared(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """The figures of a script, its outcomes by side; the first paragraphs name them."""
    stock = outcomes["stock"]
    processes = {
        side: len({pid for trial in trials(outcome) for pid in trial["processes"]})
        for side, outcome in outcomes.items()
    }
    return {
        **{side: words(outcome) for side, outcome in outcomes.items()},
        "processes": processes,
        "decides": [
            *(stock[each] for each in ("scheduler", "searcher") if stock[each]),
            *["reuse_actors"] * stock["kept"],
        ],
        "differs": differences(outcomes[OURS], stock),
    }


def measured(name: str, script: Path, keep: Path | None, limit: float) -> dict[str, Any]:
    """Run a script on both sides, and compare."""
    outcomes = {}
    for side in COMMANDS:
        for _ in range(TRIES):
            outcomes[side] = run(name, script, side, keep, limit)
            if LATE not in (outcomes[side]["error"] or ""):
                break
        say(f"{name}, {side}: {words(outcomes[side])}")
    found = compared(outcomes)
    for line in found["differs"]:
        say(f"  differs: {line}")
    return found


def table(figures: dict[str, Any]) -> str:
    """The table of the docs, from the object that the command prints."""
    rows = ["| script | decides beside chance | under stock | under FluidTune | processes | differs |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for name, of in sorted(figures["guides"].items()):
        ours = "the same" if of[OURS] == of["stock"] else of[OURS]
        cells = [f"`{name}`", ", ".join(of["decides"]), of["stock"], ours]
        cells += [f"{of['processes'][OURS]}, stock {of['processes']['stock']}", "; ".join(of["differs"]) or "nothing"]
        rows.append("| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    options = parser("The examples of Ray's documentation for Tune under FluidTune and under stock Ray Tune.")
    options.add_argument("--only", nargs="+", metavar="NAME", help="scripts by name, or paths of others (all)")
    options.add_argument("--ray", type=Path, metavar="CHECKOUT", help="a checkout of Ray, for its notebooks")
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep there what the runs leave and print")
    options.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds of a side of a script ({LIMIT_S:.0f})")
    options.add_argument("--table", type=Path, metavar="FILE", help="print the docs' table of such an object")
    args = options.parse_args()
    if args.table is not None:
        print(table(json.loads(args.table.read_text())), end="")
        return
    known = scripts(args.ray)
    names = args.only or ([QUICK] if args.quick else list(known))
    chosen = {Path(name).stem: known.get(name) or Path(name).resolve() for name in names}
    for path in chosen.values():
        if not path.is_file():
            options.error(f"there is no {path}, and no example of that name: {', '.join(known)}")
    guides = {name: measured(name, path, args.keep, args.limit) for name, path in chosen.items()}
    finish(result("guides", "cpu:2", "real", ray=ray.__version__, guides=guides, left_out=LEFT_OUT), args.json)
    if any(of["differs"] for of in guides.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()

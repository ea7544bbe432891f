"""The `fluidtune` command: arguments in, calls out, errors as one line.

Decides nothing but how an argument is read. What a command does is in tune/launcher.py (run), tune/api.py (continue),
steering (trial), report (report, top, why), view (view), commands (plan, doctor, docs), slurm (slurm),
themis_bridge/shell/control.py (arbiter) and serving (serve).
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from click.core import ParameterSource

from fluidtune.error_lines import failure
from fluidtune.errors import FluidTuneError
from fluidtune.tune.launcher import run_script
from fluidtune.tune.run_options import OPTIONS


class _OptionOf(click.Option):
    """An option that only one form of its command reads. ``form``: what is given in that form, such as "--find"."""

    def __init__(self, *args: Any, form: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.form = form


def _refuse_unread(*forms: str) -> None:
    """FluidTuneError if the command got an option that its present form does not read. ``forms``: what it was given."""
    context = click.get_current_context()
    for option in context.command.params:
        if isinstance(option, _OptionOf) and option.form not in forms:
            name = str(option.name)
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                value = "" if option.is_flag or option.multiple else f" {context.params[name]}"
                raise FluidTuneError(f"{option.opts[0]}{value} is for {option.form}; leave it out")


#: The form of `serve start` and `serve plan` for several models, and that of `serve plan` for a run; and their options.
_MODELS, _SOURCE = "--models FILE", "SOURCE"
_models_option = partial(click.option, cls=_OptionOf, form=_MODELS)
_run_option = partial(click.option, cls=_OptionOf, form=_SOURCE)
_clone_option = partial(click.option, cls=_OptionOf, form="clone")


_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object (docs/agents.md).")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fluidtune")
@click.pass_context
def cli(context: click.Context) -> None:
    """Run Ray Tune scripts so that trials share devices when they are many and spread when they are few."""
    # Names and errors in a log may have what a terminal cannot show, such as half of a character. What `run` prints is
    # the script's.
    if context.invoked_subcommand != "run" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run_options(command: click.Command) -> click.Command:
    for names, kind, text in OPTIONS:
        settings = {"is_flag": True, "default": "/" in names} if kind is bool else {"type": kind}
        command.params.insert(-2, click.Option([names], help=text, **settings))
    return command


# What follows the script is the script's own, options included.
@_run_options
@cli.command(context_settings={"allow_interspersed_args": False})
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(script: str, args: tuple[str, ...], **settings: Any) -> None:
    """Run SCRIPT, an unmodified Ray Tune script, with its ARGS, as `python SCRIPT ARGS` does.

    SCRIPT is a file; with -m a module; "-" is the standard input. What follows it is its own, options included.
    """
    run_script([script, *args], {name: value for name, value in settings.items() if value is not None})


@cli.command("continue")
@click.argument("run_dir")
@click.option("--samples", type=int, help="The number of further samples.")
@click.option("--until", multiple=True, metavar="NAME=NUMBER", help="Train on: training_iteration=200, for example.")
@click.option("--resume-errored", is_flag=True, help="Trials that have failed go on, too.")
def go_on(run_dir: str, samples: int | None, until: tuple[str, ...], resume_errored: bool) -> None:
    """Go on with the ended search in RUN_DIR: further samples, and trials that train on to a larger limit.

    The trainable is the one that RUN_DIR keeps (docs/how-to/continue.md).
    """
    try:
        limits = {name: float(number) for name, number in (pair.split("=") for pair in until)}
    except ValueError:
        raise FluidTuneError(f"--until {' --until '.join(until)}: expected NAME=NUMBER, as training_iteration=200")
    from fluidtune.tune.api import Tuner

    tuner = Tuner.extend(run_dir, num_samples=samples, until=limits, resume_errored=resume_errored)
    sys.argv[0] = tuner.script  # workers look for modules in this script's folder
    tuner.fit()


@cli.command()
@click.argument("run_dir", required=False)
@click.option("--html", default=None, metavar="FILE", help="Also write the page of `fluidtune view` as one file.")
@_json_option
def report(run_dir: str | None, html: str | None, as_json: bool) -> None:
    """Summarise the run, or the service, whose event log is in RUN_DIR and draw its pictures.

    Without RUN_DIR: the newest run in ~/ray_results.
    """
    from rich.console import Console

    from fluidtune.report import find_log, read_events, render, summarise, write_report
    from fluidtune.report.json_text import plain_json
    from fluidtune.report.serving_report import is_serving, render_serving, serving_png, summarise_serving
    from fluidtune.report.summary import left_out

    log = find_log(run_dir, newest=run_dir is None)
    console = Console()
    events = read_events(log)
    if is_serving(events):
        if html is not None:
            raise FluidTuneError(f"--html {html}: {run_dir} is the log of a service; give the run that it serves")
        if as_json:
            raise FluidTuneError(f"{run_dir} is the log of a service; type: fluidtune serve status --json")
        console.print(render_serving(summarise_serving(events)))
        if events.dropped:
            console.print(f"event log: {left_out(events.dropped)}")
        _write(lambda: [serving_png(events, log.parent / "serving.png")])
        return
    summary = summarise(events)
    click.echo(plain_json(summary.as_dict())) if as_json else console.print(render(summary))
    _write(lambda: write_report(log)[:2], apart=as_json)
    if html is not None:
        from fluidtune.view.page_file import write_page

        _write(lambda: [write_page(log, html)], apart=as_json)


def _write(files: Callable[[], Iterable[Path]], apart: bool = False) -> None:
    """Write files beside what was printed, and say where they are. Exit status 1 where that cannot be done.

    apart: say so on stderr, because what was printed is for a program.
    """
    try:
        paths = list(files())
    except OSError as error:
        click.echo(f"fluidtune: not all files of this command could be written: {error}", err=True)
        sys.exit(1)
    for path in paths:
        click.echo(f"wrote {path}", err=apart)


@cli.command()
@click.argument("run_dir", required=False)
@_json_option
def top(run_dir: str | None, as_json: bool) -> None:
    """Watch a run, or a service, while it goes on: its devices, its trials, and what went wrong.

    RUN_DIR is its directory, or the one above, whose newest run is shown. Without it: the newest in ~/ray_results. In a
    terminal, a run that has not begun is waited for.
    """
    from rich.console import Console

    from fluidtune.report.json_text import versioned
    from fluidtune.report.log_tail import awaited
    from fluidtune.report.run_logs import find_log
    from fluidtune.report.top import watch
    from fluidtune.view.followed_run import FollowedRun

    if as_json:
        click.echo(versioned(FollowedRun(find_log(run_dir, newest=True)).as_dict()))
    else:
        watch(awaited(lambda: find_log(run_dir, newest=True), click.echo, sys.stdout.isatty()), Console())


@cli.command()
@click.argument("run_dir", metavar="[RUN_DIR|STORAGE]", required=False)
@click.option("--port", type=int, default=0, help="The port of its address.  [a free one]")
@click.option("--steer", is_flag=True, help="Whoever has the printed address can steer searches run with --steer.")
def view(run_dir: str | None, port: int, steer: bool) -> None:
    """Show a run, or all runs directly in a directory, on a page in the browser, while they go on and afterwards.

    Without a directory: the runs in ~/ray_results. The page is served on this machine alone, until Ctrl-C. In a
    terminal, a run that has not begun is waited for.
    """
    from fluidtune.report.log_tail import awaited
    from fluidtune.report.summary import plural
    from fluidtune.view.run_list import RunList

    runs = awaited(lambda: RunList(run_dir), click.echo, sys.stdout.isatty())
    try:
        from fluidtune.view.page_server import serve_page
    except ModuleNotFoundError as error:
        raise FluidTuneError(f'there is no {error.name}; for `fluidtune view` type: pip install "fluidtune[view]"')
    serve_page(
        runs, port, steer, lambda url: click.echo(f"{url} shows {plural(len(runs.logs()), 'run')}; Ctrl-C ends it")
    )


@cli.command()
@click.argument("act", type=click.Choice(["stop", "keep", "clone"]))
@click.argument("run_dir")
@click.argument("trial")
@_clone_option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="clone: another value, as JSON.")
@_clone_option("--from-checkpoint", is_flag=True, help="clone: go on from TRIAL's last checkpoint.  [from the start]")
@_json_option
def trial(act: Any, run_dir: str, trial: str, pairs: tuple[str, ...], from_checkpoint: bool, as_json: bool) -> None:
    """Steer TRIAL of a search that was started with --steer, while it runs (docs/how-to/steer.md).

    stop: end it at its next result. keep: let it go on when the algorithm wants to stop it. clone: add a trial with its
    parameters, but for those that are set. RUN_DIR is the directory of its run. TRIAL is its id, the beginning or the
    end of its id, such as 8, or its name.
    """
    from fluidtune.report.json_text import versioned
    from fluidtune.steering.asking import ask

    _refuse_unread(act)
    try:
        said = ask(run_dir, act, trial, pairs, from_checkpoint)
        click.echo(versioned({"done": True, "text": said}) if as_json else said)
    except FluidTuneError as error:
        if not as_json:
            raise
        # Any other kind of error says that nothing was done.
        click.echo(versioned({"done": None if type(error) is FluidTuneError else False, "text": str(error)}))
        sys.exit(2)


@cli.command()
@click.argument("run_dir", nargs=-1, metavar="[RUN_DIR]")
@click.argument("trial")
@_json_option
def why(run_dir: tuple[str, ...], trial: str, as_json: bool) -> None:
    """Tell the story of TRIAL: where it ran, each change of its width and why, what went wrong, and its end.

    RUN_DIR is the directory of its run. Without it: the newest in ~/ray_results. TRIAL is its id, the beginning or the
    end of its id, such as 8, or its name.
    """
    from fluidtune.report.fold import fold_of
    from fluidtune.report.json_text import versioned
    from fluidtune.report.run_logs import find_log
    from fluidtune.report.story import story_of
    from fluidtune.report.summary import left_out
    from fluidtune.report.terminal_text import printable
    from fluidtune.report.trial_lookup import find_trial

    if len(run_dir) > 1:
        raise FluidTuneError(f"expected RUN_DIR and TRIAL, got {len(run_dir) + 1} words")
    fold = fold_of(find_log(run_dir[0] if run_dir else None, newest=not run_dir))
    found = find_trial(fold, trial)
    story = story_of(fold, found)
    if as_json:
        return click.echo(versioned({"trial": found, **story.as_dict(), "dropped_lines": fold.dropped}))
    click.echo("\n".join(map(printable, story.lines())))
    if fold.dropped:
        click.echo(f"event log: {left_out(fold.dropped)}")


@cli.command()
@click.argument("source")
@click.option("--devices", "sizes", default="1,2,4,8,16", help="Numbers of devices to plan for, separated by commas.")
@click.option("--trials", type=int, default=None, help="With a profile: number of equal trials (27).")
@click.option("--iterations", type=int, default=None, help="With a profile: iterations of each trial (27).")
@click.option("--out", default="plan.png", help="Path of the picture.")
@_json_option
def plan(source: str, sizes: str, trials: int | None, iterations: int | None, out: str, as_json: bool) -> None:
    """Predict a job at other numbers of devices. SOURCE is the directory of a run, or a profile's file."""
    from rich.console import Console

    from fluidtune.commands.plan import counts_held, job_of, plan_png, render_plan
    from fluidtune.report.json_text import versioned
    from fluidtune.twin import forecast

    counts = sorted(set(device_counts(sizes)))
    job = job_of(source, trials, iterations)
    held = counts_held(job, counts)
    found = [forecast(job, count) for count in held]
    left_out = [each for each in counts if each not in held]
    if as_json:
        forecasts = [vars(each) for each in found]
        click.echo(
            versioned({"trials": len(job.trials), "of": job.profile.name, "forecasts": forecasts, "left_out": left_out})
        )
    else:
        Console().print(render_plan(job, found))
        if left_out:
            click.echo(f"left out, as a trial needs more: {', '.join(map(str, left_out))}")
    _write(lambda: [plan_png(job, found, out)], apart=as_json)


def device_counts(sizes: str) -> list[int]:
    """The numbers of devices that ``--devices`` lists."""
    from fluidtune.serving.capacity import MOST_DEVICES

    words = [word.strip() for word in sizes.split(",")]
    counts = [int(word) for word in words if re.fullmatch(r"[0-9]{1,9}", word) and 0 < int(word) <= MOST_DEVICES]
    if len(counts) != len(words):
        said = f"whole numbers of 1 to {MOST_DEVICES}, for example 1,2,4,8,16"
        raise FluidTuneError(f"--devices {sizes!r} is not a list of {said}")
    return counts


@cli.command()
@_json_option
def doctor(as_json: bool) -> None:
    """Say which of the things that FluidTune needs or can use are there, and what to type if one is missing.

    "ok": it is there. "--": it is not, and jobs run without it. "MISS": something is to be done, and the exit status
    is 1.
    """
    from fluidtune.commands.doctor import checks
    from fluidtune.report.json_text import versioned

    found = []
    for name, good, text in checks():
        found.append({"name": name, "found": good, "text": text})
        if not as_json:
            click.echo(f"{'--  ' if good is None else 'ok  ' if good else 'MISS'}  {name}: {text}")
    if as_json:
        click.echo(versioned({"checks": found}))
    sys.exit(1 if any(check["found"] is False for check in found) else 0)


class _AllWords(click.Command):
    """A command that gets all words after its name as they are, "--" too, in ``words``."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        asks = not args or args[0] in ("-h", "--help")
        context.params["words"] = tuple(args)
        return super().parse_args(context, ["--help"]) if asks else []


@cli.command(cls=_AllWords, options_metavar="[--print] [--notice SECONDS] [--elastic JOBS] [SBATCH OPTIONS]")
@click.argument("words", nargs=-1, metavar="SCRIPT [-- ARGS]")
def slurm(words: tuple[str, ...]) -> None:
    """Submit SCRIPT as a Slurm job; its trials run on all nodes of the job (docs/how-to/slurm.md).

    The words before the first option, and those after "--", are those of `fluidtune run`. The others are sbatch's, but
    for three. --print: print the job script and submit nothing. --notice: seconds before the time limit at which the
    search writes its state, to be requeued (60). --elastic: as many jobs of an array join one search.
    """
    from fluidtune.slurm.job import submitted
    from fluidtune.slurm.submission import END_S, script, submission
    from fluidtune.tune.run_options import read

    asked = submission(words)
    found = read(list(asked.run))
    if found is None:
        raise FluidTuneError(
            f"no script in {' '.join(words)!r}; type: fluidtune slurm SCRIPT [SBATCH OPTIONS] [-- ARGS]"
        )
    named = found[0][0]
    if "m" not in found[1] and not os.path.exists(named):
        raise FluidTuneError(f"there is no script {named!r}; give the path of a Python file")
    given, leaves = found[1].get("notice_s"), asked.notice_s - END_S
    if isinstance(given, float) and given > leaves:
        longer = f"of --notice {asked.notice_s} the driver has {leaves} s; give a longer --notice"
        raise FluidTuneError(f"--notice-s {given:g}: {longer}")
    text = script(asked, os.path.basename(named.rstrip("/")), sys.executable)
    if asked.shown:
        return click.echo(text, nl=False)
    job = submitted(text)
    click.echo(f"job {job} is submitted; `squeue --jobs {job} --start` says when it begins, or what it waits for")


@cli.group()
def node() -> None:
    """Start a node of a Ray cluster on which the processes of trials start sooner."""


@node.command("start", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def node_start(options: tuple[str, ...]) -> None:
    """Do what `ray start` does with these OPTIONS; trials' processes start in a quarter of the time there."""
    from fluidtune.cluster.forks.quick_nodes import start_node

    start_node(options)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, metavar="[PAGE|WORD ...]", type=click.UNPROCESSED)
def docs(words: tuple[str, ...]) -> None:
    """Show a page of the documentation, or the sections that have all WORDs. Without words: list the pages.

    The pages are those of this version; no network is needed.
    """
    from rich.console import Console

    from fluidtune.commands.docs import Page, told

    Console().print(Page(told(words), hyperlinks=False))


@cli.group()
@click.option("--address", default="auto", show_default=True, help="Address of the Ray cluster.")
@click.pass_context
def arbiter(context: click.Context, address: str) -> None:
    """The arbiter, which leases the devices of one Ray cluster to several jobs."""
    context.obj = address


def _connect(address: str) -> None:
    """Connect to the Ray cluster. Commands do so themselves, since their groups run before a command's ``--help``."""
    from fluidtune.ray_compat.cluster_address import join

    if not join(address):
        raise FluidTuneError("there is no Ray cluster here; start one with: ray start --head")


@arbiter.command()
@click.option(
    "--unit", type=click.Choice(["GPU", "CPU"]), help="The kind of device that is leased.  [GPU if there are any]"
)
@click.option("--lease", "lease_s", type=float, help="Seconds that a lease lasts.  [600]")
@click.option("--notice", "notice_s", type=float, help="Seconds from settling a lease's successor to its end.  [30]")
@click.option("--f", type=float, help="The worst 1 - f of the apps bid.  [0.8]")
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="USER=N",
    help="The most devices that a user's jobs hold together; USER=none: any number.",
)
@click.option(
    "--weight", "weights", multiple=True, metavar="USER=X", help="A factor on the rho of a user's jobs; USER=none: 1."
)
@click.option(
    "--reserve", "reserves", multiple=True, metavar="JOB=N", help="Devices that no auction takes; JOB=none: 0."
)
@click.option(
    "--half-life", "half_life_s", type=float, help="Seconds after which past usage counts half.  [0: never counts]"
)
@click.option("--most-demand", type=float, help="Refuse apps while others want this many times all GPUs.  [0: none]")
@click.pass_obj
def start(
    address: str,
    unit: str | None,
    quotas: tuple[str, ...],
    weights: tuple[str, ...],
    reserves: tuple[str, ...],
    **settings: float | None,
) -> None:
    """Start the arbiter, or change the settings of the running one."""
    changes: dict[str, object] = {name: value for name, value in settings.items() if value is not None}
    given = {
        "quotas": _numbers("--quota", "USER", quotas, int),
        "weights": _numbers("--weight", "USER", weights, float),
        "reserves": _numbers("--reserve", "JOB", reserves, int),
    }
    changes |= {name: numbers for name, numbers in given.items() if numbers}
    with _control(address) as control:
        running = control.find() is not None
        if running:
            control.change(unit, changes)
        else:
            control.start(unit, **changes)
        users = {app["user"] for app in control.status()["apps"].values()}
    nobody = sorted({*given["quotas"], *given["weights"]} - users)
    if nobody:
        click.echo(f"no job now is of {', '.join(nobody)}; users with jobs: {', '.join(sorted(users)) or 'none'}")
    new = "; it has the new settings" if changes else ""
    click.echo(f"the arbiter was running{new}" if running else "the arbiter runs")


@contextmanager
def _control(address: str) -> Iterator[ModuleType]:
    """`themis_bridge.shell.control` for the cluster at ``address``. What the arbiter or Ray refuses is one line."""
    _connect(address)
    from ray.exceptions import RayError

    from themis_bridge import ThemisError
    from themis_bridge.shell import control

    try:
        yield control
    except ThemisError as error:
        # Ray wraps an actor's exception in its own, whose text contains the traceback. `cause` is the original.
        raise FluidTuneError(str(getattr(error, "cause", error))) from None
    except RayError as error:
        raise FluidTuneError(f"the arbiter does not answer ({failure(error)}); try again") from None


def _numbers(option: str, of: str, pairs: Iterable[str], read: Callable[[str], float]) -> dict[str, float | None]:
    """What NAME=NUMBER says, for each of the pairs; NAME=none is None. ``of``: whose name it is, in words."""
    numbers: dict[str, float | None] = {}
    for pair in pairs:
        name, _, text = pair.rpartition("=")
        try:
            numbers[name] = None if text == "none" else read(text)
        except ValueError:
            number = "a whole number" if read is int else "a number"
            raise FluidTuneError(f"{option} {pair}: expected {of}=N, with {number}, or {of}=none")
    return numbers


@arbiter.command()
@click.option("--json", "as_json", is_flag=True, help="The whole status as one JSON object.")
@click.pass_obj
def status(address: str, as_json: bool) -> None:
    """Show apps, their rho and their leases."""
    import json

    from fluidtune.report.terminal_text import printable
    from themis_bridge.settings import Settings

    with _control(address) as control:
        found = control.status()
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(
        f"{found['leased']} of {found['gpus']} {found['unit']}s leased, {found['rounds']} rounds, "
        f"the last one took {found['round_seconds']:.2f} s"
    )
    defaults = vars(Settings())
    changed = [f"{name} {value}" for name, value in found["settings"].items() if value != defaults[name]]
    lines = [f"  settings: {', '.join(changed) or 'the defaults'}"]
    lines += [f"  trouble: {trouble}" for trouble in found["trouble"]]
    lines += [line for name, app in found["apps"].items() for line in app_lines(name, app, found["unit"])]
    for line in lines:
        click.echo(printable(line))


def app_lines(name: str, app: dict[str, Any], unit: str) -> list[str]:
    """One app of the arbiter's status; ``unit``: what is leased."""
    rho = "no rho" if app["rho"] is None else f"rho {app['rho']:.2f} with {app['rho_gpus']} at its last report"
    hosts = ", ".join(f"{count} on {host}" for host, count in app["hosts"].items())
    at_once = f", {app['together']} at once" if app["together"] > 1 else ""
    line = (
        f"  {name}: {len(app['leases'])} of {app['demand']} {unit}s{f' ({hosts})' if hosts else ''}{at_once}, {rho}, "
        f"user {app['user']}, weight {app['weight']:g}, doubt {app['doubt']:.2f}, {app['age']:.0f} s old"
    )
    return [line, f"    waits: {app['waits']}"] if app["waits"] else [line]


@arbiter.command()
@click.pass_obj
def stop(address: str) -> None:
    """End all leases and the arbiter. Jobs that share the cluster start a new one."""
    with _control(address) as control:
        stopped = control.stop()
    again = "stopped; jobs that run with --shared start a new one, with the default settings"
    click.echo(again if stopped else "there was none")


@cli.group()
@click.option("--address", default="auto", show_default=True, help="Address of the Ray cluster.")
@click.option("--user", default=None, help="Act for this user.  [that of the job]")
@click.pass_context
def serve(context: click.Context, address: str, user: str | None) -> None:
    """The best trials of a finished run, answering requests over HTTP (docs/serving.md)."""
    context.obj = address, user


_service_name = click.option("--name", default=None, help="Of the service.  [the only one, of your own if any]")


def _service(where: tuple[str, str | None], name: str | None, changes: bool = False) -> Any:
    """The service of this name in the cluster at an address, and for a user."""
    _connect(where[0])
    from fluidtune.serving.running_services import find

    return find(name, where[1], changes)


def _again(where: tuple[str, str | None], service: Any, command: str) -> str:
    """The command that acts on the same service, as a shell takes it."""
    given = {"--address": where[0] if where[0] != "auto" else None, "--user": where[1]}
    group = [word for option, value in given.items() if value is not None for word in (option, value)]
    return shlex.join(["fluidtune", "serve", *group, command, "--name", service.name])


@serve.command("start")
@click.argument("run_dir", required=False)
@click.option("--load", default=None, metavar="MODULE:FUNCTION", help="load(checkpoint_directory, config) -> model.")
@click.option("--slo", type=float, default=None, help="Seconds within which a request is answered, or refused.")
@click.option("--models", default=None, metavar="FILE", help="Serve the models in this TOML file (docs/placement.md).")
@_models_option("--gpus", type=int, default=None, help='With --models: the number of GPUs, as --devices "gpu:N".')
@_models_option("--gpu-memory", "--memory", "memory", type=float, help="With --models: GiB on a device.  [no limit]")
@_models_option("--seconds", "search_s", default=10.0, show_default=True, help="With --models: a search ends then.")
@click.option("--top", type=int, default=1, show_default=True, help="How many trials, the best ones.")
@click.option("--devices", default=None, help='"cpu:N" or "gpu:N": N devices, N at most if --shared.  [one; any]')
@click.option("--metric", default=None, help="By which trials are ranked.  [the run's]")
@click.option("--mode", default=None, help='"min" or "max".  [the run\'s]')
@click.option("--starts", default="eager", show_default=True, help='When a batch starts: or "deferred".')
@click.option("--batching", default="auto", show_default=True, help='Or "window"; "orloj": times vary by the input.')
@click.option("--max-batch", type=int, default=64, show_default=True, help="No larger batch is formed.")
@click.option("--max-body", type=int, default=None, help="Bytes of a request's body.  [64 samples, 1 MiB at least]")
@click.option("--beside", is_flag=True, help="Take turns on one core with a search. May change.")
@click.option("--shared", is_flag=True, help="Lease devices from the cluster's arbiter, beside other jobs.")
@click.option("--follow", type=float, metavar="SECONDS", help="Deploy what a running search finds. May change.  [no]")
@click.option("--stages", type=int, default=1, show_default=True, help="Processes of a model that is cut. May change.")
@click.option("--stage-memory", type=float, metavar="GIB", help="Weights of a stage at most. May change.  [any]")
@click.option("--fork-server/--no-fork-server", default=True, help="Fork new processes from one with the packages.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where it listens.")
@click.option("--port", type=int, default=8000, show_default=True)
@click.option("--token", type=click.File(), default=None, help="Who asks has what this file holds.  [anybody may ask]")
@click.option("--no-token", is_flag=True, help="Where other machines reach HOST, all of them may ask.")
@click.option("--cors", multiple=True, metavar="ORIGIN", help="Pages of this origin may ask.  [none]")
@click.option("--name", default=None, help="Of the service, which no other one has.  [the run's]")
@click.pass_obj
def serve_start(
    where: Any, run_dir: str | None, load: str | None, shared: bool, token: Any, gpus: int | None, **settings: Any
) -> None:
    """Serve the best trials of the run in RUN_DIR, until `fluidtune serve stop`.

    With --models FILE instead of RUN_DIR, --load and --slo: serve several models, of which each device holds some.
    """
    if settings["models"] is None and None in (run_dir, load, settings["slo"]):
        raise FluidTuneError("give RUN_DIR, --load and --slo, or --models FILE")
    _refuse_unread(*([] if settings["models"] is None else [_MODELS]))
    if gpus is not None and settings["devices"] is not None:
        raise FluidTuneError(f"--gpus {gpus} is in place of --devices; leave one of the two out")
    if gpus is not None:
        settings["devices"] = f"gpu:{gpus}"
    sys.path.insert(0, "")  # As for a script: modules are looked for in the current directory, too.
    from fluidtune.report.terminal_text import printable
    from fluidtune.serving.service import check_installed, loader, serve

    check_installed()
    _connect(where[0])
    secret = token.read().strip() if token is not None else None
    found = loader(load) if load is not None else None
    served = serve(run_dir, found, arbiter="auto" if shared else None, token=secret, user=where[1], **settings)
    names = printable(", ".join(served.trials))
    if settings["models"] is not None:
        click.echo(f"models {names}: POST an input to {served.url}MODEL")
    else:
        click.echo(f"trial {names}: POST an input to {served.url}, or to {served.url}TRIAL")
    log = served.status()["log"]
    click.echo(
        f"events and profiles: {log}" if log else "events are kept nowhere: the head node has not this directory"
    )


@serve.command("status")
@_service_name
@click.option("--json", "as_json", is_flag=True, help="The whole status as one JSON object.")
@click.option("--picture", default=None, metavar="FILE", help="Draw the batches of the last minute, as PNG.")
@click.pass_obj
def serve_status(where: Any, name: str | None, as_json: bool, picture: str | None) -> None:
    """Show what is served, and what became of the requests."""
    import json

    service = _service(where, name)
    from fluidtune.serving.running_services import status_text

    found = service.status()
    click.echo(json.dumps(found) if as_json else status_text(found))
    if picture is not None:
        _write(lambda: [service.picture(picture)], apart=as_json)


def _share(context: Any, option: Any, text: str) -> float:
    """The part of 1 that a percentage is."""
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not text.endswith("%") or not 0 < percent <= 100:
        raise click.BadParameter(f"{text!r} is no share of the requests; expected one such as 10%")
    return percent / 100


@serve.command("deploy")
@click.argument("run_dir")
@click.option("--trial", default=None, help="The id of the trial.  [the best one]")
@click.option("--canary", default="100%", metavar="10%", callback=_share, help="The share of the requests at first.")
@click.option("--metric", default=None, help="By which trials are ranked.  [the run's]")
@click.option("--mode", default=None, help='"min" or "max".  [the run\'s]')
@_service_name
@click.pass_obj
def serve_deploy(where: Any, name: str | None, run_dir: str, **asked: Any) -> None:
    """Load another checkpoint beside the one that serves, measure it, and move the requests over to it."""
    if asked["trial"] is not None and asked["mode"] is not None:
        raise FluidTuneError(f"--mode {asked['mode']} ranks trials, and --trial names one; leave one of the two out")
    service = _service(where, name, changes=True)
    from fluidtune.report.terminal_text import printable

    found = service.deploy(run_dir, **asked)
    said = "all requests go to it; the version before is kept"
    if found["state"] == "canary":
        said = f"{100 * found['share']:g} % of the requests go to it; all with: {_again(where, service, 'promote')}"
    back = _again(where, service, "rollback")
    click.echo(printable(f"version {found['version']} (trial {found['trial']}): {said}; back with: {back}"))


@serve.command("promote")
@_service_name
@click.pass_obj
def serve_promote(where: Any, name: str | None) -> None:
    """Let the canary answer all requests. The version before is kept."""
    service = _service(where, name, changes=True)
    service.promote()
    click.echo(f"the canary answers all requests; the version before is kept: {_again(where, service, 'rollback')}")


@serve.command("rollback")
@_service_name
@click.pass_obj
def serve_rollback(where: Any, name: str | None) -> None:
    """Put the version before the last deploy back, also while that one loads, or is a canary."""
    service = _service(where, name, changes=True)
    from fluidtune.report.terminal_text import printable

    service.rollback()
    found = service.status()["trials"][0]
    click.echo(f"version {found['version']} (trial {printable(found['trial'])}) answers all requests")


@serve.command("plan")
@click.argument("source", required=False)
@click.option("--rate", type=float, default=None, help="Requests per second, of all trials together.")
@click.option("--slo", type=float, default=None, help="Seconds within which a request is answered, or refused.")
@_run_option("--devices", "sizes", default="1,2,4,8", show_default=True, help="Numbers of devices to look at, too.")
@_run_option("--starts", default="eager", show_default=True, help='When a batch starts: or "deferred".')
@click.option("--models", default=None, metavar="FILE", help="Place the models in this TOML file (docs/placement.md).")
@_models_option("--gpus", type=int, default=None, help="With --models: the number of GPUs.")
@_models_option("--find", is_flag=True, help="With --models: find the least number of GPUs instead.")
@click.option(
    "--attainment",
    cls=_OptionOf,
    form="--find",
    type=float,
    default=None,
    help="With --find: the part within its SLO.  [0.99]",
)
@_models_option("--gpu-memory", type=float, default=None, help="With --models: GiB of weights on a GPU.  [no limit]")
@_models_option("--seconds", type=float, default=60.0, show_default=True, help="With --models: the search ends then.")
@_models_option("--json", "as_json", is_flag=True, help="With --models: the plan as one JSON object.")
def serve_plan(
    source: str | None,
    rate: float | None,
    slo: float | None,
    sizes: str,
    starts: str,
    models: str | None,
    gpus: int | None,
    find: bool,
    attainment: float | None,
    gpu_memory: float | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Predict how many devices a rate needs. SOURCE is the directory of a run that was served, or its profiles.json.

    With --models instead of SOURCE: predict which of many models should stand on which GPUs.
    """
    from rich.console import Console

    if models is not None:
        import json

        from fluidtune.serving import model_placement

        if source is not None or rate is not None or slo is not None:
            raise FluidTuneError("the file of --models has runs, rates and SLOs; leave out SOURCE, --rate and --slo")
        if (gpus is None) != find:
            raise FluidTuneError("with --models, give either --gpus N or --find")
        _refuse_unread(_MODELS, *(["--find"] if find else []))
        planned, shown = model_placement.planned(models, gpus, gpu_memory, attainment, seconds)
        if as_json:
            click.echo(json.dumps(planned))
        else:
            Console().print(shown)
        return
    from fluidtune.serving import capacity

    _refuse_unread(_SOURCE)
    if source is None or rate is None or slo is None:
        raise FluidTuneError("give SOURCE, --rate and --slo, or --models FILE")
    served = capacity.models_of(source, slo, starts)
    needed = capacity.devices_for(served, rate)
    found = [capacity.forecast(served, count, rate) for count in sorted({needed, *device_counts(sizes)})]
    Console().print(capacity.render(found, rate, slo))
    click.echo(f"{needed} {'device is' if needed == 1 else 'devices are'} needed for {rate:g} requests/s")


@serve.command("stop")
@_service_name
@click.pass_obj
def serve_stop(where: tuple[str, str | None], name: str | None) -> None:
    """Answer what runs, refuse what waits, and end all processes."""
    _connect(where[0])
    from fluidtune.serving.running_services import find, known

    there = known()
    if there:
        find(name, where[1], changes=True).stop()
    click.echo("stopped" if there else "there was none")


def main() -> None:
    """The command by click. A FluidTuneError is printed as one line, with exit status 2."""
    try:
        cli(standalone_mode=False)
    except FluidTuneError as error:
        click.echo(f"fluidtune: {error}", err=True)
        sys.exit(2)
    except click.NoSuchOption as error:
        hint = error.possibilities
        if error.ctx is not None and error.ctx.command is cli:
            # Somebody left out the command, as in `fluidtune --devices gpu:1 script.py`.
            options = [name for option in run.params for name in option.opts if name.startswith("-")]
            hint = [f"fluidtune run {name}" for name in get_close_matches(error.option_name, options)]
        nearest = f"; did you mean {hint[0]}?" if hint else ""
        if error.ctx is not None and error.ctx.command is run:
            goes = f"an option of the script goes after it: fluidtune run SCRIPT {error.option_name}"
            nearest += f" Or: {goes}" if hint else f"; {goes}"
        click.echo(f"fluidtune: there is no option {error.option_name}{nearest}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        sys.exit(130)

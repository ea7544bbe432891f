"""The `fluidtune` command: arguments in, calls out, errors as one line.

Decides nothing but how an argument is read. What a command does is in tune/launcher.py (run), tune/api.py (continue),
steering (trial), report (report, top, why), view (view), commands (plan, doctor, docs) and slurm (slurm). The groups
`arbiter` and `serve` are read in commands.
"""

from __future__ import annotations

import io
import os
import sys
from difflib import get_close_matches
from functools import partial
from typing import Any

import click

from fluidtune.commands.arbiter import arbiter
from fluidtune.commands.serve import serve
from fluidtune.commands.words import OptionOf, device_counts, refuse_unread, write
from fluidtune.errors import FluidTuneError
from fluidtune.tune.launcher import run_script
from fluidtune.tune.run_options import OPTIONS

_clone_option = partial(click.option, cls=OptionOf, form="clone")
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
    from fluidtune.report.fold import fold_of
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
        write(lambda: [serving_png(events, log.parent / "serving.png")])
        return
    fold = fold_of(events)
    summary = summarise(fold)
    click.echo(plain_json(summary.as_dict())) if as_json else console.print(render(summary))
    write(lambda: write_report(fold, summary, log.parent), apart=as_json)
    if html is not None:
        from fluidtune.view.page_file import write_page

        write(lambda: [write_page(log, html)], apart=as_json)


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
    from fluidtune.steering.steering_files import ask

    refuse_unread(act)
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
    from fluidtune.report.log_tail import driver_state
    from fluidtune.report.run_logs import find_log
    from fluidtune.report.story import story_of
    from fluidtune.report.summary import left_out
    from fluidtune.report.terminal_text import printable
    from fluidtune.report.trial_lookup import find_trial

    if len(run_dir) > 1:
        raise FluidTuneError(f"expected RUN_DIR and TRIAL, got {len(run_dir) + 1} words")
    log = find_log(run_dir[0] if run_dir else None, newest=not run_dir)
    fold = fold_of(log)
    found = find_trial(fold, trial)
    story = story_of(fold, found, died=driver_state(log, fold.last_driver) == "died")
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
    from fluidtune.report.summary import left_out
    from fluidtune.twin import forecast

    counts = sorted(set(device_counts(sizes)))
    job, dropped = job_of(source, trials, iterations)
    held = counts_held(job, counts)
    found = [forecast(job, count) for count in held]
    small = [each for each in counts if each not in held]
    if as_json:
        forecasts, of = [vars(each) for each in found], {"trials": len(job.trials), "of": job.profile.name}
        click.echo(versioned({**of, "forecasts": forecasts, "left_out": small, "dropped_lines": dropped}))
    else:
        Console().print(render_plan(job, found))
        if small:
            click.echo(f"left out, as a trial needs more: {', '.join(map(str, small))}")
        if dropped:
            click.echo(f"event log: {left_out(dropped)}")
    write(lambda: [plan_png(job, found, out)], apart=as_json)


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
    from fluidtune.slurm.job import asked as ask
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
    job = ask("sbatch", "--parsable", script=text).strip().partition(";")[0]  # behind it is the cluster's name
    click.echo(f"job {job} is submitted; `squeue --jobs {job} --start` says when it begins, or what it waits for")


@cli.group()
def node() -> None:
    """Start a node of a Ray cluster on which the processes of trials start sooner."""


@node.command("start", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def node_start(options: tuple[str, ...]) -> None:
    """Do what `ray start` does with these OPTIONS; trials' processes start in a quarter of the time there."""
    from fluidtune.cluster.forks.quick_nodes import start_node
    from fluidtune.ray_compat.cluster_address import of_token

    try:
        start_node(options)
    except Exception as error:
        if (said := of_token(repr(error))) is None:
            raise
        raise FluidTuneError(f"the Ray cluster cannot be joined: {said}") from None


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, metavar="[PAGE|WORD ...]", type=click.UNPROCESSED)
def docs(words: tuple[str, ...]) -> None:
    """Show a page of the documentation, or the sections that have all WORDs. Without words: list the pages.

    The pages are those of this version; no network is needed. A terminal shows them by $PAGER.
    """
    from rich.console import Console

    from fluidtune.commands.docs import Page, told

    console = Console()
    with console.capture() as page:
        console.print(Page(told(words), hyperlinks=False))
    os.environ.setdefault("LESS", "FRX")  # as git does: a page that fits the screen is printed
    click.echo_via_pager(page.get())


for group in (arbiter, serve):
    cli.add_command(group)


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

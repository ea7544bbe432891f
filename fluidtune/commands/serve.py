"""`fluidtune serve`: its arguments in, calls of `fluidtune.serving` out (docs/serving.md)."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from typing import Any

import click

from fluidtune.commands.words import OptionOf, connect, refuse_unread, write
from fluidtune.errors import FluidTuneError

#: The form of `serve start` and `serve plan` for several models, and that of `serve plan` for a run; and their options.
_MODELS, _SOURCE = "--models FILE", "SOURCE"
_models_option = partial(click.option, cls=OptionOf, form=_MODELS)
_run_option = partial(click.option, cls=OptionOf, form=_SOURCE)


@click.group()
@click.option("--address", default="auto", show_default=True, help="Address of the Ray cluster.")
@click.option("--user", default=None, help="Act for this user.  [that of the job]")
@click.pass_context
def serve(context: click.Context, address: str, user: str | None) -> None:
    """The best trials of a finished run, answering requests over HTTP (docs/serving.md)."""
    context.obj = address, user


_service_name = click.option("--name", default=None, help="Of the service.  [the only one, of your own if any]")


def _service(where: tuple[str, str | None], name: str | None, changes: bool = False) -> Any:
    """The service of this name in the cluster at an address, and for a user."""
    connect(where[0])
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
    refuse_unread(*([] if settings["models"] is None else [_MODELS]))
    if gpus is not None and settings["devices"] is not None:
        raise FluidTuneError(f"--gpus {gpus} is in place of --devices; leave one of the two out")
    if gpus is not None:
        settings["devices"] = f"gpu:{gpus}"
    sys.path.insert(0, "")  # As for a script: modules are looked for in the current directory, too.
    from fluidtune.report.terminal_text import printable
    from fluidtune.serving.service import check_installed, loader, serve

    check_installed()
    settings |= {"arbiter": "auto" if shared else None, "token": token.read().strip() if token is not None else None}
    found = loader(load) if load is not None else None
    served = serve(run_dir, found, user=where[1], address=where[0], **settings)
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
    service = _service(where, name)
    from fluidtune.report.json_text import versioned
    from fluidtune.serving.running_services import status_text

    found = service.status()
    click.echo(versioned(found) if as_json else status_text(found))
    if picture is not None:
        write(lambda: [service.picture(picture)], apart=as_json)


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
@_run_option("--starts", default="eager", show_default=True, help='When a batch starts: or "deferred".')
@click.option("--models", default=None, metavar="FILE", help="Place the models in this TOML file (docs/placement.md).")
@_models_option("--gpus", type=int, default=None, help="With --models: the number of GPUs.")
@_models_option("--find", is_flag=True, help="With --models: find the least number of GPUs instead.")
@click.option(
    "--attainment",
    cls=OptionOf,
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
    if models is not None:
        from rich.console import Console

        from fluidtune.report.json_text import versioned
        from fluidtune.serving import model_placement

        if source is not None or rate is not None or slo is not None:
            raise FluidTuneError("the file of --models has runs, rates and SLOs; leave out SOURCE, --rate and --slo")
        if (gpus is None) != find:
            raise FluidTuneError("with --models, give either --gpus N or --find")
        refuse_unread(_MODELS, *(["--find"] if find else []))
        planned, shown = model_placement.planned(models, gpus, gpu_memory, attainment, seconds)
        if as_json:
            click.echo(versioned(planned))
        else:
            Console().print(shown)
        return
    from fluidtune.serving import capacity

    refuse_unread(_SOURCE)
    if source is None or rate is None or slo is None:
        raise FluidTuneError("give SOURCE, --rate and --slo, or --models FILE")
    needed, bad = capacity.devices_for(capacity.models_of(source, slo, starts), rate)
    devices = "device is" if needed == 1 else "devices are"
    click.echo(f"{needed} {devices} needed for {rate:g} requests/s with an SLO of {1e3 * slo:g} ms.")
    click.echo(f"Then {bad:.1%} of the requests are refused or late, by the twin, if they come at random (Poisson).")


@serve.command("stop")
@_service_name
@click.pass_obj
def serve_stop(where: tuple[str, str | None], name: str | None) -> None:
    """Answer what runs, refuse what waits, and end all processes."""
    connect(where[0])
    from fluidtune.ray_compat.job_metadata import user_of_job
    from fluidtune.serving.running_services import chosen, known

    there = known()
    if there:
        chosen(there, name, user_of_job(where[1]), changes=True).stop()
    click.echo("stopped" if there else "there was none")

"""`fluidtune arbiter`: its arguments in, calls of `themis_bridge.shell.control` out (docs/arbiter.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import click

from fluidtune.commands.words import connect
from fluidtune.error_lines import failure
from fluidtune.errors import FluidTuneError


@click.group()
@click.option("--address", default="auto", show_default=True, help="Address of the Ray cluster.")
@click.pass_context
def arbiter(context: click.Context, address: str) -> None:
    """The arbiter, which leases the devices of one Ray cluster to several jobs."""
    context.obj = address


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
    connect(address)
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
    from fluidtune.report.json_text import versioned
    from fluidtune.report.terminal_text import printable
    from themis_bridge.settings import Settings

    with _control(address) as control:
        found = control.status()
    if as_json:
        click.echo(versioned(found))
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

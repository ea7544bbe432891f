"""What several commands read from their words, and print, alike."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fluidtune.errors import FluidTuneError


class OptionOf(click.Option):
    """An option that only one form of its command reads. ``form``: what is given in that form, such as "--find"."""

    def __init__(self, *args: Any, form: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.form = form


def refuse_unread(*forms: str) -> None:
    """FluidTuneError if the command got an option that its present form does not read. ``forms``: what it was given."""
    context = click.get_current_context()
    for option in context.command.params:
        if isinstance(option, OptionOf) and option.form not in forms:
            name = str(option.name)
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                value = "" if option.is_flag or option.multiple else f" {context.params[name]}"
                raise FluidTuneError(f"{option.opts[0]}{value} is for {option.form}; leave it out")


def write(files: Callable[[], Iterable[Path]], apart: bool = False) -> None:
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


def device_counts(sizes: str) -> list[int]:
    """The numbers of devices that ``--devices`` lists."""
    from fluidtune.serving.capacity import MOST_DEVICES

    words = [word.strip() for word in sizes.split(",")]
    counts = [int(word) for word in words if re.fullmatch(r"[0-9]{1,9}", word) and 0 < int(word) <= MOST_DEVICES]
    if len(counts) != len(words):
        said = f"whole numbers of 1 to {MOST_DEVICES}, for example 1,2,4,8,16"
        raise FluidTuneError(f"--devices {sizes!r} is not a list of {said}")
    return counts


def connect(address: str) -> None:
    """Connect to the Ray cluster. Commands do so themselves, since their groups run before a command's ``--help``."""
    from fluidtune.ray_compat.cluster_address import join

    if not join(address):
        raise FluidTuneError("there is no Ray cluster here; start one with: ray start --head")

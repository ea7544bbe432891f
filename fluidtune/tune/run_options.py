"""The options of `fluidtune run`, and how they are read where nothing is wrong: without click."""

from __future__ import annotations

#: Its names, of a pair the one that says no last; the type of its value; and its help. Each is a setting of
#: `FluidExecutor`, but for --shared and -m. "May change": without notice in any release (CONTRIBUTING.md).
OPTIONS: list[tuple[str, type, str]] = [
    ("--devices", str, 'What to run on: "gpu:N", "cpu:N" or "emulated:N".'),
    ("--max-packing", int, "Limit of trials that share one device."),
    ("--max-workers", int, "Limit of devices that one trial trains on."),
    ("--lanes", str, 'Share devices by lanes under a policy: "HPT", "FAIR", "PACK", ... May change.'),
    ("--device-memory", int, "With lanes: bytes that a device's trials may use. May change."),
    ("--shared", bool, "Lease devices from the cluster's arbiter, beside other jobs."),
    ("--user", str, "With --shared: whose job it is.  [the Unix user]"),
    ("--reserve", bool, "Hold all devices from start to end, not only while trials use them."),
    ("--profile", str, "With emulated devices: the file with the durations of iterations."),
    ("--fork-server/--no-fork-server", bool, "Fork new processes from one with the packages."),
    ("--parked-memory", float, "Part of a node's memory that processes of paused trials may hold. May change."),
    ("--trial-timeout-s", float, "Seconds for which a trial may hold devices; past it, it fails."),
    ("--stall-timeout-s", float, "Seconds that one iteration may take; past it, the trial fails."),
    ("--notice-s", float, "Seconds that SIGTERM leaves the driver to save trials and its state."),
    ("--beside", bool, "With --devices cpu:1: take turns with a service on this machine. May change."),
    ("--steer", bool, "Let `fluidtune trial` stop, keep and clone trials while it runs."),
    ("-m", bool, "SCRIPT is the name of a module, as in `python -m`."),
]


def read(words: list[str]) -> tuple[list[str], dict[str, object]] | None:
    """The script with its arguments, and the settings, that these words after `run` say; None: click is to answer."""
    kinds = {name: (names, kind) for names, kind, _ in OPTIONS for name in names.split("/")}
    settings: dict[str, object] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        names, kind = kinds.get(name, ("", None))
        if kind is None or (equals and kind is bool) or not (equals or kind is bool or rest):
            return None
        setting = names.partition("/")[0].lstrip("-").replace("-", "_")
        try:
            settings[setting] = names.startswith(name) if kind is bool else kind(value if equals else rest.pop(0))
        except ValueError:
            return None
    return (rest, settings) if rest else None

"""The events in the log of a service (`fluidtune serve`). They are part of `events.SCHEMA`, which owns the format.

A service writes ``worker_started`` and ``worker_lost`` too: its workers are the model processes.
"""

from __future__ import annotations

from fluidtune.report.event_schema import TRIAL, EventSchema

SERVING: dict[str, EventSchema] = {
    "serving_started": EventSchema(
        "The front of a service begins to load the models. With a second `serving_started` in a file, the first front"
        " has died, or the service was started anew.",
        {
            "run": "the directory of the run that is served",
            "ray": "Ray's version",
            "fluidtune": "FluidTune's version",
            "python": "Python's version",
            "machine": "the machine in words",
            "kind": '"gpu" or "cpu"',
            "devices": "number of devices, each with a model process; 0 if they are leases, of which `device_gained`"
            " tells",
            "slo": "seconds from a request to its answer",
            "starts": '"eager" or "deferred"',
            "trials": 'the trials that are served, a list of {"trial": id, "value": number or null}',
        },
    ),
    "model_measured": EventSchema(
        "The seconds of a trial's batches were measured.",
        {
            "trial": TRIAL,
            "seconds": "seconds of a batch of 1, 2, 3 and so on, a list",
            "delays": "seconds of the way besides, that count against the SLO",
        },
    ),
    "served": EventSchema(
        "What has happened since the last such line. There is one every ten seconds, but none where nothing happened.",
        {
            "seconds": "how long that is, s",
            "requests": 'by trial: number of requests by what became of them, such as "answered" and "refused: late"',
            "batches": "by trial: number of batches by their size",
            "waited": "by trial: seconds that requests waited for the start of their batch, added up",
            "busy": "seconds of the batches that ended, all devices together",
            "devices": "number of devices",
        },
    ),
    "devices_wanted": EventSchema(
        "From now on the load wants another number of devices. A service with leases asks the arbiter for so many;"
        " otherwise nobody carries that out.",
        {"devices": "number of devices", "wanted": "how many the load wants"},
    ),
    "serving_failed": EventSchema(
        "The models cannot be served. It is tried again.",
        {"reason": "why, in words"},
    ),
    "serving_ended": EventSchema(
        "The front was stopped. A front that dies has no such line.",
        {"seconds": "time since its serving_started, s"},
    ),
}

"""The twin: whole tuning jobs on a virtual clock, decided by the engine that decides real ones.

`shell.Twin` is the second shell of `fluidtune.engine`; `fluidtune.tune` is the first. It carries the engine's
instructions out in virtual time. What it is given is a `RecordedJob`: the trials and their iterations, read off a run's
event log (`fluidtune.report.recorded`) or made up (`grid`). What an iteration takes comes from a
`fluidtune.profiles.Profile`, what starts and turns take from the job's `Costs`. `forecast` runs a job on another number
of devices, for `fluidtune plan`.

Start reading at `recorded_job`, then `Twin.run`. Pure: no Ray, no torch, no clock, no randomness. It decides nothing,
and it does not simulate the tuning algorithm: the algorithm's decisions are those of the recorded run.
"""

from fluidtune.twin.least_makespan import LeastMakespan, least_makespan
from fluidtune.twin.recorded_job import Costs, RecordedJob, RecordedTrial, Stage, grid
from fluidtune.twin.shell import Forecast, Twin, forecast

__all__ = [
    "Costs",
    "Forecast",
    "LeastMakespan",
    "RecordedJob",
    "RecordedTrial",
    "Stage",
    "Twin",
    "forecast",
    "grid",
    "least_makespan",
]

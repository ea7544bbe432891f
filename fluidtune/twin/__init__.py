"""The twin: the same engine on a virtual clock.

`job` is what a tuning job has to do (read off a run's event log, or made up), `shell` carries the engine's
instructions out in virtual time, `plan` does so at several numbers of devices. Pure: no Ray, no torch, no clock, no
randomness. What a step takes comes from a `fluidtune.profiles.Profile`.
"""

from fluidtune.twin.plan import Forecast, forecast, forecasts
from fluidtune.twin.recorded_job import Costs, Job, Stage, Work, grid, read_job
from fluidtune.twin.shell import Twin

__all__ = ["Costs", "Forecast", "Job", "Stage", "Twin", "Work", "forecast", "forecasts", "grid", "read_job"]

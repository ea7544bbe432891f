# The public names with their types: at run time each is imported when it is first used.
from fluidtune import elastic as elastic
from fluidtune.client import AsyncClient as AsyncClient
from fluidtune.client import Client as Client
from fluidtune.client import ServiceError as ServiceError
from fluidtune.cluster.data.shared_data import shared as shared
from fluidtune.cluster.forks.forked import forked as forked
from fluidtune.errors import BadInput as BadInput
from fluidtune.errors import FluidTuneError as FluidTuneError
from fluidtune.serving.service import serve as serve
from fluidtune.tune.api import Tuner as Tuner
from fluidtune.tune.api import run as run
from fluidtune.tune.executor import FluidExecutor as FluidExecutor
from fluidtune.tune.groups import announce as announce
from fluidtune.tune.scheduler import FluidScheduler as FluidScheduler

__version__: str
__all__: list[str]

"""`FluidExecutor`: the settings of an execution. They are checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from fluidtune.cluster.devices.layout import DeviceSpec
from fluidtune.device_kinds import KINDS
from fluidtune.errors import FluidTuneError
from fluidtune.profiles import DEFAULT, Profile
from salus_share import SalusError, policy


@dataclass(frozen=True)
class FluidExecutor:
    """How FluidTune executes a tuning job.

    Args:
        devices: the devices that the job runs on: "gpu" or "gpu:N" (whole GPUs), "cpu" or "cpu:N" (cores), "emulated:N"
            (devices that compute nothing, see docs/emulated.md). Without N: all that the Ray cluster has. None: all
            GPUs if the script's trials ask for GPUs, else all cores.
        max_packing: the packing limit c, the most trials that may share one device. None on GPUs: the engine finds c
            while the trials train, if they can be moved; c is the number that fits and pays. None on cores: the
            script's request counts (two trials that ask for half a core each share a core; others do not).
        max_workers: the scaling limit d, the most devices that one trial may train on. None: all of them.
        arbiter: "auto": the job shares the Ray cluster with other jobs and leases its devices from the cluster's
            arbiter, which is started if there is none. None: the job has devices of its own.
        user: with an arbiter, whose job it is: quotas, weights and shares are a user's. None: the "user" of the Ray
            job's metadata, else the Unix user of the driver.
        reserve: for a job without arbiter. True: it holds all its devices from its start to its end, and is refused if
            the cluster does not have them. False: it holds devices while its trials use them or wait for them
            (docs/architecture.md, "Devices"), so that other work in the cluster goes on: tasks that a trial starts, Ray
            Data and Ray Train in a trial, other jobs. Emulated devices are always reserved.
        lanes: how trials share a device, see docs/salus.md. A policy ("FAIR", "HPT", "PACK", "SRTF", "FIFO", or
            "module:Class" of your own): memory limits packing, too, no trial may exceed its part of it, and a trial
            passes a gate before each iteration; on GPUs the trials' processes are clients of MPS where MPS is
            available. None: only the number of trials on a device is limited.
        device_memory: bytes that the trials of one device may use together, with lanes. The limit holds for a trial
            that is alone on its device, too. None: a GPU's memory less the CUDA contexts of its workers, or a core's
            part of the memory of its node.
        profile: how long an iteration takes on emulated devices: a `fluidtune.profiles.Profile`, or the path of a
            profile's file. None: a task of which one trial fills half a GPU.
        beside: True, with ``devices="cpu:1"``: the trials take turns on their core with a service on the same machine
            that was started with ``beside`` as well (docs/serving.md, "Beside trials"). A trial waits before an
            iteration while a batch of requests runs or waits. False: they do not know of each other.
        fork_server: True: new processes are forked from one on their node that has imported the script's packages
            (docs/workers.md). False: they are started as Ray starts them.
        parked_memory: the part of each node's memory, 0 to 1, that processes of paused trials may hold together, each
            of which waits where it stands until its trial goes on (docs/workers.md). 0: none waits.
        trial_timeout_s: seconds for which a trial may hold devices in all, without the start of its process. Past it
            the process is ended, and the trial fails with an error that says where it stood; a retry has as long
            again. None: no limit.
        stall_timeout_s: the same for one iteration.
        notice_s: seconds that SIGTERM leaves the driver. Trials that can be saved are, Tune writes its state, and the
            driver ends with status 75, which means "run me again" (docs/how-to/restore.md).
        steer: True: this user can stop, keep and clone trials while the job runs, by `fluidtune trial` and by the page
            of `fluidtune view --steer` (docs/how-to/steer.md). False: nobody can.

    Raises:
        FluidTuneError: a setting is impossible.
    """

    devices: str | None = None
    max_packing: int | None = None
    max_workers: int | None = None
    arbiter: str | None = None
    user: str | None = None
    profile: Profile | str | None = None
    lanes: str | None = None
    device_memory: int | None = None
    reserve: bool = False
    beside: bool = False
    fork_server: bool = True
    steer: bool = False
    parked_memory: float = 0.25
    trial_timeout_s: float | None = None
    stall_timeout_s: float | None = None
    notice_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what cannot be, each setting in a sentence of its own."""
        for name, kinds in {"lanes": (str,), "user": (str,), "profile": (str, Profile)}.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                use = " or a ".join("text" if kind is str else f"fluidtune.profiles.{kind.__name__}" for kind in kinds)
                raise FluidTuneError(f"{name}={value!r} is of type {type(value).__name__}; use a {use}, or None")
        spec = DeviceSpec.parse(self.devices)
        for name in ("max_packing", "max_workers", "device_memory"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise FluidTuneError(f"{name}={value!r} must be a whole number of at least 1, or None")
        for name in ("reserve", "beside", "fork_server", "steer"):
            if not isinstance(getattr(self, name), bool):
                raise FluidTuneError(f"{name}={getattr(self, name)!r} is not known; use True or False")
        for name, or_none in {"trial_timeout_s": ", or None", "stall_timeout_s": ", or None", "notice_s": ""}.items():
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 < value < float("inf")) and not (value is None and or_none):
                raise FluidTuneError(f"{name}={value!r} must be a number of seconds above 0{or_none}")
        number = isinstance(self.parked_memory, int | float) and not isinstance(self.parked_memory, bool)
        if not (number and 0 <= self.parked_memory <= 1):
            raise FluidTuneError(f"parked_memory={self.parked_memory!r} must be from 0 to 1, as a part of the memory")
        if self.arbiter not in (None, "auto"):
            raise FluidTuneError(f'arbiter={self.arbiter!r} is not known; use "auto", or None for a job of its own')
        if self.user is not None and (self.arbiter is None or not self.user):
            raise FluidTuneError(f"user={self.user!r} is the name by which an arbiter knows whose job it is; add one")
        if self.arbiter is not None and self.reserve:
            raise FluidTuneError(
                f"reserve=True: a job with arbiter={self.arbiter!r} leases its devices and cannot reserve them; "
                "leave one of the two out"
            )
        if self.beside and (self.devices, self.lanes, self.arbiter) != ("cpu:1", None, None):
            raise FluidTuneError(
                f"beside=True with devices={self.devices!r}, lanes={self.lanes!r} and arbiter={self.arbiter!r}: a "
                'search shares one core with a service, by turns; use devices="cpu:1" without lanes or an arbiter, or '
                "leave beside out"
            )
        emulated = self._emulated
        if self.profile is not None and not emulated:
            raise FluidTuneError(
                f"profile={self.profile!r} is for emulated devices and devices={self.devices!r} are none; "
                'use devices="emulated:N", or leave the profile out'
            )
        if self.lanes is not None:
            if emulated:
                raise FluidTuneError(
                    f"lanes={self.lanes!r}: emulated devices have no memory to divide; leave lanes out, "
                    "the profile says what neighbours cost"
                )
            try:
                policy(self.lanes)
            except SalusError as error:
                raise FluidTuneError(f"lanes={self.lanes!r}: {error}") from None
        elif self.device_memory is not None:
            raise FluidTuneError(f'device_memory={self.device_memory} is for lanes; add lanes="HPT", or leave it out')
        if emulated:
            self.emulated_profile()  # raises ProfileError for a file that is not a profile
        if self.max_workers and spec and spec.count and self.max_workers > spec.count:
            raise FluidTuneError(
                f"max_workers={self.max_workers} is more than devices={self.devices!r} has; "
                f"use at most {spec.count}, or leave it out"
            )

    @classmethod
    def checked(cls, executor: FluidExecutor | None) -> FluidExecutor | None:
        """The executor that a caller has given.

        Raises:
            FluidTuneError: it is something else, such as the class or the name of a device.
        """
        if executor is not None and not isinstance(executor, cls):
            shown = f'FluidExecutor(devices="{executor}")' if isinstance(executor, str) else "FluidExecutor()"
            raise FluidTuneError(f"executor={executor!r} is no FluidExecutor; use fluidtune.{shown}, or None")
        return executor

    @property
    def _emulated(self) -> bool:
        spec = DeviceSpec.parse(self.devices)
        return spec is not None and not KINDS[spec.kind].computes

    @property
    def on_demand(self) -> bool:
        """Whether the job holds devices only while its trials use them or wait for them."""
        return self.arbiter is None and not self.reserve and not self._emulated

    def emulated_profile(self) -> Profile:
        """Return the profile that the emulated devices take their times from.

        Raises:
            ProfileError: the file is not a profile.
        """
        if self.profile is None:
            return DEFAULT
        return self.profile if isinstance(self.profile, Profile) else Profile.load(self.profile)

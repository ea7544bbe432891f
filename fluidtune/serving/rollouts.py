"""Brings about what `model_versions` says is to be: loads, measures and ends versions, and keeps what a restart needs.

Every device has all versions. So they stand in one place, `ALL`, of the machine that moves models
(`symphony_serve.replacement`), which has room for one version beside the first: it says which one ends before the next
one loads. What becomes of a version's processes while it loads or is measured is told to both machines.

All of it runs on the front's event loop, beside the requests. All times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray import cloudpickle

from fluidtune.ray_compat import kept_state
from fluidtune.serving import model_versions
from fluidtune.serving.device import Device
from fluidtune.serving.held_checkpoints import HeldCheckpoints
from fluidtune.serving.inference_protocol import Interface
from fluidtune.serving.intake import largest_body
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_process import Loading
from fluidtune.serving.model_versions import Version, Versions
from fluidtune.serving.process import LOAD_S, LOOK_S
from fluidtune.serving.service_devices import Devices
from fluidtune.serving.setting import Setting
from fluidtune.serving.watching import Watch
from fluidtune.serving.winners import Winner
from symphony_serve import replacement
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.model_side import Model
from symphony_serve.profiles import Profile, check_slo
from symphony_serve.shell.async_server import AsyncServer
from symphony_serve.shell.device import Waited
from symphony_serve.shell.measuring import measure_profile

logger = logging.getLogger(__name__)

#: A version is not measured with larger batches when one takes this part of the SLO: a batch of the other version waits
#: for it. No larger one is of use: while it runs, the next one gathers (equation 1 with one device).
LONGEST = 0.5
#: The number that stands for every device.
ALL = 0


@dataclass(frozen=True)
class Answering:
    """What the front knows of a model that answers: its form, its tensors, and how many bytes a body may have."""

    model: Model
    interface: Interface
    samples: Samples
    most: int

    @classmethod
    def of(cls, model: Model, samples: Samples, max_body: int | None) -> Answering:
        return cls(model, Interface.of(*samples), samples, max_body or largest_body(samples.inputs))


class Rollouts:
    """The versions of the model that ``POST /`` asks. tell: is called with an event of the log and its fields.

    One thing: what may be asked, what devices are to have, and the server change together.
    """

    def __init__(self, setting: Setting, tell: Callable[..., None]):
        self._setting, self._tell_log = setting, tell
        first, known = setting.loading.trials[0], setting.known
        serving = Version(1, first.name, setting.run, first, "serving")
        self.versions = Versions(serving, service=known.name, user=known.user)
        self._checkpoints = HeldCheckpoints(setting.folder, first)
        #: Of each model of the server, by its key: what the front knows of it.
        self.answering: dict[str, Answering] = {}
        self._before: Version | None = None
        self._devices: Devices | None = None
        self._server: AsyncServer | None = None
        self._watch: Watch | None = None
        #: By key, the task that loads and measures the version, or ends it.
        self._work: dict[str, asyncio.Task[None]] = {}
        self._keeping = asyncio.Lock()
        #: Whether the service is over, and nothing is kept any more.
        self._over = False
        self._stand()

    def _stand(self) -> None:
        """Each device is to have the models that answer from the start, and no other one."""
        trials, serving = self._setting.loading.each(), self.versions.serving
        #: By key, how processes come to each model that devices have.
        self._loadings = {serving.key: self._loading(serving), **{key: trials[key] for key in self.keys[1:]}}
        sizes, places = defaultdict[str, float](lambda: 1.0), {ALL: replacement.Device(frozenset(self.keys))}
        room = len(self.keys) + 1
        self._placement = replacement.PlacementState(sizes, room, places, math.inf, {}, searching=False)

    @property
    def keys(self) -> list[str]:
        """The keys of the models that answer from the start."""
        return [self.versions.serving.key, *[trial.name for trial in self._setting.loading.trials[1:]]]

    async def restore(self) -> None:
        """Go on with the versions that the front had before Ray restarted it."""
        kept = await asyncio.to_thread(kept_state.kept, kept_state.own_name())
        if kept is not None:
            versions: Versions = cloudpickle.loads(kept)
            self.versions, self._before = replace(versions, other=None), versions.other
            self._say(versions.serving)
            self._stand()
        await self._checkpoints.begin()
        await self._let_go(self._before)

    def begin(self, server: AsyncServer, watch: Watch, devices: Devices) -> None:
        """The server answers, with the serving version."""
        self._server, self._watch, self._devices = server, watch, devices
        if self._before is not None:
            self._tell(model_versions.Restored(self._before))
            self._before = None

    async def close(self) -> None:
        """The service is over."""
        for task in self._work.values():
            task.cancel()
        self._over = True
        async with self._keeping:
            await asyncio.to_thread(kept_state.forget, kept_state.own_name())
            await self._checkpoints.keep(())

    def desired(self, number: int) -> dict[str, Loading]:
        """By key, the models that each device is to have, with a version that ends until it has answered all."""
        there = self._placement.devices[ALL].all
        return {key: loading for key, loading in self._loadings.items() if key in there}

    def _present(self) -> list[Device]:
        return list(self._devices.present.values()) if self._devices is not None else []

    # What operators ask.

    async def deploy(self, winner: Winner, run: str, share: float) -> int:
        """Begin to load this trial's checkpoint. Returns its version. Raises ServeError if that cannot be now."""
        event = model_versions.Deploy(winner.name, run, winner, share)
        model_versions.handle(self.versions, event)  # First, as it says in one line what stands in the way.
        if self._setting.stages > 1:
            raise ServeError("this service has its model in stages, and versions are of whole ones; start it anew")
        if self._setting.placing is not None or len(self._setting.loading.trials) > 1:
            several, option = ("models", "--models") if self._setting.placing is not None else ("trials", "--top")
            raise ServeError(f"this service has several {several}, and versions are of one; start it without {option}")
        if self._server is None or not self._present():
            raise ServeError(f"the service does not answer yet; {self.versions.command('status')} says why")
        if self.versions.other is None:  # Else the kept version goes first.
            await self._check_memory()
        winner = await self._checkpoints.hold(winner)
        self._tell(replace(event, what=winner))
        assert self.versions.other is not None
        return self.versions.other.number

    async def promote(self) -> None:
        """Let the canary answer all requests. Raises ServeError if there is none that can."""
        await self._check_able("canary")
        self._tell(model_versions.Promote())
        await self._keep()

    async def rollback(self) -> None:
        """Let what was deployed last go. Raises ServeError if there is nothing to go back to."""
        await self._check_able("kept")
        self._tell(model_versions.Rollback())
        await self._keep()

    async def _check_able(self, state: str) -> None:
        """Raises ServeError if the version in this state is to answer all, and its processes are not there.

        It waits for the batches that these run, at most `process.HUNG_S`.
        """
        other = self.versions.other
        if other is None or other.state != state:
            return
        # Other devices load still.
        in_use = [device for device in self._present() if self.versions.serving.key in device.models]
        answers = all(await asyncio.gather(*[device.processes[other.key].answers() for device in in_use]))
        if self.versions.other is not other:
            raise ServeError(f"{other.said} is no {state} version any more; see {self.versions.command('status')}")
        if not answers:
            said = f"a process of {other.said} does not answer, or has ended and loads again"
            raise ServeError(f"{said}; ask once more when {self.versions.command('status')} counts all of them")

    async def _check_memory(self) -> None:
        """Raises ServeError if the machines have no memory for one more process of each device."""
        key = self.versions.serving.key
        places = await asyncio.gather(*[device.processes[key].place() for device in self._present()])
        needs = Counter[str]()
        for place in places:
            needs[place.node] += place.used
            short = place.gpu_used > place.gpu_free
            if short or needs[place.node] > place.free:
                where, used = ("the GPU", place.gpu_used) if short else ("the machine", needs[place.node])
                free = place.gpu_free if short else place.free
                raise ServeError(
                    f"a second version takes about {used / 2**30:.1f} GiB of {where}, as the first one does, and "
                    f"{free / 2**30:.1f} GiB are free; stop the service and start it with the other checkpoint"
                )

    # The machine.

    def _tell(self, event: model_versions.Event) -> None:
        """Let the machine handle the event, and carry out what it says. Raises ServeError."""
        before = {one.number: one for one in self.versions.known}
        last = self.versions.last
        self.versions = model_versions.handle(self.versions, event)
        for one in self.versions.known:
            if one.number not in before or before[one.number].state != one.state:
                self._say(one)
        if last is not None and last not in self.versions.known and self._watch is not None:
            self._watch.forget(last.key)
        wanted = frozenset({*[one.key for one in self.versions.loaded], *self.keys[1:]})
        self._loadings |= {one.key: self._loading(one) for one in self.versions.loaded}
        for key in self._placement.devices[ALL].loads - wanted:
            self._work[key].cancel()
            self._hear(replacement.NotHeld(ALL, key))
        self._hear(replacement.Wanted({ALL: wanted}))
        self._reconcile()  # Last: what it raises stops nothing of the above.

    def _hear(self, event: replacement.Wanted | replacement.Held | replacement.NotHeld | replacement.Dropped) -> None:
        """Let the machine that moves models handle the event, and begin what it says."""
        if not isinstance(event, replacement.Wanted):
            del self._work[event.model]
            if not isinstance(event, replacement.Held):
                del self._loadings[event.model]
        self._placement, acts = replacement.handle(self._placement, event)
        for act in acts:
            assert not isinstance(act, replacement.Search)  # Nothing has said where else the versions might stand.
            work = self._load(act.model) if isinstance(act, replacement.Hold) else self._end(act.model)
            self._work[act.model] = asyncio.create_task(work, name="serve-rollout")

    def _reconcile(self) -> None:
        if self._devices is not None:
            self._devices.reconcile()

    def _say(self, one: Version) -> None:
        why = {"reason": one.why} if one.why else {}
        share = {"share": one.share} if one.state == "canary" else {}
        told = {"trial": one.trial, "version": one.number, "state": one.state, "run": one.run, **why, **share}
        self._tell_log("version_changed", **told)

    async def _end(self, key: str) -> None:
        """Let the version answer what it has, and no more."""
        assert self._server is not None
        await self._server.remove(key)
        del self.answering[key]
        self._hear(replacement.Dropped(ALL, key))
        self._reconcile()

    async def _load(self, key: str) -> None:
        """Have the version on each device, and measured. What goes wrong is told; nobody awaits this."""
        version = self.versions.other
        assert version is not None and version.key == key and self._server is not None and self._watch is not None
        try:
            samples, devices = await self._samples(version)
            self._check_form(version, samples)
            self._tell(model_versions.Loaded(version.number))
            model = await self._measured(version, samples, devices)
            found = Answering.of(model, samples, self._setting.max_body)
            self._server.add(found.model)
        except Exception as error:
            why = " ".join(str(error).split()) if isinstance(error, ServeError) else repr(error)
            logger.warning("Version %d cannot be served: %s", version.number, why)
            self._hear(replacement.NotHeld(ALL, key))
            event: model_versions.Event = model_versions.Failed(version.number, why)
        else:
            self.answering[key] = found
            self._watch.serves(key, found.model.profile, found.model.budget)
            self._hear(replacement.Held(ALL, key))
            event = model_versions.Measured(version.number)
        try:
            try:
                self._tell(event)
            finally:
                await self._keep()
        except Exception:
            logger.exception("What follows from the load of version %d was not all done", version.number)

    async def _samples(self, version: Version) -> tuple[Samples, list[Device]]:
        """The samples of a version that each device has loaded, and these devices. Raises ServeError.

        One that is leased later loads it as well before it joins the server. While there is none, one is waited for.
        """
        until = time.monotonic() + LOAD_S
        while True:
            devices = self._present()
            if devices:
                until = time.monotonic() + LOAD_S
            elif time.monotonic() > until:
                raise ServeError(f"the service has had no device for {LOAD_S:.0f} s; deploy it again when it has one")
            processes = [found for device in devices if (found := device.processes.get(version.key)) is not None]
            for process in processes:
                if process.trouble:
                    raise ServeError(process.trouble)
            if devices and len(processes) == len(devices) and all(one.state == "ready" for one in processes):
                return processes[0].samples, devices
            await asyncio.sleep(LOOK_S)

    def _check_form(self, version: Version, samples: Samples) -> None:
        """Raises ServeError if clients of the serving version would have to send something else."""
        serving, new = self.answering[self.versions.serving.key].interface, Interface.of(*samples)
        if (serving.form, serving.inputs) != (new.form, new.inputs):
            sample = self.answering[self.versions.serving.key].samples.inputs[0]
            trouble = new.form.trouble(sample, "a sample of the serving version")
            said = f": {trouble}" if trouble is not None else ""
            raise ServeError(f"its inputs have another form than those of {self.versions.serving.said}{said}")

    async def _measured(self, version: Version, samples: Samples, devices: Sequence[Device]) -> Model:
        """The version, measured and ready on those of the devices whose lease goes on until then. Raises ServeError."""
        while there := [device for device in devices if not device.over]:
            try:
                model = await self._measure(version, samples, there)
                await asyncio.gather(*[device.processes[version.key].loaded() for device in there if not device.over])
            except ServeError:
                if not any(device.over for device in there):
                    raise
            else:
                if not any(device.over for device in there):
                    return model
        raise ServeError("no device with it is left; deploy it again")

    async def _measure(self, version: Version, samples: Samples, devices: Sequence[Device]) -> Model:
        """Raises ServeError if the version is too slow, or fails with its own samples."""
        setting, key = self._setting, version.key
        delays = self.answering[self.versions.serving.key].model.delays
        alone = await asyncio.gather(*[_first_run(device, key, samples.inputs[:1]) for device in devices])
        check_slo(key, Profile.from_seconds([max(alone)]), setting.slo, delays.margin)
        runs = [_in_turns(device, key, setting.slo) for device in devices]
        profile = await measure_profile(runs, samples.inputs, LONGEST * setting.slo, setting.max_batch)
        self._tell_log("model_measured", trial=key, seconds=profile.table[1:-1], delays=delays.margin)
        return Model(key, profile, setting.slo, setting.batching, setting.policy, delays)

    def _loading(self, version: Version) -> Loading:
        """How processes come to the model of a version."""
        return replace(self._setting.loading, trials=(replace(version.what, name=version.key),))

    async def _keep(self) -> None:
        """Keep what a restart must know. A version that loads is none of it."""
        async with self._keeping:
            if self.versions.phase != "loading" and not self._over:
                await asyncio.to_thread(kept_state.keep, kept_state.own_name(), cloudpickle.dumps(self.versions))
                await self._let_go(self.versions.other)

    async def _let_go(self, other: Version | None) -> None:
        """Remove the copies of checkpoints but those of the serving version, of this one, and of the other models."""
        versions = [one.what for one in (self.versions.serving, other) if one is not None]
        await self._checkpoints.keep([*versions, *self._setting.loading.trials[1:]])

    # What status shows.

    def stages(self) -> list[list[dict[str, Any]]]:
        """Of each device with a model in stages, what they hold and need."""
        held = [process.stages for device in self._present() for process in device.processes.values()]
        return [[stage._asdict() for stage in one] for one in held if one]

    def status(self, now: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
        """The versions, the serving one first. now: figures by key."""
        return [
            {
                "trial": one.trial,
                "version": one.number,
                "state": one.state,
                "run": one.run,
                "why": one.why,
                "share": one.share if one.state == "canary" else None,
                "value": one.what.value,
                **now(one.key),
            }
            for one in self.versions.known
        ]


async def _first_run(device: Device, key: str, inputs: list[Any]) -> float:
    """The seconds of a batch that takes no turn. Raises ServeError if its process is lost."""
    began = time.monotonic()
    try:
        await device.measure(key, inputs, turn=False)
    except DeviceLost as lost:
        raise ServeError(f"its process has ended, or hangs, while it was measured ({lost})") from None
    return time.monotonic() - began


def _in_turns(device: Device, key: str, slo: float) -> Callable[[list[Any]], Awaitable[Waited]]:
    """Runs batches of a version that is measured.

    One takes a turn if the batch of its size before it took at most ``slo`` seconds. So the first one of a size takes
    none, and one that takes too long holds nobody up.
    """
    seconds = dict[int, float]()

    async def run(inputs: list[Any]) -> Waited:
        size, began = len(inputs), time.monotonic()
        found = await device.measure(key, inputs, turn=seconds.pop(size, math.inf) <= slo)
        seconds[size] = time.monotonic() - began - found.seconds
        return found

    return run

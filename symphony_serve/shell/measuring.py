"""Measures how long batches take, and how late the event loop is, on the devices that will serve. Times are seconds."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from symphony_serve.delays import Delays
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.model_side import DEFERRED, Batching, Gathering, Model, StartPolicy
from symphony_serve.profiles import Profile
from symphony_serve.seen_times import high_quantile
from symphony_serve.shell.device import Device, Waited, as_waited

logger = logging.getLogger(__name__)

#: A size is run at most this many times and this many seconds, but at least the third number of times. A model with ten
#: sizes is then measured in a second or two. The profile is corrected later by the batches that are seen.
MOST_RUNS, SECONDS_EACH, LEAST_RUNS = 30, 0.1, 5
#: The part of a size's runs that take no longer than is said: inputs differ, and each run has others. Judgement: of the
#: fewest runs, one that something else has held up does not count.
RUN_QUANTILE = 0.75
#: How often the lateness of the loop is measured, and the seconds that it sleeps.
WAKES, SLEEP_S = 100, 0.001
#: The part of the wakes and of the ways through the loop that the delays allow for. Source: of a model's requests,
#: 1 % may be late at its goodput (section 5.1).
DELAY_QUANTILE = 0.99


_T = TypeVar("_T")
#: Runs one batch; what a device does with a model.
_Run = Callable[[list[Any]], Awaitable[Sequence[Any] | Waited]]


async def measure_models(
    devices: Sequence[Device],
    samples: Mapping[str, Sequence[Any]],
    slos: Mapping[str, float],
    max_batch: int = 64,
    profiles: Mapping[str, Profile] | None = None,
    policy: StartPolicy = DEFERRED,
    batching: Batching | Gathering = Batching.AUTO,
    stages: int = 1,
) -> list[Model]:
    """The models for an `AsyncServer` on these devices.

    samples: inputs of each model, one at least, to measure with. slos: seconds by model. max_batch: no larger batch is
    measured or formed. profiles: those that are known already (see `profiles`); each other one is measured on all
    devices that have the model at once, because devices may share cores. stages: of which each device is a pipeline.
    Raises ServeError if a batch of 1 with the delays of this machine takes longer than the SLO, if a model fails with
    one sample, or if no device has it; DeviceLost if a device is lost twice while the delays are measured.
    """
    if not devices or not slos:
        raise ServeError(f"there are {len(devices)} devices and {len(slos)} models, expected at least one of each")
    if max_batch < 1:
        raise ServeError(f"max_batch is {max_batch}, expected 1 or more")
    known = dict(profiles or {})
    for name, slo in slos.items():
        if not samples.get(name):
            raise ServeError(f"model {name} has no sample inputs, expected one at least to measure it with")
        if name not in known:
            there = [_of(one, name) for one in devices if name in one.models]
            if not there:
                raise ServeError(f"no device has model {name}, so it cannot be measured")
            known[name] = await measure_profile(there, samples[name], slo, max_batch, stages)
    some = min(name for device in devices for name in device.models & slos.keys())
    one = next(device for device in devices if some in device.models)
    delays = await _delays_on(lambda: one.run(some, list(samples[some][:1])))
    return [Model(name, known[name], slo, batching, policy, delays) for name, slo in slos.items()]


def _of(device: Device, name: str) -> _Run:
    return lambda inputs: device.run(name, inputs)


async def measure_profile(
    runs: Sequence[_Run], samples: Sequence[Any], slo: float, max_batch: int, stages: int = 1
) -> Profile:
    """The profile of a model, of which ``runs`` has a function for each device; the slowest device counts.

    Sizes are doubled until ``max_batch``, or until a batch takes longer than ``slo`` seconds twice or fails, as one
    does that the memory cannot hold. Each run has other samples: their order does not matter. If a device is lost,
    that may have nothing to do with the size. So the size is measured again when the device is back, once for each
    device, because all may be lost at once. Sizes in between are interpolated. Of a pipeline of ``stages``, the seconds
    from answer to answer are measured as well.
    """
    known: dict[int, float] = {}
    gaps: dict[int, float] = {}
    size, again = 1, len(runs)
    draws = itertools.cycle(random.Random(0).sample(list(samples), len(samples)))
    while size <= max_batch:
        try:
            alone = max(await _all([_seconds(run, draws, size) for run in runs]))
            if alone > slo:
                alone = min(alone, max(await _all([_seconds(run, draws, size) for run in runs])))
            if stages > 1:
                inputs = list(itertools.islice(draws, size))
                gaps[size] = max(await _all([_gap(run, inputs, alone, stages) for run in runs]))
            known[size] = alone
        except Exception as error:
            if isinstance(error, DeviceLost):
                while not await error.back():
                    pass
                if again:
                    logger.warning("A device was lost (%s) in a batch of %d, which is measured again", error, size)
                    again -= 1
                    continue
            if size == 1:
                said = f"a batch of 1 cannot be measured: {error!r}; check the model's function"
                raise ServeError(said) from error
            most = max(known)
            logger.warning("A batch of %d failed with %r; larger ones than %d are not formed", size, error, most)
            break
        if known[size] > slo or size == max_batch:
            break
        size, again = min(2 * size, max_batch), len(runs)
    profile = Profile.from_seconds(_interpolated(known))
    if stages == 1:
        return profile
    gap = zip(_interpolated({size: gaps[size] for size in known}), profile.table[1:-1], strict=True)
    return profile.in_stages([min(1.0, between / seconds) for between, seconds in gap])


async def _all(measured: Sequence[Awaitable[_T]]) -> list[_T]:
    """What all of these return. If one fails, none of the others runs on beside what is measured next.

    A DeviceLost waits for all devices that were lost.
    """
    tasks = [asyncio.ensure_future(one) for one in measured]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    failed = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    lost = [error for error in failed if isinstance(error, DeviceLost)]

    async def back() -> bool:
        for one in lost:
            while not await one.back():
                pass
        return True

    if lost:
        raise DeviceLost(str(lost[0]), back)
    if failed:
        raise failed[0]
    return [task.result() for task in tasks]


async def _gap(run: _Run, inputs: list[Any], alone: float, stages: int) -> float:
    """The seconds from answer to answer of batches that are sent at once to a pipeline. ``alone``: those of a batch.

    It is at least half of what stages of equal length would need: less is an error of the measurement.
    """
    begin = time.monotonic()
    await _all([run(list(inputs)) for _ in range(2 * stages + 1)])
    return max((time.monotonic() - begin - alone) / (2 * stages), alone / (2 * stages))


async def _seconds(run: _Run, draws: Iterator[Any], size: int) -> float:
    """The seconds that most batches take. What is set up at the first run does not count."""
    await run(list(itertools.islice(draws, size)))
    times: list[float] = []
    while len(times) < MOST_RUNS and (len(times) < LEAST_RUNS or sum(times) < SECONDS_EACH):
        inputs = list(itertools.islice(draws, size))
        begin = time.monotonic()
        outputs, waited = as_waited(await run(inputs))
        times.append(max(time.monotonic() - begin - waited, 1e-9))
    if len(outputs) != len(inputs):
        raise ServeError(f"it returned {len(outputs)} outputs for {len(inputs)} inputs")
    return high_quantile(times, RUN_QUANTILE)


def _interpolated(known: Mapping[int, float]) -> list[float]:
    """The seconds of each size up to the largest, made so that they never fall."""
    sizes = sorted(known)
    table = [known[sizes[0]]]
    for smaller, larger in itertools.pairwise(sizes):
        begin, end = table[-1], max(table[-1], known[larger])
        table += [begin + (end - begin) * step / (larger - smaller) for step in range(1, larger - smaller + 1)]
    return table


async def _delays_on(work: Callable[[], Awaitable[object]]) -> Delays:
    """As `measure_delays`; once more, if the device is lost meanwhile, when it is back."""
    try:
        return await measure_delays(work)
    except DeviceLost as lost:
        logger.warning("A device was lost (%s) while the delays were measured; they are measured again", lost)
        while not await lost.back():
            pass
    return await measure_delays(work)


async def measure_delays(work: Callable[[], Awaitable[object]]) -> Delays:
    """The delays of this event loop while a device works.

    ``response``: the way from one task to another and back. ``jitter``: how late the loop wakes.
    """
    ends = False

    async def keep_working() -> None:
        while not ends:
            await work()

    async def answer() -> None:
        while True:
            back.put_nowait(await there.get())

    there: asyncio.Queue[int] = asyncio.Queue()
    back: asyncio.Queue[int] = asyncio.Queue()
    works, answers = asyncio.create_task(keep_working()), asyncio.create_task(answer())
    late, ways = [], []
    try:
        for number in range(WAKES):
            begin = time.monotonic()
            await asyncio.sleep(SLEEP_S)
            woken = time.monotonic()
            late.append(max(0.0, woken - begin - SLEEP_S))
            there.put_nowait(number)
            await back.get()
            ways.append(time.monotonic() - woken)
    finally:
        ends = True
        answers.cancel()
        await asyncio.wait({works, answers})
    works.result()
    return Delays(response=high_delay(ways), jitter=high_delay(late))


def high_delay(values: list[float]) -> float:
    """The value that only 1 - `DELAY_QUANTILE` of the values exceed."""
    return sorted(values)[int(DELAY_QUANTILE * (len(values) - 1))]

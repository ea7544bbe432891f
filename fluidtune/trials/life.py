"""The record of one trial's life in the driver, with its workers, its losses and what Tune has seen of its results.

Nothing is decided here: `lifecycle`, `calls`, `resizes` and `recoveries` decide.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

from fluidtune.engine import messages as engine
from fluidtune.engine.messages import Kind
from fluidtune.engine.reasons import Why
from fluidtune.group_facts import GroupFacts
from fluidtune.trials.life_states import CHANGES, HELD, PLACES, WISHES, Change, Place, Wish
from fluidtune.trials.messages import Call, Event, Instruction, Outside, Worker

#: How many of its latest events an error of a trial's life shows.
STORY_LENGTH = 20
#: A trial whose workers die this many times without one iteration done in between is itself at fault. Of its followers,
#: the resizes count whose workers fail without one iteration of as many in between.
MAX_DEATHS = 3
#: A trial is failed, too, when it loses this many workers through the cluster's fault without one iteration done in
#: between: before they had started, or together with their node.
MAX_MISSES = 10


class LifeError(RuntimeError):
    """An event that cannot be true, which means that the shell has an error.

    The message has the trial's state and its latest events, each with the states after it, oldest first.
    """

    def __init__(self, life: TrialStateMachine, what: str) -> None:
        story = [f"  {event} -> {place}, {change}, {wish}" for event, place, change, wish in life.story]
        if life.under_way:
            story.append(f"  {life.under_way}")
        super().__init__(
            f"trial {life.trial}: {what}, while it is {life.place}, {life.crew.change}, {life.wish}. Its latest "
            "events, with the states after each:\n" + "\n".join(story)
        )


@dataclass(eq=False)
class Losses:
    """The losses of one trial since its last iteration."""

    #: How many of its workers died, as far as is known through its own fault.
    deaths: int = 0
    #: How many workers it lost through the cluster's fault.
    misses: int = 0
    #: Why the trial last left its workers, in words.
    last: str = ""

    def count_death(self, *, started: bool, device_there: bool) -> bool:
        """A worker of the trial died; ``started``: it had started before. Returns whether that was too often."""
        if started and device_there:
            self.deaths += 1
        else:
            self.misses += 1
        return self.deaths >= MAX_DEATHS or self.misses >= MAX_MISSES

    def forgive(self) -> None:
        """The trial has done an iteration."""
        self.deaths = self.misses = 0


@dataclass(eq=False)
class SeenResults:
    """What Tune has seen of a trial's results, by FluidTune's own count.

    A new leader goes by it: iterations that Tune has seen run again without being reported, unless Tune retries the
    trial after a failure.
    """

    #: The trainable's own count of iterations at the newest result that Tune has seen.
    delivered: int = 0
    #: How many results Tune has seen. More than ``delivered`` where iterations were reported again after a failure.
    results: int = 0
    #: ``training_iteration`` of the newest result, as the trial reports it: not a count where the user sets it.
    number: Any = 0
    #: The user reports numbers of his own as ``training_iteration``.
    own_numbers: bool = False
    #: Tune retries the trial after a failure: iterations that run again are reported again, as under stock Tune.
    retried: bool = False

    def note_result(self, iteration: int, number: Any) -> dict[str, Any]:
        """The leader has a result. ``iteration``: the trainable's own count; ``number``: its ``training_iteration``.

        Returns what is to be kept with the trial when Tune gets the result.
        """
        self.delivered, self.number = iteration, number
        self.results += 1
        self.own_numbers = self.own_numbers or number != iteration
        self.retried = False
        return {"delivered": iteration, "results": self.results, "own_numbers": self.own_numbers}

    def iterations_to(self, target: float | None, checkpoint: Any) -> float | None:
        """How many iterations the trial has left until its ``training_iteration`` is ``target``; None: not known.

        ``checkpoint``: ``training_iteration`` of the newest checkpoint that Tune has, from which a retry goes on; 0 if
        Tune has none.
        """
        if target is None:
            return None
        number = checkpoint if self.retried else self.number
        number = number if isinstance(number, (int, float)) else 0
        step = number / self.delivered if self.own_numbers and self.delivered and number > 0 else 1.0
        return max(0.0, float(target - number) / step)


@dataclass(eq=False)
class Crew:
    """The workers of one trial, and what is known of them as a group.

    Which devices the trial holds is the engine's to say (`Engine.held_devices`). ``devices`` here are those where its
    workers are: during a resize the workers are still on the old devices, while the trial holds old and new ones.
    """

    #: Devices of its workers, the leader's first.
    devices: tuple[int, ...] = ()
    #: The part of each device that the trial was given.
    share: float = 1.0
    #: Devices of its workers when the resize under way is done; without a resize, equal to ``devices``.
    wanted: tuple[int, ...] = ()
    #: Why the engine has chosen ``wanted``. Set once the trial has had a place.
    why: Why | None = None
    leader: Worker | None = None
    #: The leader computes an answer that nobody waits for any more.
    computes: bool = False
    #: The workers that follow it, by device.
    followers: dict[int, Worker] = field(default_factory=dict)
    change: Change = "steady"
    #: Devices whose workers are to become followers. Empty unless ``attaching``.
    awaited: set[int] = field(default_factory=set)
    #: By device, those of these workers that are found.
    joining: dict[int, Worker] = field(default_factory=dict)
    #: Why the last worker of the resize under way that did not become a follower did not, in words.
    failed: str = ""
    #: Number of the newest resize.
    generation: int = 0
    #: What its leader knew of itself when it was loaded, and then at its newest result; the defaults while there is no
    #: leader.
    facts: GroupFacts = field(default_factory=GroupFacts)
    #: The trial must not have several workers again.
    growth_ended: bool = False
    #: How many workers it had, the lost one included, when a follower failed last, and the numbers of the resizes whose
    #: workers have failed since so many workers did an iteration.
    failed_at: int = 0
    failed_growths: set[int] = field(default_factory=set)

    @property
    def width(self) -> int:
        """How many workers take part at the moment."""
        return 1 + len(self.followers)

    @property
    def ran_at(self) -> float | None:
        """The width of its last iteration: workers, or its share of one device. None: it changed meanwhile."""
        alone = self.share if self.width == 1 else 1.0
        return {0: None, 1: alone}.get(self.facts.width, float(self.facts.width))

    def note_devices(self) -> None:
        """Workers have come or gone: keep ``devices`` right."""
        order = dict.fromkeys((*self.devices, *self.wanted))
        self.devices = tuple(device for device in order if device == self.devices[0] or device in self.followers)


@dataclass(eq=False)
class TrialStateMachine:
    """A trial from the moment Tune asks for its actor until Tune lets go of it, or it fails.

    One thing: what other modules change of a trial, they change here, where its three states are kept legal.

    ``trial``: its id. ``outside``: what it may read of its surroundings.
    """

    trial: str
    outside: Outside
    kind: Kind
    seen: SeenResults
    #: It, or another trial of its trainable, has shown that it can have several workers.
    growable: bool = False
    #: It needs several devices. It has one process, and is never resized.
    gang: bool = field(init=False)
    place: Place = "queued"
    wish: Wish = "stay"
    #: Why it is to leave its devices, in words.
    leaves_for: str = ""
    #: Where it was when Tune let go of it; None before.
    released_from: Place | None = None
    #: How many times the engine has given it devices.
    placements: int = 0
    #: How many times it became live. After the first one, Tune does not notice.
    times_live: int = 0
    #: The iteration where it has waited in its process, and where Tune wants it restored; None: it need be, if asked.
    stands_at: int | None = None
    #: Iterations that its leader has done since the trial was loaded into it.
    done_here: int = 0
    #: It ran out of its GPU's memory, of which others held some. The next time the lack is its own.
    squeezed: bool = False
    crew: Crew = field(default_factory=Crew)
    losses: Losses = field(default_factory=Losses)
    #: Calls that are not answered, oldest first.
    calls: deque[Call] = field(default_factory=deque)
    #: What its leader would answer to ``save`` now, if that came with its newest result.
    saved: Any = None
    #: The random streams with which the trial's code began.
    streams: Any = None
    #: Its latest events, with the states after each.
    story: deque[tuple[str, Place, Change, Wish]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))
    #: The event that is being handled, in words; "" between events.
    under_way: str = ""
    #: What the event under way has the shell do so far.
    orders: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gang = self.outside.needs_several()

    def order(self, *instructions: Instruction) -> None:
        """The shell is to carry these out, after those before."""
        self.orders += instructions

    def go(self, place: Place) -> None:
        """Change the place. Raises LifeError if the event under way causes no such change."""
        if self.under_way.partition("(")[0] not in PLACES.get((self.place, place), "").split(", "):
            raise LifeError(self, f"it cannot become {place}")
        self.place = place

    def turn(self, change: Change) -> None:
        """Change what the group does. Raises LifeError if there is no such change."""
        if self.crew.change != change:
            if (self.crew.change, change) not in CHANGES:
                raise LifeError(self, f"its group cannot become {change}")
            self.crew.change = change

    def ask_to(self, wish: Wish) -> None:
        """Change the wish."""
        if self.wish != wish:
            assert (self.wish, wish) in WISHES
            self.wish = wish

    @property
    def over(self) -> bool:
        """Tune does not want it to run any more, or it has failed."""
        return self.place in ("released", "ended")

    @property
    def has_place(self) -> bool:
        """It has devices from the engine, and has not left them."""
        return self.place in HELD

    def expects(self, by: Call | Worker) -> bool:
        """An answer to this call, or to the loading in this worker, is still of interest."""
        if isinstance(by, Call):
            return by.issued and by in self.calls
        return self.place == "loading" and self.crew.leader is by

    def wants_leader(self, placement: int) -> bool:
        """It still waits for the worker that it asked for with this placement."""
        return self.place == "placed" and self.placements == placement

    def wants_joiner(self, device: int, generation: int) -> bool:
        """It still waits for a new worker of this device for this resize."""
        return self.crew.generation == generation and device in self.crew.awaited

    def at_own_checkpoint(self) -> bool:
        """The newest checkpoint that Tune has is of the newest iteration: nothing would be lost by moving."""
        checkpoint = self.outside.newest_checkpoint()
        return checkpoint is not None and checkpoint.number == self.seen.number

    def iterations_to(self, target: float | None) -> float | None:
        """How many iterations are left until the trial's ``training_iteration`` is ``target``; None: not known."""
        checkpoint = self.outside.newest_checkpoint()
        return self.seen.iterations_to(target, checkpoint.number if checkpoint else 0)

    @property
    def movable(self) -> bool:
        """Nothing is lost by moving now: it has done nothing since it was loaded, or its newest iteration is saved."""
        return not self.done_here or self.at_own_checkpoint() or self.commits

    @property
    def commits(self) -> bool:
        """It commits when it is unloaded."""
        return self.kind == "elastic" and self.outside.commits


@singledispatch
def on_event(event: Event | engine.Instruction, life: TrialStateMachine) -> None:
    """Change the life for one event; `lifecycle` names the modules with its functions. LifeError for anything else."""
    raise LifeError(life, f"{event!r} is not an event of a trial's life; see fluidtune.trials.messages")

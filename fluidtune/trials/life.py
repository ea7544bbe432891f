"""The record of one trial's life in the driver, and the changes that keep it consistent.

Nothing is decided here: `lifecycle`, `calls`, `resizes` and `recoveries` decide.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fluidtune.engine.messages import Kind
from fluidtune.trials.crew import Crew
from fluidtune.trials.life_states import CHANGES, HELD, PLACES, WISHES, Change, Place, Wish
from fluidtune.trials.losses import Losses
from fluidtune.trials.messages import Call, Event, Instruction, Outside, Worker
from fluidtune.trials.seen_results import SeenResults

#: How many of its latest events an error of a trial's life shows. Judgement: a resize that fails takes about ten.
STORY_LENGTH = 20


class LifeError(RuntimeError):
    """An event that cannot be true, which means that the shell has an error.

    The message has the trial's state and its latest events, each with the states after it, oldest first.
    """

    def __init__(self, life: TrialLife, what: str) -> None:
        story = [f"  {event} -> {place}, {change}, {wish}" for event, place, change, wish in life.story]
        if life.under_way:
            story.append(f"  {life.under_way}")
        super().__init__(
            f"trial {life.trial}: {what}, while it is {life.place}, {life.crew.change}, {life.wish}. Its latest "
            "events, with the states after each:\n" + "\n".join(story)
        )


@dataclass(eq=False)
class TrialLife:
    """A trial from the moment Tune asks for its actor until Tune lets go of it, or it fails.

    ``trial``: its id. ``outside``: what it may read of its surroundings. ``gang``: it asked for several devices; one
    process sees them all, and it is never resized.
    """

    trial: str
    outside: Outside
    gang: bool
    kind: Kind
    seen: SeenResults
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
    #: The random streams with which the trial's code began, for its joiners.
    streams: Any = None
    #: Its latest events, with the states after each.
    story: deque[tuple[str, Place, Change, Wish]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))
    #: The event that is being handled, in words; "" between events.
    under_way: str = ""
    _orders: list[Instruction] = field(default_factory=list)

    def order(self, *instructions: Instruction) -> None:
        """The shell is to carry these out, after those before."""
        self._orders += instructions

    def take_orders(self) -> list[Instruction]:
        """What the shell is to carry out now."""
        orders, self._orders = self._orders, []
        return orders

    def begin(self, event: Event) -> None:
        """The event is being handled from now on."""
        self.under_way = event.outline()

    def end(self) -> None:
        """The event was handled."""
        self.story.append((self.under_way, self.place, self.crew.change, self.wish))
        self.under_way = ""

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

    @property
    def movable(self) -> bool:
        """Nothing is lost by moving now: it has done nothing since it was loaded, or its newest iteration is saved."""
        return not self.done_here or self.at_own_checkpoint() or self.commits

    @property
    def commits(self) -> bool:
        """It commits when it is unloaded."""
        return self.kind == "elastic" and self.outside.commits

    def validate(self) -> None:
        """Assert every invariant."""
        crew = self.crew
        crew.validate()
        led = self.released_from if self.place == "released" else self.place
        assert (crew.leader is not None) == (led in ("loading", "live")), self
        assert led == "live" or (crew.change == "steady" and crew.facts.address is None), self
        assert not any(call.issued for call in list(self.calls)[led == "live" :]), self
        assert self.place != "released" or self.released_from is not None, self

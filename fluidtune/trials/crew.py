"""The workers of one trial: its leader, its followers, and those that are to become followers."""

from __future__ import annotations

from dataclasses import dataclass, field

from fluidtune.engine.reasons import Why
from fluidtune.group_facts import GroupFacts
from fluidtune.trials.life_states import Change
from fluidtune.trials.messages import NewGroup, Worker


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
    #: How many workers take part at the moment.
    width: int = 1
    leader: Worker | None = None
    #: The other members of its group, by device.
    followers: dict[int, Worker] = field(default_factory=dict)
    change: Change = "steady"
    #: Devices whose workers are to become followers. Empty unless the group is ``gathering``.
    awaited: set[int] = field(default_factory=set)
    #: By device, the workers that run the trial's code up to where they can enter the group.
    joining: dict[int, Worker] = field(default_factory=dict)
    #: Devices whose workers have got there.
    ready: set[int] = field(default_factory=set)
    #: Number of the newest resize.
    generation: int = 0
    #: The group that the leader is to be told of with the next iteration. Set exactly while it is ``announced``.
    announced: NewGroup | None = None
    #: What its leader knew of it at its newest result; the defaults while there is no leader.
    facts: GroupFacts = field(default_factory=GroupFacts)
    #: The trial must not have several workers again.
    growth_ended: bool = False
    #: How many of its followers ended by an error of their own.
    follower_errors: int = 0

    def members(self) -> dict[int, Worker]:
        """The workers of its group by device, the leader's first."""
        leader = {} if self.leader is None else {self.leader.device: self.leader}
        return {**leader, **self.followers}

    @property
    def ran_at(self) -> float:
        """The width of its last iteration: workers, or its share of one device."""
        return self.width if self.width > 1 else self.share

    def validate(self) -> None:
        """Assert what holds of the group after every event."""
        assert (self.change == "gathering") == bool(self.awaited), self
        assert (self.change == "announced") == (self.announced is not None), self
        assert self.joining.keys() <= self.awaited and self.ready <= self.awaited, self
        assert self.leader is not None or not (self.followers or self.awaited or self.facts.address), self
        assert self.leader is not None or self.change == "steady", self
        assert not self.followers.keys() & self.joining.keys(), self

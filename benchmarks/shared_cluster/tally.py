"""What became of the GPUs on offer in the rounds of a simulated arbiter: a policy that counts its own decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from themis_bridge.auction import Bid
from themis_bridge.policy import Outcome, Policy, Situation, whole


@dataclass
class Tally:
    """What has become of the GPUs on offer in all rounds. All are numbers of rounds or of GPUs."""

    #: Rounds in which apps bid.
    auctions: int = 0
    #: Of these, the rounds with several bids.
    contested: int = 0
    #: GPUs that bidders won.
    won: int = 0
    #: Of these, the GPUs that they kept; the others were their payments.
    kept: int = 0
    #: GPUs that apps were given without having won them.
    leftovers: int = 0
    #: GPUs that stayed with their holder although another app would have got them.
    overridden: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count a round."""
        self.leftovers += len(outcome.leftovers)
        self.overridden += len(outcome.overridden)
        clearing = outcome.clearing
        if clearing is None:
            return
        won = {app: len(gpus) for app, gpus in clearing.proportional.items()}
        kept = {app: len(gpus) for app, gpus in clearing.allocation.items()}
        self.auctions += bool(won)
        self.contested += len(won) > 1
        self.won += sum(won.values())
        self.kept += sum(kept.values())


@dataclass
class Counted:
    """The policy with a tally."""

    policy: Policy
    tally: Tally = field(default_factory=Tally)

    @property
    def recalls(self) -> bool:
        return self.policy.recalls

    def bidders(self, situation: Situation) -> list[str]:
        return self.policy.bidders(situation)

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> Outcome:
        outcome = whole(situation, self.policy.decide(situation, bids))
        self.tally.add(outcome)
        return outcome

"""What became of the GPUs on offer in the rounds of a simulated arbiter: a policy that counts its own decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from themis_bridge.auction import Bid, clear_auction
from themis_bridge.policy import Policy, Situation


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


@dataclass
class Counted:
    """The policy with a tally."""

    policy: Policy
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.recalls = self.policy.recalls

    def bidders(self, situation: Situation) -> list[str]:
        return self.policy.bidders(situation)

    def decide(self, situation: Situation, bids: Mapping[str, Bid]) -> dict[str, str]:
        if bids:
            # The policy clears the same auction, and gets the same.
            clearing = clear_auction(bids.values(), situation.offer)
            self.tally.auctions += 1
            self.tally.contested += len(bids) > 1
            self.tally.won += sum(map(len, clearing.proportional.values()))
            self.tally.kept += sum(map(len, clearing.allocation.values()))
        return self.policy.decide(situation, bids)

"""The calls of one module: which are divided, which stay whole, and why.

It stands where torch looks for a compiled call of a module (`torch_private.answering`). There a call of the module
finds it, and a copy or a pickle of the module does not have it.
"""

from __future__ import annotations

import hashlib
import random
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fluidtune.device_kinds import on_accelerator
from fluidtune.error_lines import failure

from .call import Asked, Call, Replica, Undivided, patience
from .checks import Question, apart_from
from .computation import Streams
from .description import Description, Nothing
from .flags import flags_now, odd_mode
from .followers import Followers, Peer
from .meeting import Lost
from .parts import Rule, sizes_of
from .tensor_link import Message
from .torch_private import answering, computed, have_answer
from .trees import StaysWhole, Tree, tree_of
from .weights import PublishedWeights

#: One in so many calls that could be divided is checked again.
AGAIN = 100
#: Of this many calls, at most half may be checks: with more, growth gains nothing, as each call is of another kind.
_RECENT = 50
#: Of so many numbers of samples, each is checked: what a forward does may depend on their number.
_SIZES = 6
#: Divided calls after which their seconds are compared with those of the whole.
_TIMED = 8


#: Modules that the user keeps whole.
_kept_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def keep_whole(module: nn.Module) -> nn.Module:
    """Have the module's calls never divided; returns the module. (``FluidExecutor(max_workers=1)`` grows no trial.)

    Use it where a call depends on something that is no part of it, as a clock, a file or a server.
    """
    _kept_whole.add(module)
    return module


@dataclass(eq=False)
class _Check:
    """A call that ``peer`` checks, and what it has made here. ``shares``: see `Question`."""

    structure: bytes
    asked: Asked
    peer: Peer
    shares: list[float]
    #: What it has returned; None: an error, or what cannot be compared.
    output: Tree | None = None
    drawn: bytes = b""
    own_s: float = 0.0

    def take(self, result: Any) -> None:
        """The call has returned this here."""
        self.drawn = Streams(self.asked.described.device).digest
        with suppress(Exception):  # the follower says what is odd; for a copy there may be no memory
            found = tree_of(result, "its output", self.asked.given.classes)
            # The loop may change its tensors.
            self.output = replace(found, tensors=tuple(tensor.detach().clone() for tensor in found.tensors))


class ModuleCalls(Nothing):
    """``module``: whose calls they are. ``looking``: looks which modules are called meanwhile."""

    def __init__(
        self, module: nn.Module, followers: Followers, looking: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._module, self._followers, self._looking = weakref.ref(module), followers, looking
        self.name = type(module).__name__
        self.key = 0
        #: Its calls were refused, so that those of modules that it calls are looked at.
        self.descends = False
        self._given_up = False
        self._described: Description | None = None
        self._weights: PublishedWeights | None = None
        self._replica: Replica | None = None
        #: By structure of a call, the rule, or why it stays whole.
        self._verdicts: dict[bytes, Rule | str] = {}
        self._trusted: set[bytes] = set()
        #: By structure, the numbers of samples that were checked.
        self._samples: dict[bytes, set[int]] = {}
        self.said: set[tuple[str, str]] = set()
        self._looks = 0
        #: Calls that may still have a backward.
        self._alive: weakref.WeakSet[Call] = weakref.WeakSet()
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        #: Seconds in which it was seen whether the module has changed, and of whole and divided calls with backward.
        self._described_s = 0.0
        self._whole_s: float | None = None
        self._divided_s: deque[float] = deque(maxlen=_TIMED)
        self._latest: Call | None = None
        self._random = random.Random(0)
        weakref.finalize(module, self.let_go).atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if not self._followers.can_divide():
            return computed(module, args, kwargs)
        with self._followers.free_turn() as mine:
            started = time.perf_counter()
            found = self._tried(module, args, kwargs) if mine else None
        if isinstance(found, tuple):
            return found[0]
        self._followers.stall += time.perf_counter() - started
        if found is not None:
            return self._meanwhile(found, module, args, kwargs)
        if mine and self.descends and self._looks:
            self._looks -= 1
            with self._looking():
                return computed(module, args, kwargs)
        return computed(module, args, kwargs)

    def introduce(self, peer: Peer) -> None:
        """Send a new follower the module as it was at its latest call. Any thread that has the followers' turn."""
        described, weights = self._described, self._weights
        if described is not None and weights is not None and described.device is None and self._trusted:
            self._followers.introduce(peer, self.key, described, weights)

    def remove(self) -> None:
        """The module's calls are torch's again."""
        module = self._module()
        if module is not None and answering(module) is self:
            have_answer(module, None)
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing of the module."""
        if self._weights is not None:
            self._followers.forget(self.key)
        self._described = self._replica = self._latest = self._weights = None

    def _stays_whole(self, why: str) -> None:
        if ("whole", why) not in self.said:
            self.said.add(("whole", why))
            self._followers.checked.append((self.name, "whole", why))

    def _refuse(self, structure: bytes, why: str) -> None:
        self._verdicts[structure] = why
        self._stays_whole(why)
        self._descend()

    def _descend(self) -> None:
        self.descends, self._looks = True, 2

    # -- one call

    def _tried(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any] | _Check | None:
        """As `_divided`. An error that the whole call may not have ends the division of this module's calls."""
        if self._given_up:
            return None
        before = Streams(None)
        try:
            return self._divided(module, args, kwargs)
        except Exception as error:
            before.restore()
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        self._stays_whole(f"dividing it has failed ({failure(error)})")
        self._descend()

    def _divided(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any] | _Check | None:
        """What the call returns, if it is divided. Else it is to be computed whole, while a follower checks it, or
        none does (None)."""
        if module in _kept_whole:
            self._stays_whole("elastic.keep_whole() says so")
            return None
        odd = odd_mode(self._followers.looks)
        if odd is not None:
            self._stays_whole(odd)
            return None
        started = time.perf_counter()
        described = self._describe(module)
        self._described_s = time.perf_counter() - started
        if described is None:
            return None
        flags = flags_now()
        try:
            given = tree_of((args, kwargs), "its inputs", self._followers.classes)
        except StaysWhole as error:
            self._stays_whole(str(error))
            return None
        structure = _digest(
            described.digest,
            given.skeleton,
            [(t.dtype, t.dim(), t.requires_grad, on_accelerator(t)) for t in given.tensors],
            sorted(flags.items()),
        )
        rule = self._verdicts.get(structure)
        if isinstance(rule, str):
            return None
        peers = self._ready(described)
        rule = self._verdicts.get(structure)  # a check may have been answered
        if not peers or isinstance(rule, str):
            self._followers.undecided += not peers
            return None
        asked = Asked(described, given, flags)
        if rule is not None:
            samples = rule.samples(given)
            if samples is None or samples < 2:
                return None
            shares = self._followers.shares(min(samples, 1 + len(peers)))
            known = len(self._samples[structure]) >= _SIZES or samples in self._samples[structure]
            if known and self._signature(structure, rule, given, samples, shares) in self._trusted:
                self._recent.append(False)
                if self._random.randrange(AGAIN):
                    return self._compute(structure, rule, asked, sizes_of(samples, shares), peers)
        self._followers.undecided += 1
        return self._check(structure, rule, asked, peers)

    def _describe(self, module: nn.Module) -> Description | None:
        before = self._described
        if before is not None and before.holds():
            return before
        try:
            self._described = found = Description(module, self._followers.classes)
        except StaysWhole as error:
            self._described = None
            self._stays_whole(str(error))
            if not self.descends:
                self._descend()
            return None
        self._replica = None
        if before is None or not before.has_tensors_of(found):
            if self._weights is not None:
                self._followers.forget(self.key)
            self.key, self._weights = self._followers.new_key(), PublishedWeights(found.tensors)
        return found

    def _ready(self, described: Description) -> list[Peer]:
        """The followers that can be asked for a part, with the weights as they are."""
        assert self._weights is not None
        ready = []
        if self._followers.settle():  # one that checks a call of this module needs its weights as they were
            self._weights.publish(graphs=any(call.may_go_back for call in self._alive))
            ready = self._followers.ready(self.key, described, self._weights)
        if (why := self._followers.failed.pop(self.key, None)) is not None:
            self._stays_whole(f"it cannot be sent to another process ({why})")
        return ready

    def _signature(self, structure: bytes, rule: Rule, given: Tree, samples: int, shares: list[float]) -> bytes:
        sizes = sizes_of(samples, shares) if rule.draws or rule.statistics else None
        return _digest(structure, rule.shapes(given), sizes)

    # -- check before trust

    def _check(self, structure: bytes, known: Rule | None, asked: Asked, peers: list[Peer]) -> _Check | None:
        """Have a follower check the call; the leader computes it meanwhile."""
        self._recent.append(True)
        if len(self._recent) == _RECENT and sum(self._recent) > _RECENT // 2:
            self._refuse(structure, "each of its calls is of another kind, so that all had to be checked")
            return None
        peer, described, given = peers[0], asked.described, asked.given
        shares, streams = self._followers.shares(1 + len(peers)), Streams(described.device)
        question = Question(described.tree.skeleton, asked.needs, asked.graded, asked.flags, shares, known)
        value = {"question": question, "module": self.key, "skeleton": given.skeleton, "draws": len(streams.states)}
        try:
            peer.link.send("check", value, [*given.tensors, *streams.states])
        except Lost as error:
            peer.lost(str(error))
            return None
        check = _Check(structure, asked, peer, shares)
        peer.answered = lambda message: self._answered(check, message)
        return check

    def _meanwhile(self, check: _Check, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Compute the call that a follower checks."""
        began, classes = time.perf_counter(), len(self._followers.classes)
        try:
            result = computed(module, args, kwargs)
            check.own_s = time.perf_counter() - began
            check.take(result)
            if len(self._followers.classes) != classes:  # followers do not know a class of the output
                self._described = check.output = None
        finally:
            if check.peer.answered is not None:
                check.peer.deadline = time.monotonic() + patience(time.perf_counter() - began)
        if self._followers.patient:
            with self._followers.free_turn() as mine:
                if mine:
                    self._followers.settle()
        return result

    def _answered(self, check: _Check, message: Message) -> None:
        """A follower has checked a call."""
        try:
            if message.kind == "divided":
                self._trust(check, message)
            elif message.kind != "unknown":
                why = message.value if message.kind == "undivided" else f"its check has failed ({message.value})"
                self._refuse(check.structure, why)
                check.peer.classes = None  # what they leave behind is there, and not here
        except Exception as error:
            self._give_up(error)

    def _trust(self, check: _Check, message: Message) -> None:
        said, own, asked = message.value, check.output, check.asked
        if own is None:
            return
        apart = apart_from(own, Tree(said.skeleton, tuple(message.tensors), own.classes), asked.flags)
        if apart is None and said.drawn != check.drawn:
            apart = "its random numbers differ"
        if apart is not None:
            self._refuse(check.structure, f"another process computes something else: {apart}")
            return
        forward_s, backward_s = said.seconds
        if asked.described.device is None:  # the other process has computed such a call for the first time
            backward_s *= check.own_s / forward_s
            forward_s = check.own_s
        whole_s = forward_s + backward_s
        self._whole_s = min(whole_s, self._whole_s or whole_s)
        if self._followers.pays and self._described_s > self._whole_s:
            looks, itself = 1000 * self._described_s, 1000 * self._whole_s
            self._given_up = True
            why = f"to look whether it has changed takes {looks:.3g} ms, and itself {itself:.3g} ms"
            self._refuse(check.structure, why)
            return
        rule = self._verdicts[check.structure] = said.rule
        samples = rule.samples(asked.given)
        self._trusted.add(self._signature(check.structure, rule, asked.given, samples, check.shares[:samples]))
        self._samples.setdefault(check.structure, set()).add(samples)
        if ("divided", "") not in self.said:
            self.said.add(("divided", ""))
            self._followers.checked.append((self.name, "divided", ""))

    # -- trusted calls

    def _compute(
        self, structure: bytes, rule: Rule, asked: Asked, sizes: list[int], peers: list[Peer]
    ) -> tuple[Any] | None:
        self._weigh(structure)
        if isinstance(self._verdicts[structure], str):
            return None
        replica = self._replica = self._replica or Replica(asked.described)
        replica.refresh()
        call = Call(replica, self.key, asked, rule, sizes, peers[: len(sizes) - 1])
        if call.graded:
            self._alive.add(call)
        try:
            call.forward()
        except Undivided as error:
            if error.lasting:
                self._refuse(structure, str(error))
            self._followers.undecided += 1
            return None
        self._followers.divided += 1
        self._followers.note_paces(call.own_s / sizes[0], call.forward_s, peers)
        try:
            found = (call.result(),)
        except Exception:
            call.take_back()
            raise
        self._latest = call
        return found

    def _weigh(self, structure: bytes) -> None:
        """Where divided calls are no faster than whole ones were, later ones stay whole."""
        latest, self._latest = self._latest, None
        if latest is None or not self._followers.pays or self._whole_s is None:
            return
        if latest.graded and not latest.backward_s:
            return
        self._divided_s.append(self._described_s + latest.forward_s + latest.backward_s)
        if len(self._divided_s) == _TIMED:
            usual = sorted(self._divided_s)[_TIMED // 2]
            self._divided_s.clear()
            if usual > self._whole_s:
                whole, divided = 1000 * self._whole_s, 1000 * usual
                self._verdicts[structure] = "it is not faster"
                self._stays_whole(f"it takes {divided:.3g} ms divided and {whole:.3g} ms whole")


def _digest(*values: Any) -> bytes:
    return hashlib.sha1(repr(values).encode()).digest()

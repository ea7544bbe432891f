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
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fluidtune.error_lines import failure

from . import checks
from .call import Call, Streams, Twin, Undivided
from .description import CannotBeSent, Description, Nothing
from .flags import Flags, flags_now, odd_mode
from .followers import Follower, Followers
from .parts import Odd, Rule, Tree, parts_of, tree_of
from .torch_private import answering, computed, have_answer
from .weights import PublishedWeights

#: One in so many divided calls is looked at again: its output is compared with that of the whole.
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
        self._twin: Twin | None = None
        #: By structure of a call, the rule, or why it stays whole.
        self._verdicts: dict[bytes, Rule | str] = {}
        self._trusted: set[bytes] = set()
        #: By structure, the numbers of samples that were checked.
        self._samples: dict[bytes, set[int]] = {}
        self.said: set[tuple[str, str]] = set()
        self._looks = 0
        #: Keys of calls that may still have a backward.
        self._alive: set[int] = set()
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
        if self._followers.can_divide():
            with self._followers.free_turn() as mine:
                started = time.perf_counter()
                found = self._tried(module, args, kwargs) if mine else None
            if found is not None:
                return found[0]
            self._followers.stall += time.perf_counter() - started
            if mine and self.descends and self._looks:
                self._looks -= 1
                with self._looking():
                    return computed(module, args, kwargs)
        return computed(module, args, kwargs)

    def introduce(self, peer: Follower) -> None:
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
            self._weights.close()
            self._followers.forget(self.key)
        self._described = self._twin = self._latest = None

    def _stays_whole(self, why: str) -> None:
        if ("whole", why) not in self.said:
            self.said.add(("whole", why))
            self._followers.note(self.name, "whole", why)

    def _refuse(self, structure: bytes, why: str) -> None:
        self._verdicts[structure] = why
        self._stays_whole(why)
        self._descend()

    def _descend(self) -> None:
        self.descends, self._looks = True, 2

    # -- one call

    def _tried(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any] | None:
        """As `_divided`. An error that the whole call may not have ends the division of this module's calls."""
        if self._given_up:
            return None
        before = Streams(None)
        try:
            return self._divided(module, args, kwargs)
        except Exception as error:
            before.restore()
            self._given_up = True
            self._stays_whole(f"dividing it has failed ({failure(error)})")
            self._descend()
            return None

    def _divided(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any] | None:
        """What the call returns, if it is divided; None: it is to be computed whole."""
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
            given = tree_of((args, kwargs), "inputs", self._followers.classes)
        except Odd as error:
            self._stays_whole(str(error))
            return None
        structure = _digest(
            described.digest,
            given.skeleton,
            [(t.dtype, t.dim(), t.requires_grad, t.is_cuda) for t in given.tensors],
            sorted(flags.items()),
        )
        verdict = self._verdicts.get(structure)
        if isinstance(verdict, str):
            return None
        peers = self._ready(described)
        if not peers:
            self._followers.undecided += 1
            return None
        samples = None if verdict is None else verdict.samples(given, (args, kwargs))
        if verdict is not None and (samples is None or samples < 2):
            return None
        if (
            verdict is None
            or self._signature(structure, verdict, given, samples, peers) not in self._trusted
            or (samples not in self._samples[structure] and len(self._samples[structure]) < _SIZES)
        ):
            self._followers.undecided += 1
            self._check(structure, verdict, described, given, (args, kwargs), flags, peers)
            return None
        self._recent.append(False)
        return self._compute(structure, verdict, described, given, (args, kwargs), flags, peers)

    def _describe(self, module: nn.Module) -> Description | None:
        before = self._described
        if before is not None and before.holds():
            return before
        try:
            self._described = found = Description(module, self._followers.classes)
        except CannotBeSent as error:
            self._described = None
            self._stays_whole(str(error))
            if not self.descends:
                self._descend()
            return None
        self._twin = None
        if before is None or not before.has_tensors_of(found):
            if self._weights is not None:
                self._weights.close()
                self._followers.forget(self.key)
            self.key, self._weights = self._followers.new_key(), PublishedWeights(found.tensors)
        return found

    def _ready(self, described: Description) -> list[Follower]:
        assert self._weights is not None
        self._weights.publish(graphs=bool(self._alive))
        failed: list[str] = []
        ready = self._followers.ready(self.key, described, self._weights, failed)
        for why in failed:
            self._stays_whole(f"it cannot be sent to another process ({why})")
        return ready

    def _signature(
        self, structure: bytes, rule: Rule, given: Tree, samples: int | None, peers: list[Follower]
    ) -> bytes:
        sizes = self._followers.sizes(samples or 0, peers) if rule.draws or rule.statistics else None
        return _digest(structure, rule.shapes(given), sizes)

    def _call(
        self,
        own: Twin,
        described: Description,
        given: Tree,
        arguments: Any,
        rule: Rule,
        flags: Flags,
        peers: list[Follower],
        probe: bool = False,
    ) -> Call | None:
        samples = rule.samples(given, arguments)
        if samples is None or samples < 2:
            return None
        sizes = self._followers.sizes(samples, peers)
        key = self._followers.new_key()
        return Call(
            key,
            own,
            described,
            given,
            parts_of(given, arguments, rule, sizes),
            rule,
            sizes,
            peers[: len(sizes) - 1],
            flags,
            self.key,
            self._followers.turn,
            self._over,
            probe,
        )

    def _over(self, key: int) -> None:
        self._alive.discard(key)
        self._followers.drop(key)

    # -- check before trust

    def _check(
        self,
        structure: bytes,
        known: Rule | None,
        described: Description,
        given: Tree,
        arguments: Any,
        flags: Flags,
        peers: list[Follower],
    ) -> None:
        self._recent.append(True)
        if len(self._recent) == _RECENT and sum(self._recent) > _RECENT // 2:
            self._refuse(structure, "each of its calls is of another kind, so that all had to be checked")
            return
        classes = self._followers.classes
        before = len(classes)
        try:
            twin = Twin(described, copies=True, all_copies=True)
        except Exception as error:
            self._refuse(structure, f"no copy of it can be made ({failure(error)})")
            return
        try:
            whole = checks.computed_whole(twin, described, given, flags, classes)
            if len(classes) != before:  # followers do not know a class of the output: they are sent it first
                self._described = None
                return

            def divide(rule: Rule) -> Call | None:
                return self._call(twin, described, given, arguments, rule, flags, peers, probe=True)

            rule = checks.find_rule(whole, twin, described, given, arguments, flags, known, divide)
        except checks.Later:
            return
        except checks.CannotDivide as error:
            self._refuse(structure, str(error))
            return
        self._whole_s = min(whole.seconds, self._whole_s or whole.seconds)
        if self._followers.pays and self._described_s > self._whole_s:
            looks, itself = 1000 * self._described_s, 1000 * self._whole_s
            self._given_up = True
            self._refuse(structure, f"to look whether it has changed takes {looks:.3g} ms, and itself {itself:.3g} ms")
            return
        self._verdicts[structure] = rule
        samples = rule.samples(given, arguments)
        self._trusted.add(self._signature(structure, rule, given, samples, peers))
        self._samples.setdefault(structure, set()).add(samples or 0)
        if ("divided", "") not in self.said:
            self.said.add(("divided", ""))
            self._followers.note(self.name, "divided", "")

    # -- trusted calls

    def _compute(
        self,
        structure: bytes,
        rule: Rule,
        described: Description,
        given: Tree,
        arguments: Any,
        flags: Flags,
        peers: list[Follower],
    ) -> tuple[Any] | None:
        self._weigh(structure)
        if isinstance(self._verdicts[structure], str):
            return None
        twin = self._twin = self._twin or Twin(described, copies=False)
        twin.refresh()
        before = Streams(described.device) if self._random.randrange(AGAIN) == 0 else None
        call = self._call(twin, described, given, arguments, rule, flags, peers)
        if call is None:
            return None
        if call.graded:
            self._alive.add(call.key)
        try:
            outputs = call.forward()
        except Undivided as error:
            if error.lasting:
                self._refuse(structure, str(error))
            self._followers.undecided += 1
            return None
        self._followers.divided += 1
        self._followers.note_paces(call, peers)
        if before is not None and not self._is_right(before, outputs, described, given, flags):
            call.take_back()
            self._refuse(structure, "it mixes samples: its output differs from that of the whole batch")
            return None
        try:
            found = (call.result(),)
        except Exception:
            call.take_back()
            raise
        self._latest = call
        return found

    def _is_right(self, before: Streams, outputs: Any, described: Description, given: Tree, flags: Flags) -> bool:
        """Whether the output is that of the whole batch."""
        after = Streams(described.device)
        before.restore()
        try:
            still = {**flags, "grad": False}
            whole = checks.computed_again(Twin(described, copies=True), given, still)
        except checks.CannotDivide:
            return False
        finally:
            after.restore()
        ours = outputs.joined()
        return len(ours) == len(whole) and all(
            checks.difference(own, other, flags) is None for own, other in zip(ours, whole, strict=True)
        )

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

"""The leader's store, as the members of a group use it: what they write is signed, what is not signed is not there."""

from __future__ import annotations

import torch.distributed as dist

from .signing import Signer


class SignedStore:
    """``store``: the store, or a part of it; ``where`` names the part, so that no value counts in another one.

    Its methods raise RuntimeError if the store is gone.
    """

    def __init__(self, store: dist.Store, signer: Signer, where: str = "") -> None:
        #: For a collective library, which signs nothing.
        self.unsigned = store
        self._signer = signer
        self._where = where

    def say(self, key: str, value: bytes = b"1") -> None:
        """Write a value that the other members may rely on."""
        self.unsigned.set(key, self._signer.sign(self._where + key, value))

    def heard(self, key: str) -> bytes | None:
        """What a member has said under this key; None: nothing so far."""
        return self._signed(key) if self.unsigned.check([key]) else None

    def all_said(self, keys: list[str]) -> bool:
        """Whether members have said something under all of these keys."""
        return self.unsigned.check(keys) and all(self._signed(key) is not None for key in keys)

    def _signed(self, key: str) -> bytes | None:
        return self._signer.value_of(self._where + key, self.unsigned.get(key))

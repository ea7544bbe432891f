"""The secret of a trial: by it a trial's workers tell each other's words from those of a stranger.

The driver makes a secret for every trial and gives it to the trial's workers through Ray. What one of them writes where
others could write, too, is signed: HMAC-SHA256 (RFC 2104) over what it is about and over the value. Nothing is
unpickled, or acted upon, before its signature was found right. Signing hides nothing: who reads the network reads the
values, and may repeat a value, with its signature, about the same thing.
"""

from __future__ import annotations

import functools
import hmac
import logging
import secrets

#: Bytes of a secret. RFC 2104, section 3: at least as long as the hash's output, which is 32 bytes for SHA-256.
SECRET_SIZE = 32
#: Bytes of a signature: the output of SHA-256.
SIGNATURE_SIZE = 32

log = logging.getLogger(__name__)


def new_secret() -> bytes:
    """A secret for one trial."""
    return secrets.token_bytes(SECRET_SIZE)


#: The secret of a signer that is given none: of this process, and of those that it forks once it has one.
_own = functools.cache(new_secret)


class Signer:
    """Signs and checks by one secret. ``secret`` empty: one that no other machine has, so that no worker can join."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret or _own()
        #: How many values were refused so far.
        self.refused = 0

    def signature(self, about: str, value: bytes) -> bytes:
        """`SIGNATURE_SIZE` bytes that only a holder of the secret can make. ``about``: where the value belongs."""
        named = about.encode()
        return hmac.digest(self._secret, len(named).to_bytes(4, "little") + named + value, "sha256")

    def matches(self, about: str, value: bytes, signature: bytes) -> bool:
        """Whether this is the value's signature, in a time that does not depend on where it differs."""
        return hmac.compare_digest(signature, self.signature(about, value))

    def refuse(self, what: str) -> None:
        """Count what a stranger sent. The first one is logged, in one line."""
        self.refused += 1
        if self.refused == 1:
            log.warning(
                "%s does not have this trial's signature and is ignored: a stranger reaches the trial's ports "
                "(see docs/security.md); further ones are only counted",
                what,
            )

"""Which version two peers speak, and whether they fit together at all."""

import hmac
import time

from lynxkv.wire.events import Hello, Refused
from lynxkv.wire.fingerprint import difference

HANDSHAKE_VERSION = 0
"""Version byte of the frames that carry ``hello`` and ``refused``: they never change."""

VERSIONS: tuple[int, ...] = (1,)
"""Wire versions of this release, ascending: the newest and the one before it."""


def new_epoch() -> int:
    """48 bits that differ for every life of a process: milliseconds of the clock."""
    return (time.time_ns() // 1_000_000) & ((1 << 48) - 1)


def make_generation(epoch: int, attempt: int) -> int:
    """``epoch << 16 | attempt``."""
    return epoch << 16 | attempt


def negotiate(ours: Hello, theirs: Hello) -> int | Refused:
    """Newest version both speak, or why these two peers cannot talk.

    A peer without a fingerprint (a router) fits any model. The secret comes first: who does not know it learns nothing.
    """
    if ours.secret is not None and not _same(ours.secret, theirs.secret):
        return Refused("secret", "the one the nodes share", "none" if theirs.secret is None else "another one")
    common = set(ours.versions) & set(theirs.versions)
    if not common:
        return Refused("versions", str(list(ours.versions)), str(list(theirs.versions)))
    if ours.fingerprint is not None and theirs.fingerprint is not None:
        found = difference(ours.fingerprint, theirs.fingerprint)
        if found is not None:
            return Refused(*found)
    return max(common)


def _same(ours: str, theirs: str | None) -> bool:
    return theirs is not None and hmac.compare_digest(ours.encode(), theirs.encode())

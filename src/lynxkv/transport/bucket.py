"""A rate in bytes a second, kept exactly."""

import re

from lynxkv.errors import RequestError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 1024.0, "mi": 1024.0**2, "gi": 1024.0**3}
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?|)(bit|bps|b|B)?(?:/s|ps)?\s*", re.IGNORECASE)


def parse_rate(text: str) -> float:
    """Bytes a second of a rate such as ``100mbit``, ``1gbit``, ``12.5MB`` or ``800kbit/s``.

    ``bit`` counts bits, ``B`` (either case) and a bare number count bytes. Raises :class:`RequestError`.
    """
    found = _RATE.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise RequestError(f"a rate such as 100mbit, 1gbit or 12.5MB expected, got {text!r}")
    bits = (found[3] or "").lower() in ("bit", "bps")
    return float(found[1]) * _UNITS[found[2].lower()] / (8 if bits else 1)


class TokenBucket:
    """Paces bytes at ``rate`` a second.

    It gives no credit for time in which nothing was there to send, only for being woken late (at most
    ``catch_up_s``), so that short transfers see the same rate as long ones.
    """

    __slots__ = ("_busy", "_catch_up_s", "_free_at", "rate")

    def __init__(self, rate: float, *, catch_up_s: float = 0.05) -> None:
        if rate <= 0:
            raise RequestError(f"a rate above 0 bytes/s expected, got {rate}")
        self.rate = rate
        self._catch_up_s = catch_up_s
        self._free_at = float("-inf")
        self._busy = False

    def delay(self, now: float) -> float:
        """Seconds until the next byte may go."""
        return max(0.0, self._free_at - now)

    def spend(self, count: int, now: float) -> None:
        """Take ``count`` bytes, which may be more than are there: the debt delays what follows."""
        earliest = now - self._catch_up_s if self._busy else now
        self._free_at = max(self._free_at, earliest) + count / self.rate
        self._busy = True

    def idle(self) -> None:
        """Nothing is there to send: time from now on earns nothing."""
        self._busy = False

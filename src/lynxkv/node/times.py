"""When an answer's moments were, in seconds since its work began."""

import time
from dataclasses import dataclass, fields

from lynxkv.node.arrivals import Moment
from lynxkv.speculation import Drafted, Event, Verified


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since work on the request began; None: it did not happen.

    Parameters
    ----------
    queued_s
        Memory for the request was reserved.
    manifest_s
        The prefill node said what will come.
    ttft_prefill_s
        Token 1, which the prefill node drew.
    ttft_draft_s, ttft_verified_s
        The decode node's own first token: verified or not, and on the target.
    anchor_s, target_s
        Every byte of the anchor, and of the target, was written into the session.
    end_s
        The answer was finished.
    """

    queued_s: float | None = None
    manifest_s: float | None = None
    ttft_prefill_s: float | None = None
    ttft_draft_s: float | None = None
    ttft_verified_s: float | None = None
    anchor_s: float | None = None
    target_s: float | None = None
    end_s: float | None = None


_OF_MOMENTS = {"room": "queued_s", "manifest": "manifest_s", "anchor": "anchor_s", "target": "target_s"}


class Stopwatch:
    """Collects :class:`Times` from what happens; started when it is made. Thread-safe."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._at: dict[str, float] = {}

    def moment(self, moment: Moment) -> None:
        """Something happened to the transfer."""
        name = _OF_MOMENTS.get(moment.what)
        if name is not None:
            self._at.setdefault(name, moment.at - self._begun)

    def event(self, event: Event) -> None:
        """Speculation said something."""
        now = time.monotonic() - self._begun
        if isinstance(event, Drafted):
            self._at.setdefault("ttft_draft_s", now)
        elif isinstance(event, Verified) and event.position == 0:
            self._at.setdefault("ttft_prefill_s", now)
        elif isinstance(event, Verified) and event.position == 1:
            self._at.setdefault("ttft_draft_s", now)
            self._at.setdefault("ttft_verified_s", now)

    def stop(self) -> Times:
        """The answer is finished: all of it."""
        self._at.setdefault("end_s", time.monotonic() - self._begun)
        return Times(**{field.name: self._at.get(field.name) for field in fields(Times)})

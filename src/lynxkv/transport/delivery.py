"""A pulled transfer on its way out: which segments are there, which are being sent, what is left."""

import heapq

from lynxkv.codec.spec import Tier
from lynxkv.transport.connection import Connection
from lynxkv.transport.outgoing import Outgoing
from lynxkv.wire.events import Pull, SegmentReady, TierEnd
from lynxkv.wire.writer import SegmentWriter, control_frame


class Delivery:
    """The sending side of one pull.

    Within a tier segments go out in the manifest's order among those that are there, one after the other.
    """

    def __init__(self, outgoing: Outgoing, pull: Pull, connection: Connection, generation: int) -> None:
        self.outgoing = outgoing
        self.connection = connection
        self.generation = generation
        self.tiers = tuple(sorted(set(pull.tiers)))
        manifest = outgoing.manifest
        self.selected = frozenset(manifest.select(pull.start, pull.stop, self.tiers))
        self._left = {tier: {i for i in self.selected if manifest.segments[i].tier is tier} for tier in self.tiers}
        self._sizes = {i: manifest.bounds(i)[0] for i in self.selected}
        self._bytes_left = {tier: sum(self._sizes[i] for i in left) for tier, left in self._left.items()}
        self._ready: dict[Tier, list[int]] = {tier: [] for tier in self.tiers}
        self._writers: dict[Tier, SegmentWriter] = {}
        self._resent: set[int] = set()

    def ready(self, segment: int) -> bool:
        """A segment is there: its tier has bytes to send. False if this pull does not want it."""
        tier = self.outgoing.manifest.segments[segment].tier
        if segment not in self._left.get(tier, ()):
            return False
        heapq.heappush(self._ready[tier], segment)
        return True

    def has(self, tier: Tier) -> bool:
        """Whether ``tier`` has bytes to send now."""
        return tier in self._writers or bool(self._ready[tier])

    def ended(self, tier: Tier) -> bool:
        """Whether every segment of ``tier`` has been sent."""
        return not self._left[tier]

    def left(self, tier: Tier) -> int:
        """About how many bytes of ``tier`` are still to be sent, those not encoded yet included."""
        writer = self._writers.get(tier)
        sent = 0 if writer is None else self._sizes[writer.segment] - writer.left
        return self._bytes_left[tier] - sent

    @property
    def queued(self) -> int:
        """Bytes that are there and not sent yet."""
        puts = self.outgoing.segments
        waiting = sum(puts[i].data.nbytes for heap in self._ready.values() for i in heap if i in puts)
        return waiting + sum(writer.left for writer in self._writers.values())

    def send(self, tier: Tier, limit: int) -> int:
        """Write the tier's next frame of at most ``limit`` payload bytes; bytes written, headers included.

        Raises
        ------
        CorruptData
            The segment's bytes changed after they were put.
        """
        control = b""
        writer = self._writers.get(tier)
        if writer is None:
            segment = heapq.heappop(self._ready[tier])
            put = self.outgoing.segments[segment]
            control = self._event(SegmentReady(segment, put.data.nbytes, put.digest))
            writer = SegmentWriter(
                self.connection.version, self.outgoing.transfer, self.generation, tier, segment, put.data, put.digest
            )
            self._writers[tier] = writer
        if writer.left:
            sent = self.connection.send_data(control, writer.cut(limit))
        else:
            sent = self.connection.send_control(control)
        if not writer.left:
            del self._writers[tier]
            self._left[tier].discard(writer.segment)
            self._bytes_left[tier] -= self._sizes[writer.segment]
            if not self._left[tier]:
                sent += self.end(tier)
        return sent

    def end(self, tier: Tier) -> int:
        """Tell the peer that ``tier`` is complete; bytes written."""
        return self.connection.send(TierEnd(tier), self.outgoing.transfer, self.generation)

    def resend(self, segment: int) -> bool:
        """Send a segment again from its first byte, once; False if that cannot be."""
        if segment not in self.selected or segment in self._resent or segment not in self.outgoing.segments:
            return False
        self._resent.add(segment)
        tier = self.outgoing.manifest.segments[segment].tier
        writer = self._writers.get(tier)
        if writer is not None and writer.segment == segment:
            del self._writers[tier]
        if segment not in self._left[tier]:
            self._left[tier].add(segment)
            self._bytes_left[tier] += self._sizes[segment]
        if segment not in self._ready[tier]:
            heapq.heappush(self._ready[tier], segment)
        return True

    def _event(self, event: SegmentReady) -> bytes:
        return control_frame(self.connection.version, event, self.outgoing.transfer, self.generation)

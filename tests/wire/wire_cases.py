"""Streams, manifests and strategies that the wire's tests share."""

from typing import Any

from hypothesis import strategies as st

from lynxkv.codec.plan import Segment, Span, plan
from lynxkv.codec.shape import CacheShape, LayerShape
from lynxkv.codec.spec import Bits, CodecSpec, Kind, LayerBits, Tier
from lynxkv.errors import SpecError
from lynxkv.wire import (
    Acknowledge,
    Admit,
    Admitted,
    Cancel,
    Failed,
    Fingerprint,
    FirstToken,
    Frame,
    FrameReader,
    Header,
    Hello,
    Landing,
    Manifest,
    Pull,
    Refused,
    Reject,
    Resend,
    SegmentReady,
    SegmentWriter,
    TierEnd,
    Working,
    control_frame,
    segment_digest,
    token_digest,
)

TRANSFER = bytes(range(16))
GENERATION = 99 << 16 | 3
FINGERPRINT = Fingerprint("TestForCausalLM", 2, (2,), (64, 64), "bfloat16", "theta=10000", "w0", "t0")


def make_manifest(tokens: int = 256, layers: int = 2, spec: CodecSpec | None = None, **more: Any) -> Manifest:
    spec = CodecSpec() if spec is None else spec
    shape = CacheShape("bfloat16", tuple(LayerShape(2, 64, 64, 0, tokens) for _ in range(layers)))
    segments = plan(shape, spec, segment_tokens=128, segment_bytes=1)
    fields = {"generation": GENERATION, "stop": tokens, "segments": segments} | more
    return Manifest(TRANSFER, FINGERPRINT, tokens, token_digest(b""), shape, spec, **fields)


EVENTS = [
    Hello(versions=(1, 2), role="decode", name="ü", epoch=5, fingerprint=FINGERPRINT),
    Refused("fingerprint.rope", "a", "b"),
    Admit(
        transfer=TRANSFER,
        tokens=bytes(400),
        spec=CodecSpec(overrides=(LayerBits(1, Bits(5, 3), Bits(4, 4)),)),
        sampling={"seed": 1, "logit_bias": {5: -1.0}, "stop": ["a", "b"], "top_p": 0.9},
    ),
    Admitted(TRANSFER, 7),
    Pull(transfer=TRANSFER, start=3, stop=None, tiers=(Tier.ANCHOR, Tier.EXACT), deadline_s=1.5),
    make_manifest(),
    SegmentReady(3, 1 << 31, (1 << 64) - 1),
    FirstToken(token=5, logprob=-0.25, top_logprobs=[(5, -0.25), (6, -1.0)], seed=1 << 63),
    TierEnd(Tier.RESIDUAL),
    Failed("PeerLost", "gone"),
    Acknowledge(),
    Reject("no room"),
    Cancel("abort"),
    Resend(4),
    Working(),
]

SEGMENTS = {0: bytes(range(256)) * 40, 1: b"x", 2: b"\x00" * 5000}


def data_frames(segment: int, limit: int = 4096, generation: int = GENERATION) -> list[bytes]:
    data = memoryview(SEGMENTS[segment])
    writer = SegmentWriter(1, TRANSFER, generation, Tier.ANCHOR, segment, data, segment_digest(data))
    frames = []
    while writer.left:
        out = writer.cut(limit)
        frames.append(out.header + bytes(out.payload))
    return frames


def valid_frames() -> list[bytes]:
    frames = [control_frame(1, event, TRANSFER, GENERATION) for event in EVENTS]
    for segment in SEGMENTS:
        frames += data_frames(segment)
    return frames


class Receiver:
    """A reader with room for the known segments; what it accepted."""

    def __init__(self) -> None:
        self.buffers = {i: bytearray(len(data)) for i, data in SEGMENTS.items()}
        self.landings = {i: Landing(memoryview(self.buffers[i]), segment_digest(d)) for i, d in SEGMENTS.items()}
        self.reader = FrameReader(self.place, versions=(1,))
        self.frames: list[Frame] = []

    def place(self, header: Header) -> Landing | None:
        return self.landings.get(header.segment)

    def feed(self, data: bytes) -> None:
        self.frames += self.reader.feed(data)

    @property
    def events(self) -> list[Any]:
        return [f.event for f in self.frames if f.event is not None]

    @property
    def landed(self) -> dict[int, bytes]:
        return {i: bytes(self.buffers[i]) for i, landing in self.landings.items() if landing.complete}


small = st.integers(-1, 300)
wild = st.one_of(small, st.sampled_from([1 << 16, 1 << 31, 1 << 53, (1 << 64) - 1]))


def built(make: Any, *parts: Any) -> Any:
    """Instances of a class that checks itself; arguments it refuses are tried again."""

    def attempt(values: tuple[Any, ...]) -> Any:
        try:
            return make(*values)
        except SpecError:
            return None

    return st.tuples(*parts).map(attempt).filter(lambda x: x is not None)


layer_shapes = built(LayerShape, st.sampled_from([1, 2, 1 << 40]), st.sampled_from([1, 64]), wild, wild, wild)
shapes = built(CacheShape, st.just("bfloat16"), st.lists(layer_shapes, max_size=3).map(tuple))
bits = built(Bits, st.integers(1, 8), st.integers(0, 8))
specs = st.builds(
    CodecSpec, bits, bits, st.just(()), st.integers(0, 64), st.integers(0, 100), st.booleans(), st.booleans()
)
spans = st.builds(Span, st.sampled_from(Kind), small, small, wild, wild)
segments = st.builds(Segment, st.sampled_from(Tier), spans)
manifests = st.builds(
    Manifest,
    st.just(TRANSFER),
    st.just(FINGERPRINT),
    wild.filter(lambda x: x >= 0),
    st.just(b""),
    shapes,
    specs,
    st.lists(segments, max_size=8).map(tuple),
    generation=wild,
    start=wild,
    stop=wild,
)

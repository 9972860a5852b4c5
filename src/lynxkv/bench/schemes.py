"""What a user would pick between: the same engine, link and groups, only the bits and the order differ."""

from dataclasses import dataclass

from lynxkv.codec import Bits, CodecSpec


@dataclass(frozen=True, slots=True)
class Scheme:
    """A name for a codec spec; it drafts iff its spec has more than an anchor."""

    name: str
    spec: CodecSpec
    about: str


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("bf16", CodecSpec(raw=True), "the KV as it is; wait for all of it"),
        Scheme("int8", CodecSpec(Bits(8, 0), Bits(8, 0), sinks=0, recent=0), "255 steps; wait for all of it"),
        Scheme("int4", CodecSpec(Bits(4, 0), Bits(4, 0), sinks=0, recent=0), "15 steps; never verified"),
        Scheme("lynx", CodecSpec(), "4 bits, draft, 4 more, verify"),
    )
}

"""Frames: what is accepted, and that nothing else is."""

import contextlib
import itertools
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_cases import EVENTS, GENERATION, SEGMENTS, TRANSFER, Receiver, data_frames, valid_frames

from lynxkv.codec.spec import Tier
from lynxkv.errors import CorruptData, LynxError, ProtocolError
from lynxkv.wire import (
    HEADER_BYTES,
    MAX_CONTROL,
    FrameKind,
    FrameReader,
    Header,
    Landing,
    SegmentWriter,
    control_frame,
    decode_event,
    encode_event,
    pack_header,
    segment_digest,
)

STREAM = b"".join(valid_frames())


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_comes_back_as_it_was_sent(event):
    receiver = Receiver()
    receiver.feed(control_frame(1, event, TRANSFER, GENERATION))
    (frame,) = receiver.frames
    assert frame.event == event
    assert (frame.header.transfer, frame.header.generation) == (TRANSFER, GENERATION)


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_a_valid_stream_survives_any_chunking(cuts):
    receiver = Receiver()
    edges = [0, *sorted(cuts), len(STREAM)]
    for a, b in itertools.pairwise(edges):
        receiver.feed(STREAM[a:b])
    assert receiver.events == EVENTS
    assert receiver.landed == SEGMENTS
    receiver.reader.end()


def test_a_stream_survives_one_byte_at_a_time():
    receiver = Receiver()
    for i in range(len(STREAM)):
        receiver.feed(STREAM[i : i + 1])
    assert receiver.events == EVENTS
    assert receiver.landed == SEGMENTS


def test_payloads_are_received_in_the_final_buffer():
    receiver = Receiver()
    frame = data_frames(0)[0]
    receiver.feed(frame[:HEADER_BYTES])
    target = receiver.reader.buffer()
    assert len(target) == len(frame) - HEADER_BYTES
    target[0] = 171
    assert receiver.buffers[0][0] == 171


@given(data=st.binary(max_size=400))
def test_random_bytes_end_in_a_typed_error_or_wait_for_more(data):
    receiver = Receiver()
    with contextlib.suppress(LynxError):
        receiver.feed(data)
    assert receiver.frames == []


@given(data=st.binary(max_size=200))
def test_random_payloads_are_no_events(data):
    with contextlib.suppress(ProtocolError):
        decode_event(data)


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
trees = st.recursive(scalars, lambda t: st.lists(t, max_size=4) | st.dictionaries(st.text(max_size=4), t, max_size=4))


@given(event=st.sampled_from(EVENTS), data=st.data(), value=trees)
def test_an_event_with_any_wrong_field_is_a_typed_error_or_another_event(event, data, value):
    plain = msgspec.msgpack.decode(encode_event(event))
    plain[data.draw(st.sampled_from(sorted(plain)))] = value
    with contextlib.suppress(ProtocolError):
        decode_event(msgspec.msgpack.encode(plain))


def test_a_deeply_nested_payload_is_a_typed_error():
    deep = b"\x83\xa5event\xa5admit\xa8sampling\x81\xa1a" + b"\x91" * 100_000
    with pytest.raises(ProtocolError):
        decode_event(deep)


@given(
    edits=st.lists(
        st.tuples(st.sampled_from(["flip", "cut", "insert", "repeat", "swap"]), st.integers(0, len(STREAM) - 1)),
        min_size=1,
        max_size=4,
    ),
    value=st.integers(1, 255),
)
def test_a_damaged_stream_never_gives_data_that_was_not_sent(edits, value):
    """Field report 12."""
    stream = bytearray(STREAM)
    for kind, at in edits:
        at = min(at, len(stream) - 1)
        if kind == "flip":
            stream[at] ^= value
        elif kind == "cut":
            del stream[at : at + value]
        elif kind == "insert":
            stream[at:at] = bytes(value)
        elif kind == "repeat":
            stream[at:at] = stream[at : at + 8 * value]
        else:
            stream[at : at + 512], stream[at + 512 : at + 1024] = stream[at + 512 : at + 1024], stream[at : at + 512]
        if not stream:
            break
    receiver = Receiver()
    try:
        receiver.feed(bytes(stream))
        receiver.reader.end()
    except LynxError:
        pass
    assert [e for e in receiver.events if e not in EVENTS] == []
    for segment, data in receiver.landed.items():
        assert data == SEGMENTS[segment]


@pytest.mark.parametrize("bit", range(HEADER_BYTES * 8))
def test_every_flipped_header_bit_is_a_typed_error(bit):
    frame = bytearray(data_frames(0)[0])
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises((ProtocolError, CorruptData)):
        Receiver().feed(bytes(frame))


def test_a_flipped_payload_bit_spoils_its_segment_and_no_other():
    receiver = Receiver()
    frames = data_frames(0)
    frames[1] = frames[1][:-1] + bytes([frames[1][-1] ^ 1])
    receiver.feed(b"".join(frames + data_frames(2)))
    assert receiver.landings[0].corrupt
    assert receiver.landed == {2: SEGMENTS[2]}


def test_a_flipped_bit_in_an_event_is_corrupt_data():
    frame = bytearray(control_frame(1, EVENTS[0]))
    frame[-1] ^= 1
    with pytest.raises(CorruptData, match="control frame"):
        Receiver().feed(bytes(frame))


def test_bytes_that_are_right_but_not_those_announced_are_corrupt():
    """A segment that changed at the producer between its digest and its sending."""
    receiver = Receiver()
    receiver.landings[1] = Landing(memoryview(receiver.buffers[1]), segment_digest(b"y"))
    receiver.feed(data_frames(1)[0])
    assert receiver.landings[1].corrupt


def test_a_segment_that_changes_in_memory_is_not_sent_whole():
    """Field report 2: a late write into memory that is being sent."""
    data = bytearray(5000)
    writer = SegmentWriter(1, TRANSFER, GENERATION, Tier.ANCHOR, 0, memoryview(data), segment_digest(data))
    writer.cut(4096)
    data[4500] = 1
    with pytest.raises(CorruptData, match="changed in memory"):
        writer.cut(4096)


def test_a_truncated_stream_says_where_it_ended():
    receiver = Receiver()
    receiver.feed(STREAM[:-10])
    with pytest.raises(ProtocolError, match="ended inside a frame"):
        receiver.reader.end()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": FrameKind.CONTROL, "length": MAX_CONTROL + 1}, "control frame of 1..4194304"),
        ({"kind": FrameKind.CONTROL, "length": 0}, "control frame of 1..4194304"),
        ({"length": (1 << 32) - 1}, "data frame of 1..262144"),
        ({"length": 0}, "data frame of 1..262144"),
        ({"offset": 1}, "a frame within"),
        ({"segment": 1, "length": 2}, "a frame within"),
        ({"version": 9}, "frame version"),
    ],
)
def test_a_frame_out_of_bounds_is_refused_before_anything_is_allocated(change, message):
    header = Header(1, FrameKind.DATA, Tier.ANCHOR, TRANSFER, GENERATION, 0, 1, 0, 0)._replace(**change)
    receiver = Receiver()
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=message):
        receiver.feed(pack_header(header))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


def test_dropped_payloads_need_no_more_than_a_scratch():
    reader = FrameReader(lambda _: None, versions=(1,))
    header = Header(1, FrameKind.DATA, Tier.ANCHOR, TRANSFER, GENERATION, 0, 256 << 10, 0, 0)
    frame = pack_header(header) + bytes(256 << 10)
    tracemalloc.start()
    for _ in range(8):
        (got,) = reader.feed(frame)
        assert got.landing is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 17


def test_a_forgotten_landing_is_not_written_to_any_more():
    """Field report 2: an abort in the middle of a frame, then the rest of the frame arrives."""
    receiver = Receiver()
    frame = data_frames(0)[0]
    receiver.feed(frame[:1000])
    before = bytes(receiver.buffers[0])
    receiver.reader.forget(receiver.landings[0])
    receiver.feed(frame[1000:] + control_frame(1, EVENTS[0]))
    assert bytes(receiver.buffers[0]) == before
    assert receiver.events == [EVENTS[0]]


def test_an_error_is_final():
    receiver = Receiver()
    with pytest.raises(ProtocolError):
        receiver.feed(bytes(HEADER_BYTES))
    with pytest.raises(ProtocolError, match="has ended"):
        receiver.feed(STREAM)

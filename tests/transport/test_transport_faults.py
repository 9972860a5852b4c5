"""Bad peers, dead peers, stale peers: each ends in one typed error, and nothing leaks."""

import asyncio
import os
import socket

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_peers import (
    CLIENT,
    FINGERPRINT,
    SERVER,
    Lease,
    Recorder,
    bad_server,
    linked,
    make_data,
    make_manifest,
    raw_client,
    run,
    serving,
    until,
)

from lynxkv.codec.spec import Tier
from lynxkv.errors import (
    CorruptData,
    DeadlineExceeded,
    EngineError,
    HandshakeRefused,
    LynxError,
    Overloaded,
    PeerLost,
    ProtocolError,
    StaleGeneration,
    TransferError,
    TransferRejected,
)
from lynxkv.transport import Outgoing, Released, Server, connect
from lynxkv.wire import (
    HANDSHAKE_VERSION,
    Acknowledge,
    Admit,
    Cancel,
    Failed,
    FirstToken,
    Hello,
    Manifest,
    Pull,
    Refused,
    Reject,
    Resend,
    SegmentReady,
    TierEnd,
    control_frame,
    segment_digest,
)

EPOCH = 7
SOME = b"\x07" * 16


def from_bad_peer(manifest):
    """The manifest as the hand-made server's life would send it."""
    return msgspec.structs.replace(manifest, generation=EPOCH << 16, stop=manifest.shape.stop)


def told_by(talk, manifest, *, pull=None, hello=CLIENT, stall_s=5.0):
    """Pull ``manifest`` from a hand-made server doing ``talk``; the sink once it has ended."""

    async def main():
        async with bad_server(talk) as port, linked(port, hello) as link:
            sink = Recorder()
            await link.pull(pull or Pull(transfer=manifest.transfer), sink, stall_s=stall_s)
            await sink.end.wait()
            assert link.active == 0
            return sink

    return run(main())


async def begin(wire, manifest):
    """Wait for the pull and send the manifest."""
    await wire.expect(Pull)
    wire.say(manifest, manifest.transfer, manifest.generation)


# ---- corrupt data


def test_a_segment_that_arrives_corrupt_once_is_sent_again():
    """Field report 12."""
    manifest = from_bad_peer(make_manifest(128, 1))
    data = make_data(manifest)

    async def talk(wire):
        await begin(wire, manifest)
        wire.segment(manifest, 0, data[0], flip=5000)
        again = await wire.expect(Resend)
        assert again.segment == 0
        for i in range(len(data)):
            wire.segment(manifest, i, data[i])
        for tier in (Tier.ANCHOR, Tier.RESIDUAL):
            wire.say(TierEnd(tier), manifest.transfer, manifest.generation)
        await wire.expect(Acknowledge)

    sink = told_by_acknowledging(talk, manifest)
    assert sink.error is None
    assert sink.got == dict(enumerate(data))


def told_by_acknowledging(talk, manifest):
    async def main():
        async with bad_server(talk) as port, linked(port) as link:
            sink = Recorder()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.end.wait()
            if sink.error is None:
                incoming.acknowledge()
            return sink

    return run(main())


@pytest.mark.parametrize("flip", [0, 5000, -1])
def test_a_segment_that_arrives_corrupt_twice_is_never_landed(flip):
    """Field report 12."""
    manifest = from_bad_peer(make_manifest(128, 1))
    data = make_data(manifest)
    told = []

    async def talk(wire):
        await begin(wire, manifest)
        for _ in range(2):
            wire.segment(manifest, 0, data[0], flip=flip % len(data[0]))
        await wire.expect(Resend)
        told.append(await wire.expect(Reject))

    async def main():
        async with bad_server(talk) as port, linked(port) as link:
            sink = Recorder()
            await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.end.wait()
            await until(lambda: bool(told))
            return sink

    sink = run(main())
    assert isinstance(sink.error, CorruptData)
    assert "anchor K layers 0..1" in str(sink.error)
    assert "corrupt twice" in told[0].reason
    assert sink.got == {}


def test_a_real_server_sends_a_corrupt_segment_again_and_once_only():
    async def main():
        manifest = make_manifest(128, 1)
        data = make_data(manifest)
        async with serving() as (server, port):
            lease = Lease(manifest, data)
            server.announce(lease.outgoing)
            wire = await raw_client(port)
            wire.say(Pull(transfer=manifest.transfer), manifest.transfer)
            await wire.expect(TierEnd)
            await wire.expect(TierEnd)
            wire.say(Resend(0), manifest.transfer)
            assert (await wire.expect(SegmentReady)).segment == 0
            assert await wire.expect(TierEnd) == TierEnd(Tier.ANCHOR)
            wire.say(Resend(0), manifest.transfer)
            assert (await wire.expect(Failed)).code == "ProtocolError"
            await lease.end.wait()
            assert lease.reason is Released.PEER_LOST

    run(main())


def test_bytes_other_than_those_announced_are_never_landed():
    """Field report 1: right frames, another segment's bytes."""
    manifest = from_bad_peer(make_manifest(128, 1))
    data = make_data(manifest)

    async def talk(wire):
        await begin(wire, manifest)
        for _ in range(2):
            wire.segment(manifest, 0, data[0], digest=12345)
        await wire.expect(Reject)

    sink = told_by(talk, manifest)
    assert isinstance(sink.error, CorruptData)
    assert sink.got == {}


def test_memory_that_changes_under_the_server_fails_the_transfer_by_name():
    """Field report 2: freed pages are written by the next request while they are being sent."""

    async def main():
        manifest = make_manifest(128, 1)
        data = [bytearray(one) for one in make_data(manifest)]
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(manifest, data)
            data[0][10] ^= 1
            server.announce(lease.outgoing)
            sink = Recorder()
            await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.end.wait()
            assert isinstance(sink.error, CorruptData)
            assert "changed in memory" in str(sink.error)
            assert 0 not in sink.got
            assert lease.reason is Released.FAILED

    run(main())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"segment": 1}, ProtocolError, "was not announced"),
        ({"tier": Tier.RESIDUAL}, ProtocolError, "was not announced"),
        ({"generation": (EPOCH - 1) << 16}, StaleGeneration, f"epoch {EPOCH} expected, got {EPOCH - 1}"),
    ],
    ids=["swapped segment", "swapped tier", "stale generation"],
)
def test_frames_that_are_right_but_not_this_segments_are_never_landed(change, error, message):
    """Field reports 1 and 17."""
    manifest = from_bad_peer(make_manifest(128, 1))
    data = make_data(manifest)

    async def talk(wire):
        await begin(wire, manifest)
        wire.segment(manifest, 0, data[0], **change)
        await wire.expect(Reject)

    sink = told_by(talk, manifest)
    assert isinstance(sink.error, error)
    assert message in str(sink.error)
    assert sink.got == {}


def test_data_of_an_earlier_attempt_is_dropped_silently():
    """Field report 17."""
    manifest = from_bad_peer(make_manifest(128, 1))
    data = make_data(manifest)

    async def talk(wire):
        await begin(wire, manifest)
        wire.segment(manifest, 0, data[0], generation=manifest.generation + 1)
        for i in range(len(data)):
            wire.segment(manifest, i, data[i])
        for tier in (Tier.ANCHOR, Tier.RESIDUAL):
            wire.say(TierEnd(tier), manifest.transfer, manifest.generation)
        await wire.expect(Acknowledge)

    sink = told_by_acknowledging(talk, manifest)
    assert sink.error is None
    assert sink.got == dict(enumerate(data))


# ---- bad manifests, sizes and orders


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"segments": ()}, ProtocolError, "no segment holds"),
        ({"stop": 64}, ProtocolError, "tokens (0, 128) expected, got (0, 64)"),
        ({"start": 64}, ProtocolError, "tokens (0, 128) expected, got (64, 128)"),
        ({"generation": 5 << 16}, StaleGeneration, "generation"),
        ({"fingerprint": msgspec.structs.replace(FINGERPRINT, rope="theta=1")}, HandshakeRefused, "fingerprint.rope"),
        ({"transfer": SOME}, StaleGeneration, "manifest of generation"),
    ],
)
def test_a_manifest_that_is_wrong_is_rejected_with_the_reason(change, error, message):
    """Field reports 5 and 9: the prefill side is told."""
    manifest = from_bad_peer(make_manifest(128, 1))
    told = []

    async def talk(wire):
        await wire.expect(Pull)
        wire.say(msgspec.structs.replace(manifest, **change), manifest.transfer, manifest.generation)
        told.append(await wire.expect(Reject))

    async def main():
        async with bad_server(talk) as port, linked(port) as link:
            sink = Recorder()
            await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.end.wait()
            await until(lambda: bool(told))
            return sink

    sink = run(main())
    assert isinstance(sink.error, error)
    assert message in str(sink.error)
    assert message in told[0].reason
    assert sink.sent_manifest is None


def speaking(*events):
    """A server that sends the manifest, then ``events``, then waits for the reject."""

    def with_manifest(manifest):
        async def talk(wire):
            await begin(wire, manifest)
            for event in events:
                wire.say(event(manifest) if callable(event) else event, manifest.transfer, manifest.generation)
            await wire.expect(Reject)

        return talk

    return with_manifest


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([SegmentReady(0, 1 << 40, 0)], "bytes, not"),
        ([SegmentReady(0, 0, 0)], "bytes, not"),
        ([SegmentReady(99, 5, 0)], "was not pulled"),
        ([TierEnd(Tier.ANCHOR)], "segments missing"),
        ([TierEnd(Tier.EXACT)], "was not pulled"),
        ([lambda m: m], "a second manifest"),
        ([lambda m: SegmentReady(0, m.bounds(0)[0], 0), lambda m: SegmentReady(1, m.bounds(1)[0], 0)], "starts inside"),
        ([Pull(transfer=SOME)], "not for a decode node"),
    ],
)
def test_events_that_contradict_the_manifest_end_the_transfer(events, message):
    """Field report 4: late, duplicate and partial completions."""
    manifest = from_bad_peer(make_manifest(128, 1))
    sink = told_by(speaking(*events)(manifest), manifest)
    assert isinstance(sink.error, ProtocolError)
    assert message in str(sink.error)
    assert sink.got == {}


def test_a_segment_before_the_manifest_ends_the_transfer():
    manifest = from_bad_peer(make_manifest(128, 1))

    async def talk(wire):
        await wire.expect(Pull)
        wire.segment(manifest, 0, make_data(manifest)[0])
        await wire.expect(Reject)

    sink = told_by(talk, manifest)
    assert isinstance(sink.error, ProtocolError)
    assert "manifest expected first" in str(sink.error)


def test_garbage_from_a_server_ends_every_transfer_on_the_link():
    manifest = from_bad_peer(make_manifest(128, 1))

    async def talk(wire):
        await begin(wire, manifest)
        wire.writer.write(os.urandom(4096))

    sink = told_by(talk, manifest)
    assert isinstance(sink.error, ProtocolError)


# ---- handshake


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"fingerprint": msgspec.structs.replace(FINGERPRINT, rope="theta=9")}, ["rope", "theta=10000", "theta=9"]),
        ({"fingerprint": msgspec.structs.replace(FINGERPRINT, dtype="float16")}, ["dtype", "bfloat16", "float16"]),
        ({"versions": (8, 9)}, ["versions", "[1]", "[8, 9]"]),
    ],
)
def test_peers_that_do_not_fit_are_refused_by_field_and_both_values(change, parts):
    """Field reports 7 and 9."""

    async def main():
        async with serving() as (server, port):
            with pytest.raises(HandshakeRefused) as e:
                await connect("127.0.0.1", port, msgspec.structs.replace(CLIENT, **change))
            for part in parts:
                assert part in str(e.value)
            await until(lambda: server.counters().connections == 0)

    run(main())


def test_a_newer_peer_and_an_older_one_speak_the_older_version():
    async def main():
        manifest = make_manifest(128, 1)
        newer = msgspec.structs.replace(CLIENT, versions=(1, 2))
        async with serving() as (server, port), linked(port, newer) as link:
            server.announce(Lease(manifest, make_data(manifest)).outgoing)
            sink = Recorder()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await incoming.wait()
            incoming.acknowledge()

    run(main())


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n\r\n" + bytes(60), control_frame(0, Acknowledge()), b"\x00" * 64]
)
def test_a_peer_that_does_not_greet_is_cut_off(first):
    async def main():
        async with serving() as (server, port):
            wire = await raw_client(port, None)
            wire.writer.write(first)
            with pytest.raises((EOFError, ConnectionResetError)):
                await wire.expect(Hello)
            assert server.counters().connections == 0

    run(main())


def test_a_peer_that_says_nothing_is_cut_off_after_the_handshake_deadline():
    """Field report 3."""

    async def main():
        async with serving(handshake_s=0.05) as (server, port):
            wire = await raw_client(port, None)
            with pytest.raises((EOFError, ConnectionResetError)):
                await wire.frame()
            assert server.counters().connections == 0

    run(main())


def test_a_server_that_never_greets_ends_connect_at_its_deadline():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(DeadlineExceeded):
            await connect("127.0.0.1", listener.getsockname()[1], CLIENT, deadline_s=0.05)

    run(main())


def test_nobody_listening_is_one_clear_error():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(PeerLost, match=f"cannot connect to 127.0.0.1:{port}"):
            await connect("127.0.0.1", port, CLIENT)

    run(main())


def test_a_port_in_use_is_one_clear_error():
    async def main():
        async with serving() as (_, port):
            with pytest.raises(TransferError, match=f"cannot listen on 127.0.0.1:{port}"):
                await Server(SERVER).start("127.0.0.1", port)

    run(main())


# ---- deadlines and death


def test_a_link_that_stalls_ends_at_the_deadline_and_the_server_is_told():
    """Field report 3."""
    manifest = from_bad_peer(make_manifest(128, 1))
    told = []

    async def talk(wire):
        await begin(wire, manifest)
        wire.say(SegmentReady(0, len(make_data(manifest)[0]), 0), manifest.transfer, manifest.generation)
        told.append(await wire.expect(Cancel))

    async def main():
        async with bad_server(talk) as port, linked(port) as link:
            sink = Recorder()
            await link.pull(Pull(transfer=manifest.transfer), sink, stall_s=0.05)
            await sink.end.wait()
            await until(lambda: bool(told))
            return sink

    sink = run(main())
    assert isinstance(sink.error, DeadlineExceeded)
    assert "nothing arrived for 0.05 s" in str(sink.error)


def test_a_peer_that_dies_inside_a_segment_ends_the_transfer_once():
    """Field report 3."""
    manifest = from_bad_peer(make_manifest(128, 1))

    async def talk(wire):
        await begin(wire, manifest)
        data = make_data(manifest)[0]
        wire.segment(manifest, 0, data)
        await wire.writer.drain()
        wire.writer.transport.abort()

    sink = told_by(talk, manifest)
    assert isinstance(sink.error, PeerLost)


def test_a_stream_that_ends_inside_a_frame_says_so():
    manifest = from_bad_peer(make_manifest(128, 1))

    async def talk(wire):
        await begin(wire, manifest)
        wire.writer.write(control_frame(1, TierEnd(Tier.ANCHOR), manifest.transfer, manifest.generation)[:-5])
        wire.writer.close()

    sink = told_by(talk, manifest)
    assert isinstance(sink.error, PeerLost)
    assert "inside a frame" in str(sink.error)


def test_a_pull_that_is_never_announced_ends_at_its_deadline_and_unparks():
    """Field report 3."""

    async def main():
        async with serving() as (server, port), linked(port) as link:
            sink = Recorder()
            await link.pull(Pull(transfer=SOME, deadline_s=0.05), sink)
            await sink.end.wait()
            assert isinstance(sink.error, DeadlineExceeded)
            assert "not announced within 0.05 s" in str(sink.error)
            assert server.counters().parked == 0

    run(main())


def test_an_admission_that_is_not_answered_ends_at_its_deadline_and_is_cancelled():
    """Field reports 3 and 5."""

    async def main():
        async with serving() as (server, port), linked(port) as link:
            ended = asyncio.Event()

            async def on_admit(*_):
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            transfer = os.urandom(16)
            server.on_admit = on_admit
            admit = Admit(transfer=transfer, tokens=b"", spec=make_manifest().spec)
            with pytest.raises(DeadlineExceeded, match="not admitted within"):
                await link.admit(admit, deadline_s=0.05)
            await ended.wait()
            await until(lambda: server.counters().admitting == 0)
            with pytest.raises(TransferRejected, match="has ended"):
                server.announce(Outgoing(make_manifest(transfer=transfer)))

    run(main())


@pytest.mark.parametrize("pulled", [False, True])
def test_a_lease_without_progress_expires_once_and_says_what_it_waited_for(pulled):
    """Field report 3."""

    async def main():
        async with serving(lease_s=0.1) as (server, port), linked(port) as link:
            manifest = make_manifest(128, 1)
            lease = Lease(manifest, make_data(manifest)[:1])
            server.announce(lease.outgoing)
            sink = Recorder()
            if pulled:
                await link.pull(Pull(transfer=manifest.transfer), sink)
            await lease.end.wait()
            assert lease.reason is Released.EXPIRED
            assert ("its producer" if pulled else "a pull") in lease.reasons[0][1]
            assert lease.outgoing.put(1, b"") is False
            if pulled:
                await sink.end.wait()
                assert isinstance(sink.error, DeadlineExceeded)

    run(main())


def test_a_lease_that_is_never_acknowledged_expires():
    """Field report 3."""

    async def main():
        async with serving(lease_s=0.1) as (server, port), linked(port) as link:
            manifest = make_manifest(128, 1)
            lease = Lease(manifest, make_data(manifest))
            server.announce(lease.outgoing)
            sink = Recorder()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await incoming.wait()
            await lease.end.wait()
            assert lease.reason is Released.EXPIRED
            assert "an acknowledge" in lease.reasons[0][1]
            assert sink.endings == [None]
            await until(lambda: link.active == 0)
            incoming.acknowledge()

    run(main())


def test_a_client_that_dies_frees_the_lease_the_parked_pull_and_the_queue():
    """Field report 3."""

    async def main():
        async with serving() as (server, port):
            manifest = make_manifest()
            lease = Lease(manifest, make_data(manifest))
            server.announce(lease.outgoing)
            wire = await raw_client(port)
            wire.say(Pull(transfer=SOME), SOME)
            wire.say(Pull(transfer=manifest.transfer), manifest.transfer)
            await wire.expect(Manifest)
            wire.writer.transport.abort()
            await lease.end.wait()
            assert lease.reason is Released.PEER_LOST
            await until(lambda: server.counters().connections == 0)
            assert server.counters().parked == 0
            assert server.counters().flows == 0

    run(main())


def test_a_dead_server_ends_pulls_and_admissions_with_peer_lost():
    """Field report 3."""

    async def main():
        async with serving() as (server, port), linked(port) as link:
            server.on_admit = lambda *_: asyncio.Event().wait()
            sink = Recorder()
            await link.pull(Pull(transfer=SOME), sink)
            admit = Admit(transfer=os.urandom(16), tokens=b"", spec=make_manifest().spec)
            asking = asyncio.ensure_future(link.admit(admit))
            await until(lambda: (server.counters().admitting, server.counters().parked) == (1, 1))
            for connection in list(server._connections):
                connection.end(PeerLost("killed"))
            with pytest.raises(PeerLost):
                await asking
            await sink.end.wait()
            assert isinstance(sink.error, PeerLost)
            with pytest.raises(PeerLost, match="connect again"):
                await link.pull(Pull(transfer=SOME), Recorder())

    run(main())


# ---- cancel, reject, duplicates, restart


@pytest.mark.parametrize(("how", "reason"), [("cancel", Released.CANCELLED), ("reject", Released.REJECTED)])
def test_an_abort_frees_the_lease_and_no_late_byte_is_written(how, reason):
    """Field reports 2 and 5."""

    async def main():
        manifest = make_manifest(4096, 4)
        data = make_data(manifest)
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(manifest, data)
            server.announce(lease.outgoing)
            sink = Recorder()
            frozen = {}

            def abort(_):
                getattr(incoming, how)("the user left")
                frozen.update({i: bytes(b) for i, b in sink.buffers.items()})

            sink.on_landed = abort
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await lease.end.wait()
            assert lease.reasons == [(reason, "the user left")]
            assert isinstance(sink.error, TransferRejected)
            assert "the user left" in str(sink.error)
            other = make_manifest(128, 1)
            server.announce(Lease(other, make_data(other)).outgoing)
            after = Recorder()
            next_ = await link.pull(Pull(transfer=other.transfer), after)
            await next_.wait()
            next_.acknowledge()
            assert {i: bytes(b) for i, b in sink.buffers.items()} == frozen
            assert len(sink.got) == 1

    run(main())


def test_a_reject_by_the_sink_tells_the_prefill_side_why():
    """Field report 5: decode refuses, prefill is told."""

    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(manifest, make_data(manifest))
            server.announce(lease.outgoing)
            sink = Recorder()

            def refuse(_):
                raise EngineError("no room for 128 tokens")

            sink.manifest = refuse
            await link.pull(Pull(transfer=manifest.transfer), sink)
            await lease.end.wait()
            assert lease.reasons == [(Released.REJECTED, "no room for 128 tokens")]
            assert isinstance(sink.error, EngineError)
            assert sink.buffers == {}

    run(main())


def test_a_bug_in_a_sink_ends_its_transfer_and_no_other():
    async def main():
        bad, good = make_manifest(128, 1), make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(bad, make_data(bad))
            server.announce(lease.outgoing)
            server.announce(Lease(good, make_data(good)).outgoing)
            sink, other = Recorder(), Recorder()
            sink.on_landed = lambda _: 1 // 0
            await link.pull(Pull(transfer=bad.transfer), sink)
            incoming = await link.pull(Pull(transfer=good.transfer), other)
            await incoming.wait()
            incoming.acknowledge()
            await lease.end.wait()
            assert lease.reason is Released.REJECTED
            assert isinstance(sink.error, TransferError)
            assert "ZeroDivisionError" in str(sink.error)

    run(main())


@pytest.mark.parametrize(
    ("buffer", "message"), [(bytearray(3), "got 3 writable"), (bytes(100), "read-only"), (None, "its sink failed")]
)
def test_a_sink_that_gives_a_wrong_buffer_ends_its_transfer(buffer, message):
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            server.announce(Lease(manifest, make_data(manifest)).outgoing)
            sink = Recorder()
            sink.buffer = lambda *_: memoryview(buffer)
            await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.end.wait()
            assert isinstance(sink.error, TransferError)
            assert message in str(sink.error)

    run(main())


def test_a_transfer_that_was_admitted_can_be_refused_without_a_pull():
    """Field report 5: decode has the prefix already."""

    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(manifest, make_data(manifest))
            server.announce(lease.outgoing)
            link.cancel(manifest.transfer, "the prefix is here already")
            await lease.end.wait()
            assert lease.reasons == [(Released.CANCELLED, "the prefix is here already")]

    run(main())


def test_a_producer_that_fails_tells_the_decode_side_its_own_error():
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(manifest, make_data(manifest)[:1])
            server.announce(lease.outgoing)
            sink = Recorder()
            await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.started.wait()
            lease.outgoing.fail(EngineError("layer 3 is all NaN"))
            await sink.end.wait()
            assert type(sink.error) is EngineError
            assert str(sink.error) == "layer 3 is all NaN"
            assert lease.reason is Released.FAILED

    run(main())


@pytest.mark.parametrize("code", ["SystemExit", "Cancelled"])
def test_a_failure_code_that_is_unknown_or_not_a_peers_to_say_is_a_transfer_error(code):
    manifest = from_bad_peer(make_manifest(128, 1))

    async def talk(wire):
        await wire.expect(Pull)
        wire.say(Failed(code, "boo"), manifest.transfer)
        await wire.frame()

    sink = told_by(talk, manifest)
    assert type(sink.error) is TransferError
    assert str(sink.error) == "boo"


def test_the_same_id_twice_is_refused_and_the_first_goes_on():
    """Field report 13."""

    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link, linked(port) as other:
            lease = Lease(manifest, make_data(manifest)[:1])
            server.announce(lease.outgoing)
            with pytest.raises(TransferRejected, match="exists already"):
                server.announce(Outgoing(manifest))
            sink, second = Recorder(), Recorder()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.started.wait()
            with pytest.raises(TransferRejected, match="being pulled already"):
                await link.pull(Pull(transfer=manifest.transfer), Recorder())
            await other.pull(Pull(transfer=manifest.transfer), second)
            await second.end.wait()
            assert isinstance(second.error, TransferRejected)
            for i, one in enumerate(make_data(manifest)[1:], 1):
                lease.outgoing.put(i, one)
            await incoming.wait()
            incoming.acknowledge()
            await lease.end.wait()
            third = Recorder()
            await other.pull(Pull(transfer=manifest.transfer), third)
            await third.end.wait()
            assert isinstance(third.error, TransferRejected)
            assert "has ended (acknowledged)" in str(third.error)
            with pytest.raises(TransferRejected, match="has ended"):
                server.announce(Outgoing(manifest))

    run(main())


def test_another_peer_cannot_end_a_transfer_that_is_being_pulled():
    async def main():
        manifest = make_manifest(128, 1)
        data = make_data(manifest)
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(manifest, data[:1])
            server.announce(lease.outgoing)
            sink = Recorder()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.started.wait()
            wire = await raw_client(port)
            wire.say(Acknowledge(), manifest.transfer)
            wire.say(Cancel("mine"), manifest.transfer)
            wire.say(Resend(0), manifest.transfer)
            wire.say(Pull(transfer=manifest.transfer), manifest.transfer)
            assert (await wire.expect(Failed)).code == "TransferRejected"
            for i, one in enumerate(data[1:], 1):
                lease.outgoing.put(i, one)
            await incoming.wait()
            incoming.acknowledge()
            await lease.end.wait()
            assert lease.reason is Released.ACKNOWLEDGED
            wire.writer.close()

    run(main())


def test_a_restarted_server_on_the_same_port_serves_new_and_refuses_old():
    """Field report 17."""

    async def main():
        server = Server(msgspec.structs.replace(SERVER, epoch=5))
        _, port = await server.start("127.0.0.1", 0)
        link = await connect("127.0.0.1", port, CLIENT)
        old = make_manifest(128, 1)
        server.announce(Lease(old, make_data(old)[:1]).outgoing)
        sink = Recorder()
        await link.pull(Pull(transfer=old.transfer), sink)
        await sink.started.wait()
        server.close()
        await sink.end.wait()
        assert isinstance(sink.error, TransferError)
        again = Server(msgspec.structs.replace(SERVER, epoch=6))
        await again.start("127.0.0.1", port)
        new = make_manifest(128, 1)
        again.announce(Lease(new, make_data(new)).outgoing)
        async with linked(port) as link:
            stale, fresh = Recorder(), Recorder()
            await link.pull(Pull(transfer=old.transfer, epoch=5), stale)
            incoming = await link.pull(Pull(transfer=new.transfer, epoch=link.peer.epoch), fresh)
            await incoming.wait()
            incoming.acknowledge()
            await stale.end.wait()
            assert isinstance(stale.error, StaleGeneration)
            assert "restarted" in str(stale.error)
            assert fresh.sent_manifest.generation == 6 << 16
        again.close()

    run(main())


# ---- drain, room, slow peers


def test_draining_finishes_what_runs_refuses_what_is_new_and_fails_the_rest_by_name():
    async def main():
        async with serving() as (server, port), linked(port) as link:
            done, stuck, unpulled = (make_manifest(128, 1) for _ in range(3))
            leases = [
                Lease(done, make_data(done)[:1]),
                Lease(stuck, make_data(stuck)[:1]),
                Lease(unpulled, make_data(unpulled)),
            ]
            sinks = [Recorder() for _ in range(3)]
            for lease in leases:
                server.announce(lease.outgoing)
            incoming = await link.pull(Pull(transfer=done.transfer), sinks[0])
            await link.pull(Pull(transfer=stuck.transfer), sinks[1])
            await link.pull(Pull(transfer=SOME), sinks[2])
            await until(lambda: (server.counters().deliveries, server.counters().parked) == (2, 1))
            draining = asyncio.ensure_future(server.drain(0.3))
            await sinks[2].end.wait()
            assert isinstance(sinks[2].error, TransferRejected)
            assert "draining" in str(sinks[2].error)
            late = Recorder()
            await link.pull(Pull(transfer=unpulled.transfer), late)
            await late.end.wait()
            assert isinstance(late.error, TransferRejected)
            with pytest.raises(TransferRejected, match="draining"):
                server.announce(Outgoing(make_manifest()))
            for i, one in enumerate(make_data(done)[1:], 1):
                leases[0].outgoing.put(i, one)
            await incoming.wait()
            incoming.acknowledge()
            assert await draining == (stuck.transfer,)
            await sinks[1].end.wait()
            assert "the server stopped before its end" in str(sinks[1].error)
            assert [lease.reason for lease in leases] == [Released.ACKNOWLEDGED, Released.DRAINED, Released.DRAINED]

    run(main())


@pytest.mark.parametrize("bound", ["max_parked", "max_admitting", "max_connections"])
def test_what_there_is_no_room_for_is_refused_by_name(bound):
    """Field report 18."""

    async def main():
        async with serving(**{bound: 1}) as (server, port), linked(port) as link:
            first = Recorder()
            if bound == "max_parked":
                await link.pull(Pull(transfer=SOME), Recorder())
                await link.pull(Pull(transfer=b"\x01" * 16), first)
                await first.end.wait()
                assert "no room: 1 pulls" in str(first.error)
            elif bound == "max_admitting":
                server.on_admit = lambda *_: asyncio.Event().wait()
                spec = make_manifest().spec
                waiting = asyncio.ensure_future(link.admit(Admit(transfer=SOME, tokens=b"", spec=spec)))
                await until(lambda: server.counters().admitting == 1)
                with pytest.raises(Overloaded, match="no room: 1 admissions"):
                    await link.admit(Admit(transfer=b"\x01" * 16, tokens=b"", spec=spec))
                server.close()
                with pytest.raises(LynxError):
                    await waiting
            else:

                async def second():
                    other = await connect("127.0.0.1", port, CLIENT)
                    await other.gone.wait()
                    raise other.error

                with pytest.raises(TransferRejected, match="at most 1 connections"):
                    await second()

    run(main())


def test_a_peer_that_does_not_read_blocks_no_other_and_loses_its_lease():
    """Field report 18."""

    async def main():
        async with serving(lease_s=0.5) as (server, port), linked(port) as link:
            big = make_manifest(16384, 8)
            lease = Lease(big, make_data(big))
            server.announce(lease.outgoing)
            deaf = socket.create_connection(("127.0.0.1", port))
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(control_frame(HANDSHAKE_VERSION, CLIENT))
            deaf.sendall(control_frame(1, Pull(transfer=big.transfer), big.transfer))
            await until(lambda: server.counters().deliveries == 1)
            small = make_manifest(128, 1)
            server.announce(Lease(small, make_data(small)).outgoing)
            sink = Recorder()
            incoming = await link.pull(Pull(transfer=small.transfer), sink)
            await incoming.wait()
            incoming.acknowledge()
            assert lease.outgoing.released is None
            await lease.end.wait()
            assert lease.reason is Released.EXPIRED
            assert "its receiver" in lease.reasons[0][1]
            await until(lambda: server.counters().connections == 1)
            deaf.close()

    run(main())


def test_events_for_ended_and_unknown_transfers_are_ignored():
    """Field report 4."""

    async def main():
        async with serving() as (_server, port):
            wire = await raw_client(port)
            for event in (Acknowledge(), Reject("x"), Resend(5), Acknowledge()):
                wire.say(event, b"\x05" * 16)
            wire.say(Pull(transfer=SOME, deadline_s=0.0), SOME)
            assert (await wire.expect(Failed)).code == "DeadlineExceeded"
            wire.writer.close()

    run(main())


@pytest.mark.parametrize(
    "event", [TierEnd(Tier.ANCHOR), SegmentReady(0, 1, 2), Refused("a", "b", "c"), Hello(role="x")]
)
def test_an_event_that_is_not_for_a_server_ends_the_connection_with_the_reason(event):
    async def main():
        async with serving() as (server, port):
            wire = await raw_client(port)
            wire.say(event, SOME)
            assert (await wire.expect(Failed)).code == "ProtocolError"
            assert server.counters().connections == 0

    run(main())


def test_data_sent_to_a_server_ends_the_connection():
    async def main():
        async with serving() as (_, port):
            manifest = from_bad_peer(make_manifest(128, 1))
            wire = await raw_client(port)
            wire.segment(manifest, 0, b"xyz", announce=False)
            assert (await wire.expect(Failed)).code == "ProtocolError"

    run(main())


def test_a_producers_mistakes_are_typed_errors():
    manifest = make_manifest(128, 1)
    outgoing = Outgoing(manifest)
    assert outgoing.put(0, b"x")
    with pytest.raises(TransferError, match="segment 0 was put before"):
        outgoing.put(0, b"x")
    with pytest.raises(ProtocolError, match=r"segments 0\.\."):
        outgoing.put(len(manifest.segments), b"x")


def test_a_producer_that_failed_before_its_announcement_tells_a_waiting_pull():
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            sink = Recorder()
            await link.pull(Pull(transfer=manifest.transfer), sink)
            await until(lambda: server.counters().parked == 1)
            lease = Lease(manifest)
            lease.outgoing.fail(EngineError("prompt too strange"))
            server.announce(lease.outgoing)
            await sink.end.wait()
            assert str(sink.error) == "prompt too strange"
            assert lease.reason is Released.FAILED

    run(main())


def test_a_failed_admission_tells_whoever_admitted_and_a_pull_that_waits_for_it():
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link, linked(port) as other:
            parked = asyncio.Event()

            async def on_admit(*_):
                await parked.wait()
                raise EngineError("prompt too strange")

            server.on_admit = on_admit
            sinks = [Recorder(), Recorder()]
            ask = asyncio.create_task(link.admit(Admit(transfer=manifest.transfer, tokens=b"", spec=manifest.spec)))
            await until(lambda: server.counters().admitting == 1)
            await other.pull(Pull(transfer=manifest.transfer), sinks[0])
            await until(lambda: server.counters().parked == 1)
            parked.set()
            with pytest.raises(EngineError, match="too strange"):
                await ask
            await sinks[0].end.wait()
            assert str(sinks[0].error) == "prompt too strange"
            parked.clear()  # the same, with admission and pull on one link
            again = make_manifest(128, 1).transfer
            ask = asyncio.create_task(link.admit(Admit(transfer=again, tokens=b"", spec=manifest.spec)))
            await until(lambda: server.counters().admitting == 1)
            await link.pull(Pull(transfer=again), sinks[1])
            await until(lambda: server.counters().parked == 1)
            parked.set()
            with pytest.raises(EngineError, match="too strange"):
                await ask
            await sinks[1].end.wait()
            assert str(sinks[1].error) == "prompt too strange"
            assert server.counters().parked == link.active == 0

    run(main())


def test_a_callback_that_fails_leaks_no_other_lease():
    async def main():
        async with serving() as (server, port):
            first, second = make_manifest(128, 1), make_manifest(128, 1)
            broken = Outgoing(first, on_released=lambda *_: 1 // 0)
            lease = Lease(second)
            wire = await raw_client(port)
            for outgoing in (broken, lease.outgoing):
                server.announce(outgoing)
                wire.say(Pull(transfer=outgoing.transfer), outgoing.transfer)
                await wire.expect(Manifest)
            wire.writer.transport.abort()
            await lease.end.wait()
            assert lease.reason is Released.PEER_LOST

    run(main())


def test_a_peer_that_asks_and_never_reads_is_cut_off(monkeypatch):
    """Field report 18: answers do not pile up without bound."""
    monkeypatch.setattr("lynxkv.transport.connection.MAX_BACKLOG", 1 << 16)

    async def main():
        async with serving() as (server, port):
            deaf = socket.create_connection(("127.0.0.1", port))
            deaf.settimeout(10)
            deaf.sendall(control_frame(HANDSHAKE_VERSION, CLIENT))
            pull = control_frame(1, Pull(transfer=SOME, deadline_s=60.0), SOME)

            def ask():
                while True:
                    deaf.sendall(pull * 1000)

            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                await asyncio.get_running_loop().run_in_executor(None, ask)
            await until(lambda: server.counters().connections == 0)
            deaf.close()

    run(main())


ids = st.sampled_from([bytes([i]) * 16 for i in range(1, 4)])
asked = st.one_of(
    st.builds(Pull, transfer=ids, start=st.integers(0, 200), stop=st.none() | st.integers(0, 200)),
    st.builds(Admit, transfer=ids, tokens=st.just(b""), spec=st.just(make_manifest().spec)),
    st.sampled_from([Acknowledge(), Reject("r"), Cancel("c"), Resend(0), Resend(1 << 40), TierEnd(Tier.ANCHOR)]),
)


@settings(max_examples=40, deadline=None)
@given(events=st.lists(st.tuples(ids, asked), max_size=20), abort=st.booleans())
def test_a_server_survives_any_sequence_of_events_and_leaks_nothing(events, abort):
    """Field report 4."""

    async def main():
        async with serving() as (server, port):

            async def on_admit(admit, _):
                server.announce(Lease(make_manifest(128, 1, transfer=admit.transfer)).outgoing)

            server.on_admit = on_admit
            known = make_manifest(128, 1, transfer=b"\x01" * 16)
            lease = Lease(known, make_data(known))
            server.announce(lease.outgoing)
            wire = await raw_client(port)
            for transfer, event in events:
                wire.say(event, getattr(event, "transfer", transfer))
            if abort:
                wire.writer.transport.abort()
            else:
                wire.writer.close()
            await until(lambda: server.counters().connections == 0 and server.counters().admitting == 0)
            server.check_integrity()
            good = make_manifest(128, 1)
            server.announce(Lease(good, make_data(good)).outgoing)
            async with linked(port) as link:
                incoming = await link.pull(Pull(transfer=good.transfer), Recorder())
                await incoming.wait()
                incoming.acknowledge()

    run(main())


steps = st.lists(
    st.sampled_from(
        ["manifest", "ready 0", "data 0", "corrupt 0", "segment 1", "segment 2", "end 0", "end 1", "token", "failed"]
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps)
def test_a_decode_side_survives_any_sequence_of_events_and_lands_only_what_was_sent(steps):
    """Field report 4."""
    manifest = from_bad_peer(make_manifest(128, 1))
    data = make_data(manifest)

    async def talk(wire):
        await wire.expect(Pull)
        where = (manifest.transfer, manifest.generation)
        for step in steps:
            name, _, number = step.partition(" ")
            if name == "manifest":
                wire.say(manifest, *where)
            elif name == "ready":
                wire.say(SegmentReady(0, len(data[0]), segment_digest(data[0])), *where)
            elif name == "token":
                wire.say(FirstToken(token=1), *where)
            elif name == "end":
                wire.say(TierEnd(Tier(int(number))), *where)
            elif name == "failed":
                wire.say(Failed("EngineError", "x"), *where)
            else:
                flip = {"flip": 9} if name == "corrupt" else {}
                wire.segment(manifest, int(number), data[int(number)], announce=name == "segment", **flip)
        wire.writer.close()

    sink = told_by(talk, manifest)
    assert isinstance(sink.error, LynxError)
    for segment, got in sink.got.items():
        assert got == data[segment]
    assert sink.log[-1] == ("ended",)

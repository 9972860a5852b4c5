"""Whole transfers over real sockets."""

import asyncio
import threading

import numpy as np
import pytest
from transport_peers import CLIENT, Lease, Recorder, linked, make_data, make_manifest, raw_client, run, serving, until

from lynxkv.codec.plan import plan
from lynxkv.codec.shape import CacheShape, LayerShape
from lynxkv.codec.spec import CodecSpec, Tier
from lynxkv.errors import TransferRejected
from lynxkv.transport import Outgoing, Released, connect, parse_rate
from lynxkv.wire import MAX_DATA, Admit, FirstToken, Pull, TierEnd


def test_a_ready_transfer_arrives_whole_in_order_and_ends_its_lease():
    async def main():
        manifest = make_manifest(first_token=True)
        data = make_data(manifest)
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(manifest, data)
            lease.outgoing.first_token(FirstToken(token=42, logprob=-0.5, seed=3))
            server.announce(lease.outgoing)
            sink = Recorder()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await incoming.wait()
            assert sink.error is None
            assert sink.got == dict(enumerate(data))
            assert sink.sent_manifest.ready
            assert sink.sent_manifest.generation >> 16 == server.epoch
            assert sink.log[:2] == [("manifest",), ("token", 42)]
            landed = [entry[1] for entry in sink.log if entry[0] == "landed"]
            assert landed == list(range(len(data)))
            assert [entry[1] for entry in sink.log if entry[0] == "tier_end"] == [Tier.ANCHOR, Tier.RESIDUAL]
            assert lease.outgoing.released is None
            incoming.acknowledge()
            await lease.end.wait()
            assert lease.reason is Released.ACKNOWLEDGED
            assert link.active == 0

    run(main())


def test_segments_put_from_a_thread_while_the_pull_runs_arrive_as_they_are_put():
    """Overlap: the pull comes first, the first segments land before the last is put."""

    async def main():
        manifest = make_manifest()
        data = make_data(manifest)
        async with serving() as (server, port), linked(port) as link:
            sink = Recorder()
            first_in = threading.Event()
            sink.on_landed = lambda _: first_in.set()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await until(lambda: server.counters().parked == 1)
            lease = Lease(manifest)
            server.announce(lease.outgoing)

            def produce():
                lease.outgoing.put(0, data[0])
                assert first_in.wait(10)
                for i in range(1, len(data)):
                    assert lease.outgoing.put(i, data[i])

            await asyncio.get_running_loop().run_in_executor(None, produce)
            await incoming.wait()
            assert sink.got == dict(enumerate(data))
            assert not sink.sent_manifest.ready
            incoming.acknowledge()
            await lease.end.wait()

    run(main())


def test_a_pull_of_some_tokens_and_tiers_gets_the_segments_that_touch_them():
    async def main():
        manifest = make_manifest()
        data = make_data(manifest)
        async with serving() as (server, port), linked(port) as link:
            server.announce(Lease(manifest, data).outgoing)
            sink = Recorder()
            pull = Pull(transfer=manifest.transfer, start=130, stop=250, tiers=(Tier.ANCHOR,))
            incoming = await link.pull(pull, sink)
            await incoming.wait()
            spans = {(manifest.segments[i].tier, manifest.segments[i].span.start) for i in sink.got}
            assert spans == {(Tier.ANCHOR, 128)}
            assert len(sink.got) == 4
            assert (sink.sent_manifest.start, sink.sent_manifest.stop) == (130, 250)
            incoming.acknowledge()

    run(main())


@pytest.mark.parametrize("empty", ["no tokens", "no range", "no tiers"])
def test_a_transfer_of_zero_bytes_completes_and_is_acknowledged(empty):
    """Field report 4."""

    async def main():
        manifest = make_manifest()
        data = make_data(manifest)
        pull = Pull(transfer=manifest.transfer)
        if empty == "no tokens":
            manifest = make_manifest(0, shape=CacheShape("bfloat16", ()), segments=(), transfer=manifest.transfer)
            data = []
        elif empty == "no range":
            pull = Pull(transfer=manifest.transfer, start=100, stop=100)
        else:
            pull = Pull(transfer=manifest.transfer, tiers=())
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(manifest, data)
            server.announce(lease.outgoing)
            sink = Recorder()
            incoming = await link.pull(pull, sink)
            await incoming.wait()
            assert sink.got == {}
            assert sink.error is None
            incoming.acknowledge()
            await lease.end.wait()
            assert lease.reason is Released.ACKNOWLEDGED

    run(main())


def test_many_transfers_share_a_link_and_each_gets_its_own_bytes():
    """Field report 1: never another prompt's answer."""

    async def main():
        manifests = [make_manifest() for _ in range(20)]
        datas = [make_data(m, seed) for seed, m in enumerate(manifests)]
        async with serving() as (server, port), linked(port) as link:
            leases = [Lease(m, d) for m, d in zip(manifests, datas, strict=True)]
            for lease in leases:
                server.announce(lease.outgoing)
            sinks = [Recorder() for _ in manifests]
            pulls = [await link.pull(Pull(transfer=m.transfer), s) for m, s in zip(manifests, sinks, strict=True)]
            for incoming in pulls:
                await incoming.wait()
                incoming.acknowledge()
            for lease in leases:
                await lease.end.wait()
            assert [s.got for s in sinks] == [dict(enumerate(d)) for d in datas]
            assert server.counters().leases == 0

    run(main())


def test_an_admit_is_answered_by_the_callback_and_a_refusal_keeps_its_class_and_message():
    async def main():
        async with serving() as (server, port), linked(port) as link:
            asked = []

            async def on_admit(admit, peer):
                asked.append((admit, peer.name))
                if admit.options.get("refuse"):
                    raise TransferRejected("no room: 3 prompts wait already")
                server.announce(Outgoing(make_manifest(transfer=admit.transfer)))

            server.on_admit = on_admit
            manifest = make_manifest()
            admit = Admit(
                transfer=manifest.transfer, tokens=bytes(8), spec=manifest.spec, sampling={"logit_bias": {5: 1.0}}
            )
            admitted = await link.admit(admit)
            assert admitted.epoch == server.epoch
            assert asked == [(admit, CLIENT.name)]
            other = Admit(transfer=b"\x01" * 16, tokens=b"", spec=manifest.spec, options={"refuse": True})
            with pytest.raises(TransferRejected, match="no room: 3 prompts"):
                await link.admit(other)
            assert link.active == 0

    run(main())


def test_two_links_of_one_process_do_not_share_state():
    async def main():
        manifest = make_manifest()
        async with serving() as (server, port), linked(port) as one:
            other = await connect("127.0.0.1", port, CLIENT)
            await other.close()
            server.announce(Lease(manifest, make_data(manifest)).outgoing)
            sink = Recorder()
            incoming = await one.pull(Pull(transfer=manifest.transfer), sink)
            await incoming.wait()
            incoming.acknowledge()

    run(main())


def test_an_anchor_asked_for_late_overtakes_a_residual_that_fills_the_link():
    """Field report 18."""

    async def main():
        big, small = make_manifest(8192, 8), make_manifest(512)
        async with serving(rate=parse_rate("200mbit")) as (server, port), linked(port) as link:
            server.announce(Lease(big, make_data(big)).outgoing)
            server.announce(Lease(small, make_data(small)).outgoing)
            slow, fast = Recorder(), Recorder()
            residual = await link.pull(Pull(transfer=big.transfer, tiers=(Tier.RESIDUAL,)), slow)
            await until(lambda: len(slow.got) > 1)
            before = residual.received[Tier.RESIDUAL]
            anchor = await link.pull(Pull(transfer=small.transfer, tiers=(Tier.ANCHOR,)), fast)
            await anchor.wait()
            anchor.acknowledge()
            assert not slow.end.is_set()
            assert residual.received[Tier.RESIDUAL] - before < 1 << 20
            residual.cancel("enough")

    run(main())


def test_a_large_segment_goes_out_in_few_large_frames():
    """Field report 15: tens of thousands of descriptors dominate a transfer's time."""

    async def main():
        shape = CacheShape("bfloat16", (LayerShape(8, 128, 128, 0, 4096),))
        spec = CodecSpec(raw=True)
        manifest = make_manifest(4096, shape=shape, spec=spec, segments=plan(shape, spec, segment_tokens=4096))
        assert len(manifest.segments) == 2
        data = make_data(manifest)
        async with serving() as (server, port):
            server.announce(Lease(manifest, data).outgoing)
            wire = await raw_client(port)
            wire.say(Pull(transfer=manifest.transfer, tiers=(Tier.ANCHOR,)), manifest.transfer)
            frames = []
            while not frames or frames[-1].event != TierEnd(Tier.ANCHOR):
                frames.append(await wire.frame())
            assert sum(f.header.length for f in frames if f.event is None) == sum(map(len, data))
            assert len(frames) <= sum(map(len, data)) / MAX_DATA + 8
            wire.writer.close()

    run(main())


def test_it_works_on_the_standard_event_loop_too():
    async def main():
        manifest = make_manifest()
        data = make_data(manifest)
        async with serving() as (server, port), linked(port) as link:
            lease = Lease(manifest, data)
            server.announce(lease.outgoing)
            sink = Recorder()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await incoming.wait()
            incoming.acknowledge()
            await lease.end.wait()
            assert sink.got == dict(enumerate(data))

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_segment_is_received_where_the_sink_wants_it():
    async def main():
        manifest = make_manifest(128, 1)
        data = make_data(manifest)
        arena = np.zeros(sum(map(len, data)), np.uint8)
        starts = np.cumsum([0, *map(len, data)])

        class Arena(Recorder):
            def buffer(self, segment, size):
                self.buffers[segment] = memoryview(arena[starts[segment] : starts[segment] + size])
                return self.buffers[segment]

        async with serving() as (server, port), linked(port) as link:
            outgoing = Outgoing(manifest)
            for i, one in enumerate(data):
                outgoing.put(i, np.frombuffer(one, np.uint16) if len(one) % 2 == 0 else one)
            server.announce(outgoing)
            incoming = await link.pull(Pull(transfer=manifest.transfer), Arena())
            await incoming.wait()
            incoming.acknowledge()
            assert arena.tobytes() == b"".join(data)

    run(main())


def test_a_producer_that_works_long_without_data_keeps_lease_and_peer():
    """Field report 3: a wait has a deadline, and a slow prefill is no dead one."""

    async def main():
        manifest = make_manifest()
        data = make_data(manifest)
        async with serving(lease_s=0.4) as (server, port), linked(port) as link:
            lease = Lease(manifest)
            server.announce(lease.outgoing)
            sink = Recorder()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink, stall_s=0.4)
            begun = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() - begun < 1.2:
                assert lease.outgoing.renew()
                await asyncio.sleep(0.05)  # the producer's own pace, not a wait for anything
            for i, piece in enumerate(data):
                lease.outgoing.put(i, piece)
            await incoming.wait()
            assert sink.error is None

    run(main())


def test_a_residual_waits_for_its_own_anchor_to_the_last_byte():
    """Ageing lets residuals through under other transfers' anchors, never under their own."""

    async def main():
        manifest = make_manifest(8192, 8)
        async with serving(rate=20e6) as (server, port), linked(port) as link:
            lease = Lease(manifest, make_data(manifest))
            server.announce(lease.outgoing)
            sink = Recorder()
            seen = []
            sink.on_landed = lambda _: seen.append(list(incoming.received))
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await incoming.wait()
            anchor = incoming.received[Tier.ANCHOR]
            assert anchor > 1_000_000
            assert all(got[Tier.RESIDUAL] == 0 for got in seen if got[Tier.ANCHOR] < anchor)

    run(main())

"""Transfers on their way to an announcement: admitted by peers or by this process, kept, cancelled at any moment."""

import asyncio
import os

import pytest
from transport_peers import CLIENT, Lease, Recorder, linked, make_data, make_manifest, raw_client, run, serving, until

from lynxkv.errors import Cancelled, EngineError, TransferError, TransferRejected
from lynxkv.transport import Outgoing, Released
from lynxkv.wire import Admit, Cancel, Failed, Keep, Pull


def admit_of(manifest):
    return Admit(transfer=manifest.transfer, tokens=b"", spec=manifest.spec)


class Admitting:
    """Work that announces a transfer once ``go`` is set; knows whether it was cancelled."""

    def __init__(self, server, manifest):
        self.server, self.manifest = server, manifest
        self.go, self.begun, self.cancelled = asyncio.Event(), asyncio.Event(), False
        self.lease = Lease(manifest, make_data(manifest))

    async def __call__(self, *_):
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        self.server.announce(self.lease.outgoing)


@pytest.mark.parametrize("pulled", ["before", "after"])
def test_what_this_process_admits_is_served_to_whoever_pulls_it(pulled):
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            work = Admitting(server, manifest)
            admitting = asyncio.create_task(server.admit(manifest.transfer, work))
            sink = Recorder()
            if pulled == "before":
                await link.pull(Pull(transfer=manifest.transfer), sink)
                await until(lambda: server.counters().parked == 1)
            work.go.set()
            await admitting
            if pulled == "after":
                await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.end.wait()
            assert sink.error is None
            link.cancel(manifest.transfer, "done")
            await work.lease.end.wait()

    run(main())


@pytest.mark.parametrize("pulled", ["before", "after"])
@pytest.mark.parametrize("how", ["fails", "breaks", "task", "cancel"])
def test_a_pull_hears_why_what_this_process_admits_will_not_come(pulled, how):
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            begun, go = asyncio.Event(), asyncio.Event()

            async def work():
                begun.set()
                await go.wait()
                raise EngineError("prompt too strange") if how == "fails" else ZeroDivisionError("a bug")

            admitting = asyncio.create_task(server.admit(manifest.transfer, work))
            await begun.wait()
            assert server.counters().admitting == 1
            sink = Recorder()
            if pulled == "before":
                await link.pull(Pull(transfer=manifest.transfer), sink)
                await until(lambda: server.counters().parked == 1)
            if how == "task":
                admitting.cancel()
            elif how == "cancel":
                server.cancel(manifest.transfer, "enough")
            else:
                go.set()
            expected = {
                "fails": EngineError,
                "breaks": ZeroDivisionError,
                "task": asyncio.CancelledError,
                "cancel": Cancelled,
            }
            with pytest.raises(expected[how]):
                await admitting
            if pulled == "after":
                await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.end.wait()
            told = {"fails": "prompt too strange", "breaks": "a bug", "task": "cancelled", "cancel": "enough"}
            assert told[how] in str(sink.error)
            assert isinstance(sink.error, EngineError if how == "fails" else TransferError)
            assert server.counters().admitting == 0

    run(main())


def test_a_peers_cancel_ends_its_admission_at_once():
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            server.on_admit = work = Admitting(server, manifest)
            asking = asyncio.create_task(link.admit(admit_of(manifest)))
            await work.begun.wait()
            asking.cancel()
            await until(lambda: server.counters().admitting == 0)
            assert work.cancelled
            with pytest.raises(TransferRejected, match="has ended"):
                server.announce(Outgoing(manifest))

    run(main())


def test_a_cancel_that_comes_with_its_admit_leaves_nothing():
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port):
            server.on_admit = work = Admitting(server, manifest)
            work.go.set()
            wire = await raw_client(port)
            wire.say(admit_of(manifest), manifest.transfer)
            wire.say(Cancel("never mind"), manifest.transfer)
            assert "cancelled" in (await wire.expect(Failed)).message
            assert server.counters().admitting == server.counters().leases == 0
            wire.writer.close()

    run(main())


def test_admits_of_one_id_at_once_are_one_admission():
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port):
            server.on_admit = work = Admitting(server, manifest)
            wire = await raw_client(port)
            for _ in range(2):
                wire.say(admit_of(manifest), manifest.transfer)
            assert "being admitted already" in (await wire.expect(Failed)).message
            await work.begun.wait()
            with pytest.raises(TransferRejected, match="being admitted already"):
                await server.admit(manifest.transfer, work)
            assert server.counters().admitting == 1
            wire.writer.close()
            await until(lambda: server.counters().admitting == 0)
            assert work.cancelled

    run(main())


def test_an_admission_cancelled_as_it_announces_leaves_no_lease():
    """Cancelled between the announcement and the answer."""

    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, _):
            work = Admitting(server, manifest)

            async def announce():
                work.go.set()
                await work()
                admitting.cancel()

            admitting = asyncio.create_task(server.admit(manifest.transfer, announce))
            with pytest.raises(asyncio.CancelledError):
                await admitting
            await work.lease.end.wait()
            assert work.lease.reason is Released.CANCELLED
            assert server.counters().leases == 0

    run(main())


@pytest.mark.parametrize("stage", ["unknown", "parked", "announced", "pulled"])
def test_a_transfer_is_cancelled_here_in_any_state_and_its_peer_is_told(stage):
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link:
            sink, lease = Recorder(), Lease(manifest)
            if stage in ("announced", "pulled"):
                server.announce(lease.outgoing)
            if stage in ("parked", "pulled"):
                await link.pull(Pull(transfer=manifest.transfer), sink)
                await until(lambda: server.counters().parked + server.counters().deliveries == 1)
            assert server.withdraw(manifest.transfer, "x") is (stage != "pulled")
            server.cancel(manifest.transfer, "enough")
            if stage in ("announced", "pulled"):
                assert lease.reason is Released.CANCELLED
            if stage in ("unknown", "announced"):
                await link.pull(Pull(transfer=manifest.transfer), sink)
            await sink.end.wait()
            assert isinstance(sink.error, TransferRejected)
            with pytest.raises(TransferRejected, match="draw a new id"):
                server.announce(Outgoing(manifest))

    run(main())


def test_a_lease_that_is_kept_outlives_its_time_and_one_that_is_pulled_does_not():
    async def main():
        async with serving(lease_s=0.2) as (server, port), linked(port) as link:
            kept, pulled = make_manifest(128, 1), make_manifest(128, 1)
            leases = [Lease(kept), Lease(pulled)]
            for lease in leases:
                server.announce(lease.outgoing)
            await link.pull(Pull(transfer=pulled.transfer), Recorder())

            async def keep():
                while True:
                    for manifest in (kept, pulled):
                        link.keep(manifest.transfer)
                    await asyncio.sleep(0.05)

            keeping = asyncio.create_task(keep())
            await leases[1].end.wait()
            assert leases[1].reason is Released.EXPIRED
            assert leases[0].reasons == []
            keeping.cancel()
            await leases[0].end.wait()
            assert leases[0].reason is Released.EXPIRED
            link.keep(os.urandom(16))

    run(main())


def test_a_keep_of_an_id_that_is_not_known_is_ignored():
    async def main():
        async with serving() as (server, port):
            wire = await raw_client(port, CLIENT)
            wire.say(Keep(), os.urandom(16))
            wire.say(Cancel("x"), os.urandom(16))
            await until(lambda: len(server._history._ended) == 1)
            assert server.counters().connections == 1
            wire.writer.close()

    run(main())


def test_a_pull_that_waits_is_not_ended_by_another_peers_cancel():
    async def main():
        manifest = make_manifest(128, 1)
        async with serving() as (server, port), linked(port) as link, linked(port) as other:
            sink = Recorder()
            incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
            await until(lambda: server.counters().parked == 1)
            other.cancel(manifest.transfer, "not mine")
            other.cancel(os.urandom(16), "so that the first is known to have come")
            await until(lambda: len(server._history._ended) == 1)
            lease = Lease(manifest, make_data(manifest))
            server.announce(lease.outgoing)
            await incoming.wait()
            incoming.acknowledge()
            await lease.end.wait()
            assert lease.reason is Released.ACKNOWLEDGED

    run(main())

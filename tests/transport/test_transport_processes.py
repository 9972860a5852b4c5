"""Peers that are killed or stopped, as processes of their own."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

from transport_peers import Lease, Recorder, linked, make_data, make_manifest, run, serving, until

from lynxkv.errors import DeadlineExceeded, PeerLost
from lynxkv.transport import Released, parse_rate
from lynxkv.wire import Pull

PROGRAM = os.path.join(os.path.dirname(__file__), "transport_process.py")


@asynccontextmanager
async def process(*arguments):
    """A running transport_process; killed at the end."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAM, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def pulled_from(child, link_, stall_s=20.0):
    """A pull from the child of which some has landed."""
    sink = Recorder()
    await link_.pull(Pull(transfer=child.transfer), sink, stall_s=stall_s)
    await until(lambda: len(sink.got) > 1)
    return sink


async def address(child):
    port, transfer = (await child.stdout.readline()).split()
    child.transfer = bytes.fromhex(transfer.decode())
    return int(port)


def test_a_prefill_process_that_is_killed_ends_the_pull_with_peer_lost():
    """Field report 3."""

    async def main():
        async with process("serve") as child, linked(await address(child)) as link:
            sink = await pulled_from(child, link)
            child.kill()
            await sink.end.wait()
            assert isinstance(sink.error, PeerLost)

    run(main(), 90)


def test_a_prefill_process_that_is_stopped_ends_the_pull_at_its_stall_deadline():
    """Field report 3."""

    async def main():
        async with process("serve") as child, linked(await address(child)) as link:
            sink = await pulled_from(child, link, stall_s=0.5)
            os.kill(child.pid, signal.SIGSTOP)
            await sink.end.wait()
            assert isinstance(sink.error, DeadlineExceeded)

    run(main(), 90)


def test_a_decode_process_that_is_killed_frees_its_lease():
    """Field report 3."""

    async def main():
        manifest = make_manifest(4096, 8)
        async with serving(rate=parse_rate("40mbit")) as (server, port):
            lease = Lease(manifest, make_data(manifest))
            server.announce(lease.outgoing)
            async with process("pull", port, manifest.transfer.hex()) as child:
                await child.stdout.readline()
                child.kill()
                await lease.end.wait()
            assert lease.reason is Released.PEER_LOST

    run(main(), 90)


def test_a_decode_process_that_is_stopped_loses_its_lease():
    """Field report 3."""

    async def main():
        manifest = make_manifest(16384, 8)
        async with serving(lease_s=0.5) as (server, port):
            lease = Lease(manifest, make_data(manifest))
            async with process("pull", port, manifest.transfer.hex()) as child:
                await until(lambda: server.counters().parked == 1)  # it has started, however long that took
                server.announce(lease.outgoing)
                await child.stdout.readline()
                os.kill(child.pid, signal.SIGSTOP)
                await lease.end.wait()
            assert lease.reason is Released.EXPIRED

    run(main(), 90)

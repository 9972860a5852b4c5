"""A node in a process of its own, for tests that kill it: ``transport_process.py serve`` or ``pull PORT ID``."""

import asyncio
import sys

from transport_peers import CLIENT, SERVER, Recorder, make_data, make_manifest

from lynxkv.transport import Outgoing, Server, connect, parse_rate
from lynxkv.wire import Pull


async def serve():
    """Serve one large transfer slowly; prints its port and id."""
    server = Server(SERVER, rate=parse_rate("40mbit"))
    _, port = await server.start("127.0.0.1", 0)
    manifest = make_manifest(4096, 8)
    outgoing = Outgoing(manifest)
    for i, one in enumerate(make_data(manifest)):
        outgoing.put(i, one)
    server.announce(outgoing)
    print(port, manifest.transfer.hex(), flush=True)
    await asyncio.Event().wait()


async def pull(port, transfer):
    """Pull and never finish; prints when the first segment has landed."""
    link = await connect("127.0.0.1", port, CLIENT)
    sink = Recorder()
    sink.on_landed = lambda i: print("landed", i, flush=True)
    await link.pull(Pull(transfer=transfer), sink)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve() if sys.argv[1] == "serve" else pull(int(sys.argv[2]), bytes.fromhex(sys.argv[3])))

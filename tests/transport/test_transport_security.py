"""Who may read KV: peers with a certificate of the nodes' authority, with the nodes' secret, and nobody else."""

import asyncio
import logging
import os
import ssl

import msgspec
import pytest
from cryptography import x509
from transport_peers import CLIENT, SERVER, Lease, Recorder, make_data, make_manifest, raw_client, run, serving, until

from certificates import Authority
from lynxkv.codec.spec import Tier
from lynxkv.errors import HandshakeRefused, PeerLost, RequestError
from lynxkv.transport import Released, Security, connect
from lynxkv.wire import HANDSHAKE_VERSION, Admit, Hello, Pull, Refused

SECRET = "correct horse battery staple"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def nodes(authority):
    """Security of a prefill and of a decode node."""
    return [Security(*authority.issue(name), authority.ca, SECRET) for name in ("prefill", "decode")]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    other = Authority(tmp_path_factory.mktemp("theirs"))
    return Security(*other.issue("stranger"), other.ca)


def hello(peer, security):
    return msgspec.structs.replace(peer, secret=security.secret)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


async def pulls_everything(server, link):
    """Whether a transfer arrives whole over ``link`` and its lease ends."""
    manifest = make_manifest(2048, 4)
    data = make_data(manifest)
    lease = Lease(manifest, data)
    server.announce(lease.outgoing)
    sink = Recorder()
    incoming = await link.pull(Pull(transfer=manifest.transfer), sink)
    await incoming.wait()
    incoming.acknowledge()
    await lease.end.wait()
    return sink.got == dict(enumerate(data)) and lease.reason is Released.ACKNOWLEDGED


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nodes_of_one_authority_and_secret_transfer_over_tls_and_leave_nothing(nodes, host):
    ours, theirs = nodes

    async def main():
        async with serving(hello(SERVER, ours), tls=ours.server_context()) as (server, port):
            before = descriptors()
            link = await connect(host, port, hello(CLIENT, theirs), tls=theirs.client_context())
            assert await pulls_everything(server, link)
            assert link.peer.secret is None
            await link.close()
            await until(lambda: server.counters().connections == 0 and descriptors() == before)

    run(main())


def refused_by_tls(server_side, client_side):
    """The error a client gets, once the server has forgotten it."""

    async def main():
        async with serving(hello(SERVER, server_side), tls=server_side.server_context()) as (server, port):
            before = descriptors()
            with pytest.raises((HandshakeRefused, PeerLost)) as caught:
                await connect("127.0.0.1", port, CLIENT, tls=client_side)
            await until(lambda: server.counters().connections == 0 and descriptors() == before)
            return caught.value

    return run(main())


def test_a_peer_without_a_certificate_is_refused(nodes, authority):
    context = ssl.create_default_context(cafile=authority.ca)
    assert "does the peer take our certificate?" in str(refused_by_tls(nodes[0], context))


def test_a_peer_with_a_certificate_of_another_authority_is_refused(nodes, authority, stranger):
    context = ssl.create_default_context(cafile=authority.ca)
    context.load_cert_chain(stranger.cert, stranger.key)
    assert "does the peer take our certificate?" in str(refused_by_tls(nodes[0], context))


def test_a_server_of_another_authority_is_refused(nodes, stranger):
    error = refused_by_tls(stranger, nodes[1].client_context())
    assert isinstance(error, HandshakeRefused)
    assert "certificate" in str(error)


def test_a_server_that_answers_to_another_name_is_refused(nodes, authority):
    elsewhere = Security(*authority.issue("elsewhere", [x509.DNSName("elsewhere.example")]), authority.ca)
    error = refused_by_tls(elsewhere, nodes[1].client_context())
    assert isinstance(error, HandshakeRefused)
    assert "127.0.0.1" in str(error)


def test_a_peer_without_tls_is_cut_off_by_a_server_with_it(nodes):
    assert isinstance(refused_by_tls(nodes[0], None), PeerLost)


def test_tls_older_than_1_2_is_refused(nodes):
    assert nodes[0].server_context().minimum_version == ssl.TLSVersion.TLSv1_2
    assert nodes[1].client_context().minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("offered", [None, "wrong", SECRET + "x", SECRET[:-1], "", "ünïcödé"])
def test_a_peer_without_the_secret_reads_no_kv_and_learns_nothing(offered, caplog):
    caplog.set_level(logging.DEBUG)

    async def main():
        async with serving(msgspec.structs.replace(SERVER, secret=SECRET)) as (server, port):
            lease = Lease(make_manifest(128, 1), make_data(make_manifest(128, 1)))
            server.announce(lease.outgoing)
            with pytest.raises(HandshakeRefused, match="secret differs") as caught:
                await connect("127.0.0.1", port, msgspec.structs.replace(CLIENT, secret=offered))
            await until(lambda: server.counters().connections == 0)
            assert server.counters().deliveries == 0
            lease.outgoing.fail(PeerLost("over"))
            await lease.end.wait()
            return str(caught.value)

    text = run(main()) + caplog.text
    assert SECRET not in text
    assert not offered or f"'{offered}'" not in text
    assert str(SERVER.fingerprint.weights) not in text


def test_what_a_peer_without_the_secret_asks_before_it_is_refused_is_not_done():
    """It sends its hello, an admit and a pull in one go."""
    manifest = make_manifest(128, 1)

    async def main():
        async with serving(msgspec.structs.replace(SERVER, secret=SECRET)) as (server, port):
            asked = []

            async def on_admit(admit, _):
                asked.append(admit)

            server.on_admit = on_admit
            lease = Lease(manifest, make_data(manifest))
            server.announce(lease.outgoing)
            wire = await raw_client(port, None)
            wire.say(CLIENT, version=HANDSHAKE_VERSION)
            wire.say(Admit(transfer=b"\x01" * 16, tokens=b"", spec=manifest.spec), b"\x01" * 16)
            wire.say(Pull(transfer=manifest.transfer), manifest.transfer)
            await wire.expect(Refused)
            with pytest.raises((EOFError, ConnectionResetError)):
                await wire.frame()
            assert asked == []
            assert server.counters().deliveries == 0
            wire.writer.close()

    run(main())


def test_a_server_without_the_secret_is_refused_before_it_hears_a_prompt():
    async def main():
        async with serving() as (server, port):
            with pytest.raises(HandshakeRefused, match="secret differs"):
                await connect("127.0.0.1", port, msgspec.structs.replace(CLIENT, secret=SECRET))
            await until(lambda: server.counters().connections == 0)

    run(main())


def test_connections_that_never_greet_are_bounded():
    async def main():
        async with serving(max_connections=2) as (server, port):
            wires = [await raw_client(port, None) for _ in range(4)]
            await until(lambda: server.counters().connections == 4)
            over = await raw_client(port, None)
            with pytest.raises((EOFError, ConnectionResetError)):
                await over.frame()
            assert server.counters().connections == 4
            for wire in [*wires, over]:
                wire.writer.close()
            await until(lambda: server.counters().connections == 0)

    run(main())


@pytest.mark.parametrize("address", [("nowhere.invalid", 1), ("127.0.0.1", 70000), ("x" * 300, 1), ("a\0b", 1)])
def test_an_address_that_cannot_be_is_a_lost_peer(address):
    async def main():
        with pytest.raises(PeerLost, match="cannot connect"):
            await connect(*address, CLIENT)

    run(main())


def test_no_text_shows_a_secret(nodes):
    shown = [repr(nodes[0]), str(nodes[0]), repr(hello(SERVER, nodes[0])), str(hello(SERVER, nodes[0]))]
    assert not any(SECRET in text for text in shown)
    assert "prefill" in repr(Hello(role="prefill", secret=SECRET))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cert": "node.pem"}, "a certificate, its key and the authority"),
        ({"cert": "node.pem", "key": "node.key"}, "a certificate, its key and the authority"),
        ({"secret": ""}, "1..1024 characters"),
        ({"secret": "x" * 1025}, "1..1024 characters"),
        ({"secret": "x\udc80"}, "not valid UTF-8"),
    ],
)
def test_half_a_security_is_refused(given, message):
    with pytest.raises(RequestError, match=message):
        Security(**given)


def test_files_that_cannot_be_used_are_named(nodes, tmp_path):
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(RequestError, match=r"broken\.pem"):
        Security(broken, nodes[0].key, nodes[0].ca).server_context()
    with pytest.raises(RequestError, match=r"broken\.pem"):
        Security(nodes[0].cert, nodes[0].key, broken).client_context()
    with pytest.raises(RequestError, match=r"missing\.key"):
        Security(nodes[0].cert, tmp_path / "missing.key", nodes[0].ca).server_context()


def test_an_anchor_overtakes_a_residual_over_tls(nodes):
    """Priorities hold where TLS has buffers of its own."""
    ours, theirs = nodes

    async def main():
        async with serving(hello(SERVER, ours), tls=ours.server_context()) as (server, port):
            link = await connect("127.0.0.1", port, hello(CLIENT, theirs), tls=theirs.client_context())
            big, small = make_manifest(16384, 8), make_manifest(512, 2)
            leases = [Lease(big, make_data(big)), Lease(small, make_data(small))]
            sinks = [Recorder(), Recorder()]
            residual = sum(big.bounds(i)[0] for i, s in enumerate(big.segments) if s.tier is Tier.RESIDUAL)
            for lease in leases:
                server.announce(lease.outgoing)
            bulk = await link.pull(Pull(transfer=big.transfer, tiers=(Tier.RESIDUAL,)), sinks[0])
            await sinks[0].started.wait()
            urgent = await link.pull(Pull(transfer=small.transfer, tiers=(Tier.ANCHOR,)), sinks[1])
            await urgent.wait()
            assert bulk.received[Tier.RESIDUAL] < residual / 2
            await bulk.wait()
            await link.close()
            await asyncio.gather(*(lease.end.wait() for lease in leases))

    run(main())

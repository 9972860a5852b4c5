"""The decode side of a connection: admits and pulls, many at a time."""

import asyncio
import ssl

import msgspec

from lynxkv.errors import DeadlineExceeded, HandshakeRefused, LynxError, PeerLost, ProtocolError, TransferRejected
from lynxkv.transport.connection import SHUTDOWN_S, Connection
from lynxkv.transport.incoming import Incoming, Sink
from lynxkv.wire.events import Admit, Admitted, Cancel, Failed, Hello, Keep, Pull, error_of
from lynxkv.wire.frames import NO_TRANSFER, Header
from lynxkv.wire.handshake import new_epoch
from lynxkv.wire.landing import Landing
from lynxkv.wire.reader import Frame


class Link:
    """A greeted connection to a server; made by :func:`connect`. Used on its loop's thread only."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._loop = asyncio.get_running_loop()
        self._incoming: dict[bytes, Incoming] = {}
        self._admits: dict[bytes, asyncio.Future[Admitted]] = {}
        self._connection: Connection | None = None
        self._error: LynxError | None = None
        self.greeting = asyncio.Event()
        self.gone = asyncio.Event()

    @property
    def peer(self) -> Hello:
        """What the server said of itself."""
        peer = self._connected.peer
        if peer is None:
            raise PeerLost("the server has not greeted")
        return peer

    @property
    def error(self) -> LynxError | None:
        """Why the link ended; None while it is up."""
        return self._error

    @property
    def received_bytes(self) -> int:
        """All bytes received so far, headers and events included."""
        return 0 if self._connection is None else self._connection.received_bytes

    @property
    def active(self) -> int:
        """Pulls and admits that have not ended."""
        return len(self._incoming) + len(self._admits)

    def pulls(self, transfer: bytes) -> bool:
        """Whether ``transfer`` is being pulled on this link."""
        return transfer in self._incoming

    async def admit(self, admit: Admit, *, deadline_s: float = 30.0) -> Admitted:
        """Ask the server to prefill and announce a transfer.

        Raises
        ------
        LynxError
            The server's refusal, of the class it raised there.
        DeadlineExceeded, PeerLost
            No answer came. The server is told that the transfer is cancelled.
        """
        connection = self._connected
        name = f"transfer {admit.transfer.hex()[:12]}"
        if admit.transfer in self._admits:
            raise TransferRejected(f"{name} is being admitted already; draw a new id")
        answer: asyncio.Future[Admitted] = self._loop.create_future()
        self._admits[admit.transfer] = answer
        try:
            connection.send(admit, admit.transfer)
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as e:
            if isinstance(e, LynxError):
                raise
            self.cancel(admit.transfer, "its admission took too long")
            raise DeadlineExceeded(f"{name}: not admitted within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            self.cancel(admit.transfer, "its admission was cancelled")
            raise
        finally:
            self._admits.pop(admit.transfer, None)

    async def pull(self, pull: Pull, sink: Sink, *, stall_s: float = 30.0) -> Incoming:
        """Ask for a transfer and return at once; ``sink`` hears what comes.

        ``pull.deadline_s`` bounds the wait for the manifest, ``stall_s`` the time without any byte after it.
        Raises :class:`TransferRejected` if this link pulls that id already, :class:`PeerLost` if it has ended.
        """
        connection = self._connected
        if pull.transfer == NO_TRANSFER:
            raise TransferRejected("the id of a transfer is random, not all zero")
        if pull.transfer in self._incoming:
            raise TransferRejected(f"transfer {pull.transfer.hex()[:12]} is being pulled already; one pull a transfer")
        incoming = Incoming(connection, pull, sink, self._hello.fingerprint, stall_s, self._forget)
        self._incoming[pull.transfer] = incoming
        connection.send(pull, pull.transfer)
        return incoming

    def cancel(self, transfer: bytes, reason: str) -> None:
        """Tell the server that a transfer, pulled or only admitted, is not needed; no effect on a dead link."""
        incoming = self._incoming.get(transfer)
        if incoming is not None:
            incoming.cancel(reason)
        elif self._connection is not None:
            self._connection.send(Cancel(reason[:4000]), transfer)

    def keep(self, transfer: bytes) -> None:
        """Tell the server that an admitted transfer will be pulled later; no effect on a dead link."""
        if self._connection is not None:
            self._connection.send(Keep(), transfer)

    async def close(self) -> None:
        """Cancel what is pulled and close; idempotent."""
        for incoming in list(self._incoming.values()):
            incoming.cancel("the link is closed")
        if self._connection is not None:
            self._connection.close(PeerLost("the link was closed here"))

    @property
    def _connected(self) -> Connection:
        if self._connection is None or self._error is not None:
            raise PeerLost(f"the link is down: {self._error or 'it never came up'}; connect again")
        return self._connection

    def _forget(self, incoming: Incoming) -> None:
        if self._incoming.get(incoming.transfer) is incoming:
            del self._incoming[incoming.transfer]

    # What the connection tells (see connection.Owner).

    def open(self, handshake_s: float) -> Connection:
        """Make the connection this link works on."""
        self._connection = Connection(self._hello, self, opens=True, handshake_s=handshake_s)
        return self._connection

    def connected(self, connection: Connection) -> None:
        """Nothing to do: the connection greets."""

    def greeted(self, connection: Connection) -> None:
        """The link is up."""
        if not self.peer.epoch:
            raise ProtocolError(f"{connection!r} serves without an epoch; its data could not be told from stale data")
        self.greeting.set()

    def place(self, connection: Connection, header: Header) -> Landing | None:
        """Where a data frame goes; that of an ended transfer is dropped."""
        incoming = self._incoming.get(header.transfer)
        return None if incoming is None else incoming.place(header)

    def received(self, connection: Connection, frame: Frame) -> None:
        """Give a frame to its transfer; late ones of ended transfers are dropped."""
        event, transfer = frame.event, frame.header.transfer
        answer = self._admits.get(transfer)
        if isinstance(event, Admitted):
            if answer is not None and not answer.done():
                answer.set_result(event)
            return
        if isinstance(event, Failed) and answer is not None and not answer.done():
            answer.set_exception(error_of(event))
            return
        incoming = self._incoming.get(transfer)
        if incoming is not None:
            incoming.frame(frame)
        elif isinstance(event, Admit | Pull | Hello):
            raise ProtocolError(f"{connection!r} sent a {type(event).__name__} to a decode node")

    def writable(self, connection: Connection) -> None:
        """A link sends events only; nothing waits for this."""

    def lost(self, connection: Connection, error: LynxError) -> None:
        """Everything on this link ends with ``error``."""
        self._error = error
        for answer in self._admits.values():
            if not answer.done():
                answer.set_exception(error)
        for incoming in list(self._incoming.values()):
            incoming.fail(error, tell=False)
        self.greeting.set()
        self.gone.set()


async def connect(
    host: str, port: int, hello: Hello, *, deadline_s: float = 5.0, tls: ssl.SSLContext | None = None
) -> Link:
    """Connect and shake hands, with ``tls`` inside TLS (see :class:`lynxkv.transport.Security`).

    Raises
    ------
    PeerLost
        Nobody listens there, or the connection ended.
    HandshakeRefused
        The two do not fit together, which names the field and both values; or do not trust each other.
    DeadlineExceeded
        Not done within ``deadline_s``.
    """
    loop = asyncio.get_running_loop()
    link = Link(hello if hello.epoch else msgspec.structs.replace(hello, epoch=new_epoch()))
    try:
        async with asyncio.timeout(deadline_s):
            await loop.create_connection(
                lambda: link.open(deadline_s),
                host,
                port,
                ssl=tls,
                ssl_handshake_timeout=deadline_s if tls else None,
                ssl_shutdown_timeout=SHUTDOWN_S if tls else None,
            )
            await link.greeting.wait()
    except asyncio.CancelledError:
        await link.close()
        raise
    except TimeoutError:
        await link.close()
        raise DeadlineExceeded(f"no connection to {host}:{port} within {deadline_s:g} s") from None
    except ssl.SSLError as e:
        raise HandshakeRefused(f"no TLS with {host}:{port}: {e}; do both have certificates of one authority?") from e
    except OSError as e:
        raise PeerLost(f"cannot connect to {host}:{port}: {e.strerror or e}; is the node running there?") from e
    except (ValueError, OverflowError) as e:  # a host or a port that cannot be
        raise PeerLost(f"cannot connect to {host}:{port}: {e}") from e
    if link.error is not None:
        raise link.error
    return link

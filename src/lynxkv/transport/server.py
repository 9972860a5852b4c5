"""The producer's side: announced transfers are served to whoever pulls them, under leases."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from lynxkv.codec.spec import Tier
from lynxkv.errors import (
    DeadlineExceeded,
    LynxError,
    ProtocolError,
    StaleGeneration,
    TransferError,
    TransferRejected,
)
from lynxkv.transport.admissions import Admissions, OnAdmit
from lynxkv.transport.connection import SHUTDOWN_S, Connection
from lynxkv.transport.counters import Counters, Totals
from lynxkv.transport.delivery import Delivery
from lynxkv.transport.history import History
from lynxkv.transport.leases import Lease, Leases
from lynxkv.transport.outgoing import Outgoing, Released
from lynxkv.transport.parking import Parking
from lynxkv.transport.pump import Pump
from lynxkv.wire.events import (
    Acknowledge,
    Admit,
    AnyEvent,
    Cancel,
    Hello,
    Keep,
    Pull,
    Reject,
    Resend,
    Working,
    failed,
)
from lynxkv.wire.frames import NO_TRANSFER, Header
from lynxkv.wire.handshake import make_generation, new_epoch
from lynxkv.wire.landing import Landing
from lynxkv.wire.manifest import check_manifest
from lynxkv.wire.reader import Frame

log = logging.getLogger(__name__)

T = TypeVar("T")


class Server:
    """Serves outgoing transfers over TCP; everything happens on the loop that calls :meth:`start`.

    Parameters
    ----------
    hello : Hello
        What this node says of itself; ``epoch`` 0 is replaced by a new one.
    tls : SSLContext, optional
        Everything goes inside TLS; see :class:`lynxkv.transport.Security`.
    rate : float, optional
        Bytes a second of all connections together, headers included.
    lease_s : float
        A transfer ends when it makes no progress for so long.
    handshake_s : float
        A new connection must greet within so long.
    max_connections, max_parked, max_admitting : int
        Bounds on what peers can make the server hold; more is refused.

    Attributes
    ----------
    totals : Totals
    on_admit : callable, optional
        ``await on_admit(admit, peer)``; returns to admit, raises LynxError to refuse.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        tls: ssl.SSLContext | None = None,
        rate: float | None = None,
        lease_s: float = 30.0,
        handshake_s: float = 5.0,
        max_connections: int = 256,
        max_parked: int = 1024,
        max_admitting: int = 64,
    ) -> None:
        self.hello = hello if hello.epoch else msgspec.structs.replace(hello, epoch=new_epoch())
        self.on_admit: OnAdmit | None = None
        self.totals = Totals()
        self._tls = tls
        self._handshake_s = handshake_s
        self._max_connections = max_connections
        self._pump = Pump(rate, self._sent, self._broke)
        self._connections: set[Connection] = set()
        self._leases = Leases(lease_s)
        self._parking = Parking(max_parked)
        self._admissions = Admissions(max_admitting, self._refuse_new, self._not_admitted)
        self._history = History()
        self._listener: asyncio.Server | None = None
        self._sweep_handle: asyncio.TimerHandle | None = None
        self._draining = self._closed = False
        self._empty = asyncio.Event()

    @property
    def epoch(self) -> int:
        """This life of the server."""
        return self.hello.epoch

    def counters(self) -> Counters:
        """What is held right now."""
        deliveries = self._leases.deliveries
        return Counters(
            leases=len(self._leases),
            deliveries=len(deliveries),
            parked=len(self._parking),
            admitting=len(self._admissions),
            queued_bytes=sum(d.queued for d in deliveries),
            flows=len(self._pump),
            connections=len(self._connections),
        )

    def check_integrity(self) -> None:
        """Raise :class:`TransferError` if what is held contradicts itself (a leak)."""
        deliveries, parked = self._leases.deliveries, self._parking.parked
        if (
            len(self._pump) != sum(self._pump.flows(d) for d in deliveries)
            or any(transfer in self._leases for transfer in parked)
            or any(d.connection not in self._connections for d in deliveries)
            or any(p.connection not in self._connections for p in parked.values())
            or any(lease.outgoing.released is not None for lease in self._leases)
        ):
            raise TransferError(f"the server's books do not agree: {self.counters()}")

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the address that was bound (port 0: any free one). :class:`TransferError` if it is taken."""
        self._loop = asyncio.get_running_loop()
        self._pump.start()
        try:
            self._listener = await self._loop.create_server(
                self._accept,
                host,
                port,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_s if self._tls else None,
                ssl_shutdown_timeout=SHUTDOWN_S if self._tls else None,
            )
        except OSError as e:
            raise TransferError(f"cannot listen on {host}:{port}: {e.strerror or e}; choose another port") from e
        self._sweep()
        bound = self._listener.sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    def is_pulled(self, transfer: bytes) -> bool:
        """Whether somebody receives ``transfer`` now."""
        return self._leases.delivery(transfer) is not None

    def announce(self, outgoing: Outgoing) -> None:
        """Take a transfer under lease; a pull that waits for it starts at once.

        Raises
        ------
        TransferRejected
            The id is in use or was used before (a cancel may come before the announcement), or the server drains.
        ProtocolError
            The manifest is not one a peer would take.
        """
        check_manifest(outgoing.manifest)
        transfer = outgoing.transfer
        self._refuse_new(transfer)
        self._history.begin(transfer)
        lease = self._leases.add(outgoing, self._loop.time())
        outgoing.bind(self._loop, self)
        parked = self._parking.take(transfer)
        if parked is not None:
            self._deliver(lease, parked.pull, parked.connection)

    async def admit(self, transfer: bytes, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work``, which announces ``transfer``, as a peer's admit is run, for a caller in this process.

        Whoever pulls the transfer already, or does later, hears why the admission failed. Cancelling it withdraws the
        transfer.

        Raises
        ------
        TransferRejected
            The id is in use or was used before, or the server drains.
        Cancelled
            :meth:`cancel` ended it.
        """
        return await self._admissions.run(transfer, work)

    def withdraw(self, transfer: bytes, why: str) -> bool:
        """End a transfer that nobody pulls; whether it is over."""
        if self.is_pulled(transfer):
            return False
        self.cancel(transfer, why)
        return True

    def cancel(self, transfer: bytes, why: str) -> None:
        """End a transfer whatever its state: admitted, announced, pulled, or not known yet. Its peer is told."""
        error = TransferRejected(f"transfer {transfer.hex()[:12]} was cancelled by the prefill node: {why}")
        self._admissions.cancel(transfer, why)
        lease = self._leases.get(transfer)
        if lease is not None:
            self._fail(lease.outgoing, Released.CANCELLED, error)
        else:
            self._parking.refuse(transfer, error)
            self._history.end(transfer, f"{Released.CANCELLED}: {why}")

    async def drain(self, timeout_s: float) -> tuple[bytes, ...]:
        """Admit and start nothing new, finish what runs, then fail what is left; the ids that were failed."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
        self._parking.refuse_all("this server is draining; ask another one")
        for lease in self._leases:
            if lease.delivery is None:
                self._release(lease.outgoing, Released.DRAINED, "the server drains and nobody had pulled it")
        self._note_empty()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            log.warning("draining: %d transfers did not finish within %g s", len(self._leases), timeout_s)
        left = [lease.outgoing for lease in self._leases]
        for outgoing in left:
            self._fail(outgoing, Released.DRAINED, TransferError(f"{outgoing!r}: the server stopped before its end"))
        self._admissions.end("the server stops")
        return tuple(outgoing.transfer for outgoing in left)

    def close(self) -> None:
        """Stop now: listener, connections, leases and parked pulls are gone when this returns."""
        self._draining = self._closed = True
        if self._listener is not None:
            self._listener.close()
        for lease in self._leases:
            error = TransferError(f"{lease.outgoing!r}: the server was closed")
            self._fail(lease.outgoing, Released.DRAINED, error)
        self._parking.refuse_all("the server was closed")
        self._admissions.end("the server was closed")
        for connection in list(self._connections):
            connection.close(TransferError("the server was closed"))
        self._pump.close()
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()

    def _accept(self) -> Connection:
        return Connection(self.hello, self, opens=False, handshake_s=self._handshake_s)

    # What connections tell (see connection.Owner).

    def connected(self, connection: Connection) -> None:
        """Keep account of it; one whose TLS was set up too late is closed, and one of too many that are silent."""
        self._connections.add(connection)
        if self._closed:
            connection.close(TransferError("the server was closed"))
        elif len(self._connections) > 2 * self._max_connections:
            connection.end(TransferRejected(f"at most {self._max_connections} connections; try later"))

    def greeted(self, connection: Connection) -> None:
        """Refuse a peer there is no room for."""
        if len(self._connections) > self._max_connections:
            connection.end(TransferRejected(f"at most {self._max_connections} connections; try later"), tell=True)

    def place(self, connection: Connection, header: Header) -> Landing | None:
        """A server takes no data."""
        raise ProtocolError(f"{connection!r} sent data (segment {header.segment}) to a server")

    def writable(self, connection: Connection) -> None:
        """Go on sending."""
        self._pump.run()

    def lost(self, connection: Connection, error: LynxError) -> None:
        """Everything of this peer ends."""
        self._connections.discard(connection)
        self._parking.lost(connection)
        self._admissions.lost(connection)
        for lease in self._leases.of(connection):
            self._release(lease.outgoing, Released.PEER_LOST, str(error))

    def received(self, connection: Connection, frame: Frame) -> None:
        """Do what a peer asks."""
        event, transfer = frame.event, frame.header.transfer
        if isinstance(event, Admit | Pull) and event.transfer != transfer:
            raise ProtocolError(f"{connection!r}: the {type(event).__name__.lower()}'s id is not its frame's")
        if transfer == NO_TRANSFER:
            raise ProtocolError(f"{connection!r} sent a {type(event).__name__} for no transfer")
        match event:
            case Admit():
                self._admissions.ask(self.on_admit, connection, event, self.epoch)
            case Pull():
                self._pull(connection, event)
            case Acknowledge():
                self._leave(connection, transfer, Released.ACKNOWLEDGED, "")
            case Reject(reason):
                self._leave(connection, transfer, Released.REJECTED, reason)
            case Cancel(reason):
                self._leave(connection, transfer, Released.CANCELLED, reason)
            case Keep():
                self._keep(transfer)
            case Resend(segment):
                self._resend(connection, transfer, segment)
            case _:
                raise ProtocolError(f"{connection!r} sent a {type(event).__name__} to a server")

    # What producers tell (see outgoing.Listener).

    def put(self, outgoing: Outgoing, segment: int) -> None:
        """Send a segment if it is wanted."""
        delivery = self._leases.delivery(outgoing.transfer)
        if delivery is not None:
            self._touch(outgoing)
            if delivery.ready(segment):
                self._pump.add(delivery)

    def token(self, outgoing: Outgoing) -> None:
        """Send token 1 ahead of everything."""
        delivery = self._leases.delivery(outgoing.transfer)
        if delivery is not None and outgoing.first is not None:
            self._touch(outgoing)
            self._send(delivery, outgoing.first)

    def renewed(self, outgoing: Outgoing) -> None:
        """The lease starts anew, and whoever pulls and has nothing to receive hears that work goes on."""
        self._touch(outgoing)
        delivery = self._leases.delivery(outgoing.transfer)
        if delivery is not None and not any(delivery.has(tier) for tier in delivery.tiers):
            self._send(delivery, Working())

    def _touch(self, outgoing: Outgoing) -> None:
        self._leases.touch(outgoing.transfer, self._loop.time())

    def broken(self, outgoing: Outgoing, error: LynxError) -> None:
        """Tell the peer that there will be no more."""
        self._fail(outgoing, Released.FAILED, error)

    def _refuse_new(self, transfer: bytes) -> None:
        """Raise why ``transfer`` can be neither admitted nor announced."""
        if self._draining:
            raise TransferRejected("this server is draining; ask another one")
        if transfer in self._leases:
            raise TransferRejected(f"transfer {transfer.hex()[:12]} exists already; draw a new id for every transfer")
        self._history.refuse(transfer)

    def _not_admitted(self, transfer: bytes, error: LynxError, cancelled: bool) -> None:
        """Whoever pulls it now or later hears why; what was announced nevertheless and nobody pulls ends."""
        if not self._parking.refuse(transfer, error):
            self._history.fail(transfer, error)
        if cancelled:
            self.withdraw(transfer, str(error))

    def _pull(self, connection: Connection, pull: Pull) -> None:
        transfer = pull.transfer
        name = f"transfer {transfer.hex()[:12]}"
        try:
            if self._draining:
                raise TransferRejected("this server is draining; ask another one")
            if pull.epoch and pull.epoch != self.epoch:
                raise StaleGeneration(
                    f"{name} belongs to epoch {pull.epoch}; this server restarted as {self.epoch}: admit again"
                )
            if self.is_pulled(transfer) or transfer in self._parking:
                raise TransferRejected(f"{name} is being pulled already; one pull a transfer")
            self._history.tell(transfer)
            lease = self._leases.get(transfer)
            if lease is not None:
                self._deliver(lease, pull, connection)
            else:
                self._parking.park(pull, connection)
        except LynxError as e:
            connection.send(failed(e), transfer)

    def _deliver(self, lease: Lease, pull: Pull, connection: Connection) -> None:
        outgoing = lease.outgoing
        start, stop = outgoing.manifest.clip(pull.start, pull.stop)
        generation = make_generation(self.epoch, pull.attempt)
        manifest = msgspec.structs.replace(
            outgoing.manifest,
            generation=generation,
            start=start,
            stop=stop,
            ready=len(outgoing.segments) == len(outgoing.manifest.segments),
        )
        delivery = lease.delivery = Delivery(outgoing, pull, connection, generation)
        self._touch(outgoing)
        self._send(delivery, manifest)
        if outgoing.first is not None:
            self._send(delivery, outgoing.first)
        if outgoing.released is not None:
            return
        for segment in outgoing.segments:
            delivery.ready(segment)
        self._pump.add(delivery)
        for tier in delivery.tiers:
            if delivery.ended(tier):
                self._pump.charge(delivery.end(tier))

    def _send(self, delivery: Delivery, event: AnyEvent) -> None:
        try:
            self._pump.charge(delivery.connection.send(event, delivery.outgoing.transfer, delivery.generation))
        except LynxError as e:
            self._fail(delivery.outgoing, Released.FAILED, e)

    def _sent(self, delivery: Delivery, tier: Tier, count: int) -> None:
        self.totals.sent[tier] += count
        self._touch(delivery.outgoing)

    def _broke(self, delivery: Delivery, error: LynxError) -> None:
        self._fail(delivery.outgoing, Released.FAILED, error)

    def _leave(self, connection: Connection, transfer: bytes, reason: Released, detail: str) -> None:
        delivery = self._leases.delivery(transfer)
        if delivery is not None:
            if delivery.connection is connection:
                self._release(delivery.outgoing, reason, detail)
            return
        if reason is Released.ACKNOWLEDGED:
            return
        if self._parking.is_others(transfer, connection):  # as with one that is pulled: only who pulls can end it
            return
        self._parking.take(transfer)
        self._admissions.cancel(transfer, "its peer cancelled it", connection)
        lease = self._leases.get(transfer)
        if lease is not None:
            self._release(lease.outgoing, reason, detail)
        else:
            self._history.end(transfer, f"{reason}: {detail}")

    def _keep(self, transfer: bytes) -> None:
        if not self.is_pulled(transfer):  # a pull has to make progress of its own
            self._leases.touch(transfer, self._loop.time())

    def _resend(self, connection: Connection, transfer: bytes, segment: int) -> None:
        delivery = self._leases.delivery(transfer)
        if delivery is None or delivery.connection is not connection:
            return
        if not delivery.resend(segment):
            raise ProtocolError(f"{connection!r} asked for segment {segment} again, which it may not")
        self.totals.resends += 1
        log.warning("%r: segment %d arrived corrupt at %r; sending it again", delivery.outgoing, segment, connection)
        self._pump.add(delivery)

    def _fail(self, outgoing: Outgoing, reason: Released, error: LynxError) -> None:
        delivery = self._leases.delivery(outgoing.transfer)
        if delivery is not None:
            delivery.connection.send(failed(error), outgoing.transfer, delivery.generation)
        elif not self._parking.refuse(outgoing.transfer, error) and reason in (Released.FAILED, Released.CANCELLED):
            self._history.fail(outgoing.transfer, error)
        self._release(outgoing, reason, str(error))

    def _release(self, outgoing: Outgoing, reason: Released, detail: str) -> None:
        lease = self._leases.pop(outgoing.transfer)
        if lease is None:
            return
        if lease.delivery is not None:
            self._pump.drop(lease.delivery)
        self._history.end(outgoing.transfer, reason.value)
        self.totals.released[reason] += 1
        log.info("%r: lease ended, %s %s", outgoing, reason.value, detail)
        outgoing.release(reason, detail)
        self._note_empty()

    def _note_empty(self) -> None:
        if self._draining and not self._leases:
            self._empty.set()

    def _sweep(self) -> None:
        for lease in self._leases.expired(self._loop.time()):
            error = DeadlineExceeded(
                f"{lease.outgoing!r}: the lease of {self._leases.lease_s:g} s ended waiting for {lease.waits_for}"
            )
            self._fail(lease.outgoing, Released.EXPIRED, error)
            if lease.delivery is not None and not lease.delivery.connection.writable:
                lease.delivery.connection.end(error)
        self._sweep_handle = self._loop.call_later(min(1.0, self._leases.lease_s / 8), self._sweep)

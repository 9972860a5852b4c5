"""The producer's side: announced transfers are served to whoever pulls them, under leases."""

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from lynxkv.codec.spec import Tier
from lynxkv.errors import (
    Cancelled,
    DeadlineExceeded,
    LynxError,
    Overloaded,
    ProtocolError,
    StaleGeneration,
    TransferError,
    TransferRejected,
)
from lynxkv.transport.admissions import Admissions
from lynxkv.transport.connection import SHUTDOWN_S, Connection
from lynxkv.transport.delivery import Delivery
from lynxkv.transport.history import History
from lynxkv.transport.outgoing import Outgoing, Released
from lynxkv.transport.pump import Pump
from lynxkv.wire.events import (
    Acknowledge,
    Admit,
    Admitted,
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
OnAdmit = Callable[[Admit, Hello], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server holds right now; all zero when nothing is going on."""

    leases: int
    deliveries: int
    parked: int
    admitting: int
    queued_bytes: int
    flows: int
    connections: int


class Totals:
    """What a server has done since it was made; numbers only grow.

    Attributes
    ----------
    sent : Counter of Tier
        Bytes of data frames, headers included.
    released : Counter of Released
        Leases that ended.
    resends : int
        Segments sent again.
    """

    def __init__(self) -> None:
        self.sent: Counter[Tier] = Counter()
        self.released: Counter[Released] = Counter()
        self.resends = 0


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
        Bounds on what peers can make the server hold; more is refused with :class:`TransferRejected`.

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
        self._tls = tls
        self._lease_s, self._handshake_s = lease_s, handshake_s
        self._max_connections, self._max_parked, self._max_admitting = max_connections, max_parked, max_admitting
        self.totals = Totals()
        self._pump = Pump(rate, self._sent, self._broke)
        self._connections: set[Connection] = set()
        self._transfers: dict[bytes, Outgoing] = {}
        self._progress: dict[bytes, float] = {}
        self._deliveries: dict[bytes, Delivery] = {}
        self._history = History()
        self._admissions = Admissions(self._history)
        self._asking: set[asyncio.Task[None]] = set()
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
        return Counters(
            len(self._transfers),
            len(self._deliveries),
            len(self._admissions.parked),
            len(self._admissions),
            sum(d.queued for d in self._deliveries.values()),
            len(self._pump),
            len(self._connections),
        )

    def check_integrity(self) -> None:
        """Raise :class:`TransferError` if what is held contradicts itself (a leak)."""
        if (
            len(self._pump) != sum(self._pump.flows(d) for d in self._deliveries.values())
            or set(self._progress) != set(self._transfers)
            or not set(self._deliveries) <= set(self._transfers)
            or set(self._admissions.parked) & set(self._transfers)
            or any(d.connection not in self._connections for d in self._deliveries.values())
            or any(p.connection not in self._connections for p in self._admissions.parked.values())
            or any(o.released is not None for o in self._transfers.values())
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
        return transfer in self._deliveries

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
        if self._draining:
            raise TransferRejected(f"{outgoing!r}: this server is draining; ask another one")
        self._refuse_known(transfer)
        self._history.begin(transfer)
        self._transfers[transfer] = outgoing
        self._progress[transfer] = self._loop.time()
        outgoing.bind(self._loop, self)
        parked = self._admissions.take(transfer)
        if parked is not None:
            self._deliver(outgoing, parked.pull, parked.connection)

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
        return await self._admission(transfer, work, None)

    def withdraw(self, transfer: bytes, why: str) -> bool:
        """End a transfer that nobody pulls; whether it is over."""
        if transfer in self._deliveries:
            return False
        self.cancel(transfer, why)
        return True

    def cancel(self, transfer: bytes, why: str) -> None:
        """End a transfer whatever its state: admitted, announced, pulled, or not known yet. Its peer is told."""
        error = TransferRejected(f"transfer {transfer.hex()[:12]} was cancelled by the prefill node: {why}")
        self._admissions.cancel(transfer, why)
        outgoing = self._transfers.get(transfer)
        if outgoing is not None:
            self._fail(outgoing, Released.CANCELLED, error)
        else:
            self._admissions.unpark(transfer, error)
            self._history.end(transfer, f"{Released.CANCELLED}: {why}")

    async def drain(self, timeout_s: float) -> tuple[bytes, ...]:
        """Admit and start nothing new, finish what runs, then fail what is left; the ids that were failed."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
        self._admissions.refuse_parked(TransferRejected("this server is draining; ask another one"))
        for outgoing in [o for t, o in self._transfers.items() if t not in self._deliveries]:
            self._release(outgoing, Released.DRAINED, "the server drains and nobody had pulled it")
        self._note_empty()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            log.warning("draining: %d transfers did not finish within %g s", len(self._transfers), timeout_s)
        left = tuple(self._transfers)
        for outgoing in list(self._transfers.values()):
            self._fail(outgoing, Released.DRAINED, TransferError(f"{outgoing!r}: the server stopped before its end"))
        self._admissions.end("the server stops")
        return left

    def close(self) -> None:
        """Stop now: listener, connections, leases and parked pulls are gone when this returns."""
        self._draining = self._closed = True
        if self._listener is not None:
            self._listener.close()
        for outgoing in list(self._transfers.values()):
            self._fail(outgoing, Released.DRAINED, TransferError(f"{outgoing!r}: the server was closed"))
        self._admissions.refuse_parked(TransferRejected("the server was closed"))
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
        """Keep account of it; one whose TLS was set up too late is closed."""
        self._connections.add(connection)
        if self._closed:
            connection.close(TransferError("the server was closed"))

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
        self._admissions.lost(connection)
        for delivery in [d for d in self._deliveries.values() if d.connection is connection]:
            self._release(delivery.outgoing, Released.PEER_LOST, str(error))

    def received(self, connection: Connection, frame: Frame) -> None:
        """Do what a peer asks."""
        event, transfer = frame.event, frame.header.transfer
        if isinstance(event, Admit | Pull) and event.transfer != transfer:
            raise ProtocolError(f"{connection!r}: the {type(event).__name__.lower()}'s id is not its frame's")
        if transfer == NO_TRANSFER:
            raise ProtocolError(f"{connection!r} sent a {type(event).__name__} for no transfer")
        match event:
            case Admit():
                self._admit(connection, event)
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
        delivery = self._deliveries.get(outgoing.transfer)
        if delivery is not None:
            self._touch(outgoing)
            if delivery.ready(segment):
                self._pump.add(delivery)

    def token(self, outgoing: Outgoing) -> None:
        """Send token 1 ahead of everything."""
        delivery = self._deliveries.get(outgoing.transfer)
        if delivery is not None and outgoing.first is not None:
            self._touch(outgoing)
            self._send(delivery, outgoing.first)

    def renewed(self, outgoing: Outgoing) -> None:
        """The lease starts anew, and whoever pulls and has nothing to receive hears that work goes on."""
        self._touch(outgoing)
        delivery = self._deliveries.get(outgoing.transfer)
        if delivery is not None and not any(delivery.has(tier) for tier in delivery.tiers):
            self._send(delivery, Working())

    def _touch(self, outgoing: Outgoing) -> None:
        if outgoing.transfer in self._progress:
            self._progress[outgoing.transfer] = self._loop.time()

    def broken(self, outgoing: Outgoing, error: LynxError) -> None:
        """Tell the peer that there will be no more."""
        self._fail(outgoing, Released.FAILED, error)

    def _refuse_known(self, transfer: bytes) -> None:
        if transfer in self._transfers:
            raise TransferRejected(f"transfer {transfer.hex()[:12]} exists already; draw a new id for every transfer")
        self._history.refuse(transfer)

    def _refuse_admission(self, transfer: bytes) -> None:
        if self._draining:
            raise TransferRejected("this server is draining; ask another one")
        self._admissions.refuse(transfer)
        self._refuse_known(transfer)

    async def _admission(
        self, transfer: bytes, work: Callable[[], Coroutine[Any, Any, T]], connection: Connection | None
    ) -> T:
        self._refuse_admission(transfer)  # once more: a peer's cancel may have come since its admit
        try:
            return await self._admissions.run(transfer, work, connection)
        except (asyncio.CancelledError, Cancelled):
            self.withdraw(transfer, "its admission was cancelled")
            raise

    def _admit(self, connection: Connection, admit: Admit) -> None:
        try:
            if self.on_admit is None:
                raise TransferRejected("this server admits no requests; it serves only what it announces")
            self._refuse_admission(admit.transfer)
            if len(self._asking) >= self._max_admitting:
                raise Overloaded(f"no room: {self._max_admitting} admissions wait already; retry later")
        except LynxError as e:
            connection.send(failed(e), admit.transfer)
            return
        task = self._loop.create_task(self._ask(self.on_admit, connection, admit))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, on_admit: OnAdmit, connection: Connection, admit: Admit) -> None:
        peer, transfer = connection.peer or self.hello, admit.transfer
        if connection.over:
            return
        try:
            await self._admission(transfer, lambda: on_admit(admit, peer), connection)
        except Cancelled as e:
            connection.send(failed(TransferRejected(str(e))), transfer)
        except LynxError as e:
            connection.send(failed(e), transfer)
        except Exception as e:
            log.exception("admitting transfer %s failed", transfer.hex()[:12])
            error = TransferError(f"the server could not admit it: {e!r}")
            connection.send(failed(error), transfer)
            self._admissions.unpark(transfer, error)
        else:
            connection.send(Admitted(transfer, self.epoch), transfer)

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
            if transfer in self._deliveries or transfer in self._admissions.parked:
                raise TransferRejected(f"{name} is being pulled already; one pull a transfer")
            self._history.tell(transfer)
            outgoing = self._transfers.get(transfer)
            if outgoing is not None:
                self._deliver(outgoing, pull, connection)
                return
            if len(self._admissions.parked) >= self._max_parked:
                raise Overloaded(f"no room: {self._max_parked} pulls wait already; retry later")
        except LynxError as e:
            connection.send(failed(e), transfer)
            return
        self._admissions.park(pull, connection)

    def _deliver(self, outgoing: Outgoing, pull: Pull, connection: Connection) -> None:
        start, stop = outgoing.manifest.clip(pull.start, pull.stop)
        generation = make_generation(self.epoch, pull.attempt)
        manifest = msgspec.structs.replace(
            outgoing.manifest,
            generation=generation,
            start=start,
            stop=stop,
            ready=len(outgoing.segments) == len(outgoing.manifest.segments),
        )
        delivery = Delivery(outgoing, pull, connection, generation)
        self._deliveries[outgoing.transfer] = delivery
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
        delivery = self._deliveries.get(transfer)
        if delivery is not None:
            if delivery.connection is connection:
                self._release(delivery.outgoing, reason, detail)
            return
        if reason is Released.ACKNOWLEDGED:
            return
        self._admissions.leave(connection, transfer)
        outgoing = self._transfers.get(transfer)
        if outgoing is not None:
            self._release(outgoing, reason, detail)
        else:
            self._history.end(transfer, f"{reason}: {detail}")

    def _keep(self, transfer: bytes) -> None:
        outgoing = self._transfers.get(transfer)
        if outgoing is not None and transfer not in self._deliveries:  # a pull has to make progress of its own
            self._touch(outgoing)

    def _resend(self, connection: Connection, transfer: bytes, segment: int) -> None:
        delivery = self._deliveries.get(transfer)
        if delivery is None or delivery.connection is not connection:
            return
        if not delivery.resend(segment):
            raise ProtocolError(f"{connection!r} asked for segment {segment} again, which it may not")
        self.totals.resends += 1
        log.warning("%r: segment %d arrived corrupt at %r; sending it again", delivery.outgoing, segment, connection)
        self._pump.add(delivery)

    def _fail(self, outgoing: Outgoing, reason: Released, error: LynxError) -> None:
        delivery = self._deliveries.get(outgoing.transfer)
        if delivery is not None:
            delivery.connection.send(failed(error), outgoing.transfer, delivery.generation)
        elif not self._admissions.unpark(outgoing.transfer, error) and reason in (Released.FAILED, Released.CANCELLED):
            self._history.fail(outgoing.transfer, error)
        self._release(outgoing, reason, str(error))

    def _release(self, outgoing: Outgoing, reason: Released, detail: str) -> None:
        transfer = outgoing.transfer
        if self._transfers.pop(transfer, None) is None:
            return
        del self._progress[transfer]
        delivery = self._deliveries.pop(transfer, None)
        if delivery is not None:
            self._pump.drop(delivery)
        self._history.end(transfer, reason.value)
        self.totals.released[reason] += 1
        log.info("%r: lease ended, %s %s", outgoing, reason.value, detail)
        outgoing.release(reason, detail)
        self._note_empty()

    def _note_empty(self) -> None:
        if self._draining and not self._transfers:
            self._empty.set()

    def _sweep(self) -> None:
        now = self._loop.time()
        for outgoing in [o for t, o in self._transfers.items() if now - self._progress[t] > self._lease_s]:
            delivery = self._deliveries.get(outgoing.transfer)
            waited = "its producer" if delivery is None or not delivery.queued else "its receiver"
            if delivery is not None and all(delivery.ended(t) for t in delivery.tiers):
                waited = "an acknowledge"
            elif delivery is None:
                waited = "a pull"
            error = DeadlineExceeded(f"{outgoing!r}: the lease of {self._lease_s:g} s ended waiting for {waited}")
            self._fail(outgoing, Released.EXPIRED, error)
            if delivery is not None and not delivery.connection.writable:
                delivery.connection.end(error)
        self._sweep_handle = self._loop.call_later(min(1.0, self._lease_s / 8), self._sweep)

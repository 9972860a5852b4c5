"""The producer's side: announced transfers are served to whoever pulls them, under leases."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from lynxkv.errors import (
    DeadlineExceeded,
    LynxError,
    ProtocolError,
    StaleGeneration,
    TransferError,
    TransferRejected,
)
from lynxkv.transport.connection import Connection
from lynxkv.transport.delivery import Delivery
from lynxkv.transport.outgoing import Outgoing, Released
from lynxkv.transport.pump import Pump
from lynxkv.wire.events import (
    Acknowledge,
    Admit,
    Admitted,
    AnyEvent,
    Cancel,
    Hello,
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

OnAdmit = Callable[[Admit, Hello], Awaitable[None]]

REMEMBERED = 4096
"""Ids of ended transfers, to refuse their reuse by name."""


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


@dataclass(slots=True)
class _Parked:
    pull: Pull
    connection: Connection
    timer: asyncio.TimerHandle


class Server:
    """Serves outgoing transfers over TCP; everything happens on the loop that calls :meth:`start`.

    Parameters
    ----------
    hello : Hello
        What this node says of itself; ``epoch`` 0 is replaced by a new one.
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
    on_admit : callable, optional
        ``await on_admit(admit, peer)``; returns to admit, raises LynxError to refuse.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        rate: float | None = None,
        lease_s: float = 30.0,
        handshake_s: float = 5.0,
        max_connections: int = 256,
        max_parked: int = 1024,
        max_admitting: int = 64,
    ) -> None:
        self.hello = hello if hello.epoch else msgspec.structs.replace(hello, epoch=new_epoch())
        self.on_admit: OnAdmit | None = None
        self._lease_s, self._handshake_s = lease_s, handshake_s
        self._max_connections, self._max_parked, self._max_admitting = max_connections, max_parked, max_admitting
        self._pump = Pump(rate, lambda d: self._touch(d.outgoing), self._broke)
        self._connections: set[Connection] = set()
        self._transfers: dict[bytes, Outgoing] = {}
        self._progress: dict[bytes, float] = {}
        self._deliveries: dict[bytes, Delivery] = {}
        self._parked: dict[bytes, _Parked] = {}
        self._admitting: dict[bytes, tuple[Connection, asyncio.Task[None]]] = {}
        self._finished: OrderedDict[bytes, str] = OrderedDict()
        self._untold: OrderedDict[bytes, LynxError] = OrderedDict()
        self._listener: asyncio.Server | None = None
        self._sweep_handle: asyncio.TimerHandle | None = None
        self._draining = False
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
            len(self._parked),
            len(self._admitting),
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
            or set(self._parked) & set(self._transfers)
            or any(d.connection not in self._connections for d in self._deliveries.values())
            or any(p.connection not in self._connections for p in self._parked.values())
            or any(o.released is not None for o in self._transfers.values())
        ):
            raise TransferError(f"the server's books do not agree: {self.counters()}")

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the address that was bound (port 0: any free one). :class:`TransferError` if it is taken."""
        self._loop = asyncio.get_running_loop()
        self._pump.start()
        try:
            self._listener = await self._loop.create_server(self._accept, host, port)
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
        self._transfers[transfer] = outgoing
        self._progress[transfer] = self._loop.time()
        outgoing.bind(self._loop, self)
        parked = self._parked.pop(transfer, None)
        if parked is not None:
            parked.timer.cancel()
            self._deliver(outgoing, parked.pull, parked.connection)

    async def drain(self, timeout_s: float) -> tuple[bytes, ...]:
        """Admit and start nothing new, finish what runs, then fail what is left; the ids that were failed."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
        for transfer in list(self._parked):
            self._unpark(transfer, TransferRejected("this server is draining; ask another one"))
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
        for _, task in self._admitting.values():
            task.cancel()
        return left

    def close(self) -> None:
        """Stop now: listener, connections, leases and parked pulls are gone when this returns."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
        for outgoing in list(self._transfers.values()):
            self._fail(outgoing, Released.DRAINED, TransferError(f"{outgoing!r}: the server was closed"))
        for transfer in list(self._parked):
            self._unpark(transfer, TransferRejected("the server was closed"))
        for _, task in self._admitting.values():
            task.cancel()
        for connection in list(self._connections):
            connection.close(TransferError("the server was closed"))
        self._pump.close()
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()

    def _accept(self) -> Connection:
        connection = Connection(self.hello, self, opens=False, handshake_s=self._handshake_s)
        self._connections.add(connection)
        return connection

    # What connections tell (see connection.Owner).

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
        for transfer in [t for t, p in self._parked.items() if p.connection is connection]:
            self._parked.pop(transfer).timer.cancel()
        for delivery in [d for d in self._deliveries.values() if d.connection is connection]:
            self._release(delivery.outgoing, Released.PEER_LOST, str(error))
        for asked, task in self._admitting.values():
            if asked is connection:
                task.cancel()

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
        name = f"transfer {transfer.hex()[:12]}"
        if transfer in self._transfers:
            raise TransferRejected(f"{name} exists already; draw a new id for every transfer")
        if transfer in self._finished:
            raise TransferRejected(f"{name} has ended ({self._finished[transfer]}); draw a new id")

    def _admit(self, connection: Connection, admit: Admit) -> None:
        transfer = admit.transfer
        try:
            if self.on_admit is None:
                raise TransferRejected("this server admits no requests; it serves only what it announces")
            if self._draining:
                raise TransferRejected("this server is draining; ask another one")
            if transfer in self._admitting:
                raise TransferRejected(f"transfer {transfer.hex()[:12]} is being admitted already; draw a new id")
            self._refuse_known(transfer)
            if len(self._admitting) >= self._max_admitting:
                raise TransferRejected(f"no room: {self._max_admitting} admissions wait already; try later")
        except LynxError as e:
            connection.send(failed(e), transfer)
            return
        task = self._loop.create_task(self._ask(self.on_admit, connection, admit))
        self._admitting[transfer] = connection, task
        task.add_done_callback(lambda _: self._admitting.pop(transfer, None))

    async def _ask(self, on_admit: OnAdmit, connection: Connection, admit: Admit) -> None:
        peer = connection.peer or self.hello
        try:
            await on_admit(admit, peer)
        except LynxError as e:
            self._refuse(connection, admit, e)
        except asyncio.CancelledError:
            self._refuse(connection, admit, TransferRejected("the server stops"))
            raise
        except Exception as e:
            log.exception("admitting transfer %s failed", admit.transfer.hex()[:12])
            self._refuse(connection, admit, TransferError(f"the server could not admit it: {e!r}"))
        else:
            connection.send(Admitted(admit.transfer, self.epoch), admit.transfer)

    def _refuse(self, connection: Connection, admit: Admit, error: LynxError) -> None:
        """Tell whoever admitted, and whoever waits for the transfer already: it will not be announced."""
        connection.send(failed(error), admit.transfer)
        self._unpark(admit.transfer, error)

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
            if transfer in self._deliveries or transfer in self._parked:
                raise TransferRejected(f"{name} is being pulled already; one pull a transfer")
            if transfer in self._untold:  # its producer gave up between its admission and this pull
                raise self._untold.pop(transfer)
            if transfer in self._finished:
                self._refuse_known(transfer)
            outgoing = self._transfers.get(transfer)
            if outgoing is not None:
                self._deliver(outgoing, pull, connection)
                return
            if len(self._parked) >= self._max_parked:
                raise TransferRejected(f"no room: {self._max_parked} pulls wait already; try later")
        except LynxError as e:
            connection.send(failed(e), transfer)
            return
        error = DeadlineExceeded(f"{name} was not announced within {pull.deadline_s:g} s")
        timer = self._loop.call_later(pull.deadline_s, self._unpark, transfer, error)
        self._parked[transfer] = _Parked(pull, connection, timer)

    def _unpark(self, transfer: bytes, error: LynxError) -> None:
        parked = self._parked.pop(transfer, None)
        if parked is not None:
            parked.timer.cancel()
            parked.connection.send(failed(error), transfer)

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
        parked = self._parked.get(transfer)
        if parked is not None and parked.connection is connection:
            self._parked.pop(transfer).timer.cancel()
        outgoing = self._transfers.get(transfer)
        if outgoing is not None:
            self._release(outgoing, reason, detail)
        else:
            self._remember(transfer, f"{reason}: {detail}")

    def _resend(self, connection: Connection, transfer: bytes, segment: int) -> None:
        delivery = self._deliveries.get(transfer)
        if delivery is None or delivery.connection is not connection:
            return
        if not delivery.resend(segment):
            raise ProtocolError(f"{connection!r} asked for segment {segment} again, which it may not")
        log.warning("%r: segment %d arrived corrupt at %r; sending it again", delivery.outgoing, segment, connection)
        self._pump.add(delivery)

    def _fail(self, outgoing: Outgoing, reason: Released, error: LynxError) -> None:
        delivery = self._deliveries.get(outgoing.transfer)
        if delivery is not None:
            delivery.connection.send(failed(error), outgoing.transfer, delivery.generation)
        elif reason is Released.FAILED and outgoing.transfer not in self._parked:
            self._untold[outgoing.transfer] = error
            if len(self._untold) > REMEMBERED:
                self._untold.popitem(last=False)
        self._unpark(outgoing.transfer, error)
        self._release(outgoing, reason, str(error))

    def _release(self, outgoing: Outgoing, reason: Released, detail: str) -> None:
        transfer = outgoing.transfer
        if self._transfers.pop(transfer, None) is None:
            return
        del self._progress[transfer]
        delivery = self._deliveries.pop(transfer, None)
        if delivery is not None:
            self._pump.drop(delivery)
        self._remember(transfer, reason.value)
        log.info("%r: lease ended, %s %s", outgoing, reason.value, detail)
        outgoing.release(reason, detail)
        self._note_empty()

    def _remember(self, transfer: bytes, why: str) -> None:
        self._finished[transfer] = why[:200]
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)

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

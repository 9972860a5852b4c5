"""The prefill node's conductor: admit, prefill, encode as it goes, hold the entry, serve it."""

import asyncio
import logging
from dataclasses import dataclass

from lynxkv.codec import Tier, plan
from lynxkv.engine.base import Engine
from lynxkv.errors import Cancelled, LynxError, Overloaded, RequestError, TransferRejected
from lynxkv.node.admission import sampling_from_wire, tokens_from_bytes
from lynxkv.node.entries import Entry, EntryStore, Listener, entry_key
from lynxkv.node.holdings import PrefillHoldings, PrefillTotals
from lynxkv.node.prefilling import Prefilling
from lynxkv.node.spans import CHUNK
from lynxkv.speculation import Draw, Logits, Sampler, SamplingParams
from lynxkv.transport import OPEN, Outgoing, Released, Security, Server
from lynxkv.wire import Admit, FirstToken, Hello, Manifest, token_digest

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Held:
    """An announced transfer: what it reads, and what becomes of its token 1."""

    outgoing: Outgoing
    entry: Entry
    drawn: "asyncio.Future[Draw | LynxError]"

    def settle(self, what: Draw | LynxError) -> None:
        """On the loop; only the first call counts."""
        if not self.drawn.done():
            self.drawn.set_result(what)


class PrefillNode:
    """Serves the KV of prompts.

    Parameters
    ----------
    engine : Engine
    chunk : int
        Tokens of a prefill chunk and of a segment, a multiple of 64.
    memory_bytes, ttl_s : int, float
        Bound of all entries together, and how long one lives after its last use.
    rate : float or None
        Bytes a second of the link, all connections together.
    lease_s : float
        A transfer without progress ends after so long.
    room_s : float
        How long an admission may wait for memory.
    max_running : int
        Prompts in work at a time, a chunk each in turn.
    max_queue : int
        Prompts that may wait for that or for memory; one more is refused.
    security : Security or None
        Who may ask; None: everyone.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        chunk: int = CHUNK,
        memory_bytes: int = 4 << 30,
        ttl_s: float = 600.0,
        rate: float | None = None,
        lease_s: float = 30.0,
        room_s: float = 30.0,
        max_queue: int = 64,
        max_running: int = 4,
        name: str = "",
        security: Security | None = None,
    ) -> None:
        for option, seconds in (("ttl_s", ttl_s), ("lease_s", lease_s)):
            if not seconds > 0:
                raise RequestError(f"{option} must be above 0 seconds, got {seconds}")
        if max_running < 1 or max_queue < 0:
            raise RequestError(f"max_running of 1 and max_queue of 0 at least, got {max_running} and {max_queue}")
        self.engine = engine
        self.store = EntryStore(memory_bytes, ttl_s)
        known = security or OPEN
        self.server = Server(
            Hello(role="prefill", name=name, fingerprint=engine.fingerprint, secret=known.secret),
            tls=known.server_context(),
            rate=rate,
            lease_s=lease_s,
        )
        self.server.on_admit = self._admit
        self._chunk = chunk
        self._room_s = room_s
        self._most = max_running + max_queue
        self._prefilling = Prefilling(engine, self.store, chunk=chunk, max_running=max_running)
        self._reserving = 0
        self._held: dict[bytes, _Held] = {}
        self._waiting: set[bytes] = set()
        self._tend_s = min(5.0, lease_s / 4, ttl_s / 4)
        self._tending: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the address bound (port 0: any free one)."""
        self._loop = asyncio.get_running_loop()
        await asyncio.wrap_future(self._prefilling.warm())
        self._tend()
        return await self.server.start(host, port)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Finish running transfers within ``drain_s`` seconds, then end everything."""
        if drain_s > 0:
            await self.server.drain(drain_s)
        if self._tending is not None:
            self._tending.cancel()
        self.server.close()
        await self._loop.run_in_executor(None, self._prefilling.close)

    async def admit(self, admit: Admit) -> Draw:
        """Prefill and announce ``admit.transfer``, as the admit of a peer does; token 1 once it is drawn.

        Cancelling this also cancels the transfer, unless somebody pulls it already.

        Raises
        ------
        PromptTooLong, RequestError, TransferRejected
            The prompt, the options, or the id cannot be used.
        CapacityExceeded, Overloaded
            There is never, or not now, room for it.
        Cancelled
            :meth:`cancel` was called.
        TransferError
            The transfer ended before token 1 was drawn.
        LynxError
            Whatever the prefill failed with.
        """
        held = await self.server.admit(admit.transfer, lambda: self._begin(admit))
        try:
            return await self._draw(admit.transfer, held)
        except asyncio.CancelledError:
            self.server.withdraw(admit.transfer, "the request was cancelled")
            raise

    def cancel(self, transfer: bytes, reason: str) -> None:
        """End a transfer in any state; whoever admits or pulls it is told, and the id is not used again."""
        held = self._held.get(transfer)
        if held is not None:
            held.settle(Cancelled(f"transfer {transfer.hex()[:12]} was cancelled: {reason}"))
        self.server.cancel(transfer, reason)

    def holdings(self) -> PrefillHoldings:
        """What is held right now."""
        counters, store = self.server.counters(), self.store.check_integrity()
        jobs, running = len(self._prefilling), self._prefilling.running
        return PrefillHoldings(
            running=running,
            queued=max(0, jobs - running) + self._reserving,
            entries=store.entries,
            entry_bytes=self.store.encoded_bytes,
            memory_bytes=store.bytes,
            readers=store.readers,
            leases=counters.leases,
            deliveries=counters.deliveries,
            parked=counters.parked,
            admitting=counters.admitting,
            queued_bytes=counters.queued_bytes,
            connections=counters.connections,
        )

    def totals(self) -> PrefillTotals:
        """What was done so far."""
        totals = self.server.totals
        return PrefillTotals(
            sent_bytes={tier.name.lower(): totals.sent[tier] for tier in Tier},
            released={reason.value: totals.released[reason] for reason in Released},
            resends=totals.resends,
        )

    def _tend(self) -> None:
        """Free what nobody reads and whose time is over; keep the leases of those who wait for a prefill.

        An admission whose peer went away is neither pulled nor waited for: its lease ends.
        """
        self.store.expire()
        for transfer, held in list(self._held.items()):
            waited_for = transfer in self._waiting or self.server.is_pulled(transfer)
            if waited_for and not held.entry.complete:
                held.outgoing.renew()
        self._tending = self._loop.call_later(self._tend_s, self._tend)

    async def _admit(self, admit: Admit, _: Hello) -> None:
        held = await self._begin(admit)
        if admit.options.get("wait"):
            await self._draw(admit.transfer, held)

    async def _draw(self, transfer: bytes, held: _Held) -> Draw:
        self._waiting.add(transfer)
        try:
            drawn = await held.drawn
        finally:
            self._waiting.discard(transfer)
        if isinstance(drawn, LynxError):
            raise drawn
        return drawn

    async def _begin(self, admit: Admit) -> _Held:
        """Announce the transfer; its entry is there already, or will be filled."""
        tokens = tokens_from_bytes(admit.tokens)
        self.engine.check_prompt(tokens)
        params = sampling_from_wire(admit.sampling)
        if admit.spec.overrides and admit.spec.overrides[-1].layer >= self.engine.fingerprint.layers:
            raise TransferRejected(f"the codec spec names layer {admit.spec.overrides[-1].layer}, which does not exist")
        entry, new = await self._entry(admit)
        if new:  # whatever becomes of this admission, another may read the entry by now
            self._prefilling.submit(entry, tokens)
        try:
            held = self._announce(admit, entry)
        except Exception:
            self._prefilling.release(entry)
            raise
        entry.listen(self._listener(held, tokens, params))
        return held

    async def _entry(self, admit: Admit) -> tuple[Entry, bool]:
        """The entry with one more reader, and whether it is a new one, to be filled."""
        key = entry_key(self.engine.fingerprint, token_digest(admit.tokens), admit.spec)
        held = self.store.get(key)
        if held is not None:
            return held, False
        if len(self._prefilling) + self._reserving >= self._most:
            raise Overloaded(f"at most {self._most} prompts are prefilled or wait, and as many are: retry later")
        shape = self.engine.shape(len(admit.tokens) // 4)
        entry = Entry(key, admit.tokens, shape, admit.spec, plan(shape, admit.spec, segment_tokens=self._chunk))
        self._reserving += 1
        try:
            return await self.store.add(entry, self._room_s)
        finally:
            self._reserving -= 1

    def _announce(self, admit: Admit, entry: Entry) -> _Held:
        transfer = admit.transfer
        manifest = Manifest(
            transfer=transfer,
            fingerprint=self.engine.fingerprint,
            tokens=len(admit.tokens) // 4,
            digest=token_digest(admit.tokens),
            shape=entry.shape,
            spec=entry.spec,
            segments=entry.segments,
            first_token=True,
        )

        def released(reason: Released, detail: str) -> None:
            log.debug("transfer %s released: %s %s", transfer.hex()[:12], reason, detail)
            self._held.pop(transfer, None)
            held.settle(TransferRejected(f"transfer {transfer.hex()[:12]} ended before token 1: {reason} {detail}"))
            self._prefilling.release(entry)

        outgoing = Outgoing(manifest, on_released=released)
        held = _Held(outgoing, entry, self._loop.create_future())
        self.server.announce(outgoing)
        if outgoing.released is None:  # a pull that waited for it may have ended it already
            self._held[transfer] = held
        return held

    def _listener(self, held: _Held, tokens: list[int], params: SamplingParams) -> Listener:
        loop, outgoing = self._loop, held.outgoing

        def finished(logits: Logits) -> None:
            try:
                draw = Sampler(params, tokens, self.engine.eos).draw(logits, [])
            except LynxError as error:
                failed(error)
                return
            outgoing.first_token(
                FirstToken(token=draw.token, logprob=draw.logprob, top_logprobs=list(draw.top), seed=params.seed or 0)
            )
            loop.call_soon_threadsafe(held.settle, draw)

        def failed(error: LynxError) -> None:
            loop.call_soon_threadsafe(held.settle, error)  # before the lease ends, which settles it by less
            outgoing.fail(error)

        return Listener(lambda i, encoded: outgoing.put(i, encoded.data.data, digest=encoded.digest), finished, failed)

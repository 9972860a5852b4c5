"""The prefill node's conductor: admit, prefill, encode as it goes, hold the entry, serve it."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lynxkv.codec import CodecSpec, plan
from lynxkv.engine.base import Engine
from lynxkv.errors import CapacityExceeded, EngineError, LynxError, RequestError, TransferRejected
from lynxkv.node.admission import sampling_from_wire, tokens_from_bytes
from lynxkv.node.entries import Entry, EntryStore, Listener, entry_key
from lynxkv.node.spans import CHUNK, Buffer, decode_span, encode_prefill, encode_session, warm
from lynxkv.speculation import Logits, Sampler, SamplingParams
from lynxkv.transport import Outgoing, Released, Server
from lynxkv.wire import Admit, FirstToken, Hello, Manifest, token_digest

log = logging.getLogger(__name__)

RAW = CodecSpec(raw=True)


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
    max_queue : int
        Prefills that may wait; one more is refused.
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
        name: str = "",
    ) -> None:
        for option, seconds in (("ttl_s", ttl_s), ("lease_s", lease_s)):
            if not seconds > 0:
                raise RequestError(f"{option} must be above 0 seconds, got {seconds}")
        self.engine = engine
        self.store = EntryStore(memory_bytes, ttl_s)
        self.server = Server(
            Hello(role="prefill", name=name, fingerprint=engine.fingerprint), rate=rate, lease_s=lease_s
        )
        self.server.on_admit = self._admit
        self._chunk = chunk
        self._room_s = room_s
        self._max_queue = max_queue
        self._jobs: dict[bytes, Entry] = {}
        self._held: dict[bytes, tuple[Outgoing, Entry]] = {}
        self._waiting: set[bytes] = set()
        self._tend_s = min(5.0, lease_s / 4, ttl_s / 4)
        self._tending: asyncio.TimerHandle | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prefill")

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the address bound (port 0: any free one)."""
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(self._worker, warm, self.engine, CodecSpec())
        self._tend()
        return await self.server.start(host, port)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Finish running transfers within ``drain_s`` seconds, then end everything."""
        if drain_s > 0:
            await self.server.drain(drain_s)
        if self._tending is not None:
            self._tending.cancel()
        self.server.close()
        await self._loop.run_in_executor(None, lambda: self._worker.shutdown(cancel_futures=True))

    def _tend(self) -> None:
        """Free what nobody reads and whose time is over; keep the leases of those who wait for a prefill.

        An admission whose peer went away is neither pulled nor waited for: its lease ends.
        """
        self.store.expire()
        for transfer, (outgoing, entry) in list(self._held.items()):
            waited_for = transfer in self._waiting or self.server.is_pulled(transfer)
            if waited_for and not entry.complete:
                outgoing.renew()
        self._tending = self._loop.call_later(self._tend_s, self._tend)

    async def _admit(self, admit: Admit, _: Hello) -> None:
        tokens = tokens_from_bytes(admit.tokens)
        self.engine.check_prompt(tokens)
        params = sampling_from_wire(admit.sampling)
        if admit.spec.overrides and admit.spec.overrides[-1].layer >= self.engine.fingerprint.layers:
            raise TransferRejected(f"the codec spec names layer {admit.spec.overrides[-1].layer}, which does not exist")
        entry, new = await self._entry(admit)
        if new:  # whatever becomes of this admission, another may read the entry by now
            self._jobs[entry.key] = entry
            self._worker.submit(self._fill, entry, tokens)
        try:
            outgoing = self._announce(admit, entry)
        except Exception:
            self.store.release(entry)
            raise
        settled = asyncio.Event()
        entry.listen(self._listener(outgoing, tokens, params, settled))
        if admit.options.get("wait"):
            self._waiting.add(admit.transfer)
            try:
                await settled.wait()
            finally:
                self._waiting.discard(admit.transfer)
            if entry.error is not None:
                raise entry.error

    async def _entry(self, admit: Admit) -> tuple[Entry, bool]:
        """The entry with one more reader, and whether it is a new one, to be filled."""
        key = entry_key(self.engine.fingerprint, token_digest(admit.tokens), admit.spec)
        held = self.store.get(key)
        if held is not None:
            return held, False
        if len(self._jobs) >= self._max_queue:
            raise CapacityExceeded(f"at most {self._max_queue} prefills may wait and as many do: retry later")
        shape = self.engine.shape(len(admit.tokens) // 4)
        entry = Entry(key, admit.tokens, shape, admit.spec, plan(shape, admit.spec, segment_tokens=self._chunk))
        return await self.store.add(entry, self._room_s)

    def _announce(self, admit: Admit, entry: Entry) -> Outgoing:
        manifest = Manifest(
            transfer=admit.transfer,
            fingerprint=self.engine.fingerprint,
            tokens=len(admit.tokens) // 4,
            digest=token_digest(admit.tokens),
            shape=entry.shape,
            spec=entry.spec,
            segments=entry.segments,
            first_token=True,
        )

        def released(reason: Released, detail: str) -> None:
            log.debug("transfer %s released: %s %s", admit.transfer.hex()[:12], reason, detail)
            self._held.pop(admit.transfer, None)
            self.store.release(entry)

        outgoing = Outgoing(manifest, on_released=released)
        self.server.announce(outgoing)
        self._held[admit.transfer] = outgoing, entry
        return outgoing

    def _listener(
        self, outgoing: Outgoing, tokens: list[int], params: SamplingParams, settled: asyncio.Event
    ) -> Listener:
        loop = self._loop

        def finished(logits: Logits) -> None:
            try:
                draw = Sampler(params, tokens, self.engine.eos).draw(logits, [])
            except LynxError as error:
                outgoing.fail(error)
            else:
                outgoing.first_token(
                    FirstToken(
                        token=draw.token, logprob=draw.logprob, top_logprobs=list(draw.top), seed=params.seed or 0
                    )
                )
            loop.call_soon_threadsafe(settled.set)

        def failed(error: LynxError) -> None:
            outgoing.fail(error)
            loop.call_soon_threadsafe(settled.set)

        return Listener(lambda i, held: outgoing.put(i, held.data.data, digest=held.digest), finished, failed)

    # What follows runs on the one prefill thread.

    def _fill(self, entry: Entry, tokens: list[int]) -> None:
        raw: Entry | None = None
        try:
            self._check_wanted(entry)
            raw = self._raw_twin(entry)
            logits = self._encode_prefill(entry, tokens) if raw is None else self._encode_held(entry, raw)
            entry.finish(logits)
        except LynxError as error:
            entry.fail(error)
        except Exception as error:  # the thread's edge: whatever it was, everyone who waits is told
            log.exception("prefill of %d tokens failed", len(tokens))
            entry.fail(EngineError(f"the prefill node could not run this prompt: {type(error).__name__}: {error}"))
        finally:
            if raw is not None:
                self.store.release(raw)
            if self._jobs.get(entry.key) is entry:
                del self._jobs[entry.key]

    def _raw_twin(self, entry: Entry) -> Entry | None:
        """A complete raw entry of the same tokens: another spec can be encoded from it without a prefill."""
        if entry.spec == RAW:
            return None
        raw = self.store.get(entry_key(self.engine.fingerprint, token_digest(entry.tokens), RAW))
        if raw is not None and not raw.complete:
            self.store.release(raw)
            return None
        return raw

    def _encode_prefill(self, entry: Entry, tokens: list[int]) -> Logits:
        put = partial(self._put, entry)
        return encode_prefill(self.engine, tokens, self._chunk, entry.shape, entry.spec, entry.segments, put)

    def _encode_held(self, entry: Entry, raw: Entry) -> Logits:
        session = self.engine.open(raw.shape.stop, self._chunk)
        session.place(raw.shape)
        for i, segment in enumerate(raw.segments):
            decode_span(session, raw.shape, raw.spec, segment.span, raw.buffer(i), None)
        for index, data in encode_session(session, entry.shape, entry.spec, entry.segments):
            self._put(entry, index, data)
        if raw.logits is None:
            raise AssertionError("a raw entry is complete or not used")
        return raw.logits

    def _put(self, entry: Entry, index: int, data: Buffer) -> None:
        self._check_wanted(entry)
        self.store.grow(entry, entry.beyond_reserved(index, data))
        entry.put(index, data)

    def _check_wanted(self, entry: Entry) -> None:
        """Stop work nobody waits for."""
        if self.store.abandon(entry):
            raise TransferRejected("nobody waits for this prompt any more")

"""The router: OpenAI's API towards clients, one prefill and one decode worker for every request."""

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp

from lynxkv.errors import Overloaded
from lynxkv.serving.activity import Tracked
from lynxkv.serving.ask import Ask
from lynxkv.serving.dispatch import Attempt
from lynxkv.serving.errors import Refusal
from lynxkv.serving.exchange import Reply
from lynxkv.serving.relay import ELSEWHERE, WorkerFailed
from lynxkv.serving.rendering import model_entry
from lynxkv.serving.schema import Kind
from lynxkv.serving.service import Service
from lynxkv.serving.upstream import ROLES, Fleet, Worker
from lynxkv.serving.vllm_workers import VllmAsk, VllmAttempt, model_of, raw_fields, read_for_vllm

_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


class RouterService(Service):
    """Spreads requests over workers by their outstanding tokens.

    A request whose prefill or decode worker fails before the client was told anything is tried once more with
    another one; a failure is never passed for an answer. Workers are lynxkv's own or vLLM's, and a request's two are
    of one kind.

    Parameters
    ----------
    prefill, decode : sequence of str
        URLs of workers.
    sequential : bool
        The prefill worker first, then the decode worker, as vLLM's routers do and as vLLM's workers always need it;
        both at once otherwise.
    max_outstanding : int
        Tokens of all requests in flight together, about; more is refused.
    upstream_token : str or None
        Bearer token for workers.
    tls : ssl.SSLContext or None
        For workers at https URLs.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        sequential: bool = False,
        max_outstanding: int = 1 << 20,
        upstream_token: str | None = None,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        super().__init__("router", options.pop("name", "") or "router", **options)
        self.fleet = Fleet(prefill, decode)
        self._sequential = sequential
        self._max_outstanding = max_outstanding
        self._outstanding = 0
        self._headers = {} if upstream_token is None else {"authorization": f"Bearer {upstream_token}"}
        self._tls = tls
        self._giving_up: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Look for the workers."""
        self._client = self._session()
        self.asking = self._session()
        await self.fleet.start(self.asking)

    def _session(self) -> aiohttp.ClientSession:
        """Connections of their own: those of requests end when idle, which a steady poll in the same pool prevents."""
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls if self._tls is not None else True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers, auto_decompress=False)

    async def close(self) -> None:
        """Close every connection."""
        await self.fleet.close()
        await asyncio.gather(*self._giving_up)
        for session in (self._client, self.asking):
            await session.close()

    def health(self) -> dict[str, Any]:
        """Ready when there is a pair of workers."""
        return {
            "status": "ok" if self.fleet.ready() else "no_workers",
            "missing": self.fleet.missing(),
            "outstanding_tokens": self._outstanding,
            "workers": [worker.plain() for worker in self.fleet.workers],
        }

    def models(self) -> list[dict[str, Any]]:
        """Those of the decode workers that are up."""
        contexts = {model: context for worker in self.fleet.of("decode") for model, context in worker.models.items()}
        return [model_entry(model, 0, context) for model, context in contexts.items()]

    async def take(self, kind: Kind, body: bytes, reply: Reply, tracked: Tracked) -> None:
        """Read a request as the workers of its model need it: what vLLM's understand, only they know."""
        fields = raw_fields(body)
        model = model_of(fields)
        if self.fleet.kind(model) is None:
            await self.fleet.check(self.asking)
        match self.fleet.kind(model):
            case "vllm":
                ask = read_for_vllm(kind, fields)
                self.check_model(model)
                tracked.choices = ask.n
                await self._bounded(ask, reply, tracked)
            case "lynxkv":
                await super().take(kind, body, reply, tracked)
            case None:
                self.fleet.pair(None, model, set())

    async def answer(self, ask: Ask, reply: Reply, tracked: Tracked) -> None:
        """Answer from two workers, or tell which failure ended it."""
        if ask.transfer is not None:
            raise Refusal("kv_transfer_params are between routers and workers: leave them out", "kv_transfer_params")
        await self._bounded(ask, reply, tracked)

    async def _bounded(self, ask: Ask | VllmAsk, reply: Reply, tracked: Tracked) -> None:
        tokens = ask.estimated_tokens + ask.most_tokens
        if self._outstanding and self._outstanding + tokens > self._max_outstanding:
            raise Overloaded(f"about {self._outstanding} of {self._max_outstanding} tokens are in flight: retry later")
        tracked.prompt_tokens = ask.estimated_tokens
        self._outstanding += tokens
        try:
            await self._answer(ask, reply, tracked, tokens)
        finally:
            self._outstanding -= tokens

    async def _answer(self, ask: Ask | VllmAsk, reply: Reply, tracked: Tracked, tokens: int) -> None:
        without: set[Worker] = set()
        while True:
            prefill, decode = await self._pair(ask, without)
            tracked.workers = {"prefill": prefill.url, "decode": decode.url}
            attempt = self._attempt(ask, tracked, prefill, decode)
            tracked.transfer = attempt.transfer
            tracked.happened("dispatched", state="prefill")
            try:
                with ExitStack() as counted:
                    counted.enter_context(prefill.busy(ask.estimated_tokens))
                    counted.enter_context(decode.busy(tokens))
                    regular = await self._run(attempt, reply)
            except WorkerFailed as failure:
                worker = failure.worker
                over = reply.status is not None or tracked.elapsed() >= ask.deadline_s
                if over or failure.error.status not in ELSEWHERE or worker.role in tracked.retried:
                    raise failure.error from failure
                if self._others(worker):
                    without.add(worker)
                elif not await self._began_anew(worker, attempt):
                    raise failure.error from failure
                tracked.retried.append(worker.role)
                tracked.happened("retried")
                continue
            if regular:
                tracked.finish = "answered"
            else:  # a worker has told its failure, which was passed on
                tracked.error, tracked.status = "worker_error", reply.status
                self.activity.end(tracked, "failed")
            return

    def _attempt(self, ask: Ask | VllmAsk, tracked: Tracked, prefill: Worker, decode: Worker) -> Attempt | VllmAttempt:
        path = _PATHS[ask.kind]
        if isinstance(ask, VllmAsk):
            return VllmAttempt(self._client, ask, path, tracked.onward, prefill, decode)
        left_s = ask.deadline_s - tracked.elapsed() if tracked.retried else None
        return Attempt(
            self._client, ask, path, tracked.onward, prefill, decode, sequential=self._sequential, deadline_s=left_s
        )

    async def _run(self, attempt: Attempt | VllmAttempt, reply: Reply) -> bool:
        """Whether the answer came to its regular end; of an attempt that does not, nothing is kept anywhere."""
        try:
            return await attempt.run(reply)
        except BaseException:
            told = asyncio.create_task(attempt.give_up(self.asking))
            self._giving_up.add(told)
            told.add_done_callback(self._giving_up.discard)
            raise

    async def _pair(self, ask: Ask | VllmAsk, without: set[Worker]) -> tuple[Worker, Worker]:
        """Workers for the request; those that seem down are asked again before it is refused."""
        if not all(set(self.fleet.of(role)) - without for role in ROLES):
            await self.fleet.check(self.asking)
        return self.fleet.pair("vllm" if isinstance(ask, VllmAsk) else "lynxkv", ask.model, without)

    async def _began_anew(self, worker: Worker, attempt: Attempt | VllmAttempt) -> bool:
        """Whether the only prefill worker has restarted since it was chosen: only what it had is gone."""
        if worker.role != "prefill" or isinstance(attempt, VllmAttempt):
            return False
        await worker.check(self.asking)
        return worker.up and worker.about["kv"]["epoch"] != attempt.epoch

    def _others(self, worker: Worker) -> bool:
        return any(other is not worker and other.kind == worker.kind for other in self.fleet.of(worker.role))

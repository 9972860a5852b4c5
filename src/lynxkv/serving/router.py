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
from lynxkv.serving.dispatch import Attempt, WorkerFailed
from lynxkv.serving.errors import Refusal
from lynxkv.serving.exchange import Reply
from lynxkv.serving.rendering import model_entry
from lynxkv.serving.service import Service
from lynxkv.serving.upstream import Fleet, Worker

_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_ELSEWHERE = frozenset({429, 500, 502, 503, 504})
"""Statuses of one worker that another one may not have."""


class RouterService(Service):
    """Spreads requests over workers by their outstanding tokens.

    A request whose prefill or decode worker fails before the client was told anything is tried once more with
    another one; a failure is never passed for an answer.

    Parameters
    ----------
    prefill, decode : sequence of str
        URLs of workers.
    sequential : bool
        The prefill worker first, then the decode worker, as vLLM's routers do; both at once otherwise.
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
        """Ready when there is a worker of either kind."""
        ready = all(self.fleet.of(role) for role in ("prefill", "decode"))
        return {
            "status": "ok" if ready else "no_workers",
            "outstanding_tokens": self._outstanding,
            "workers": [worker.plain() for worker in self.fleet.workers],
        }

    def models(self) -> list[dict[str, Any]]:
        """Those of the decode workers that are up."""
        found = {
            str(worker.about["model"]): model_entry(worker.about["model"], 0, worker.about.get("context"))
            for worker in self.fleet.of("decode")
        }
        return list(found.values())

    async def answer(self, ask: Ask, reply: Reply, tracked: Tracked) -> None:
        """Answer from two workers, or tell which failure ended it."""
        if ask.transfer is not None:
            raise Refusal("kv_transfer_params are between routers and workers: leave them out", "kv_transfer_params")
        tokens = ask.estimated_tokens + ask.n * ask.params.max_tokens
        if self._outstanding and self._outstanding + tokens > self._max_outstanding:
            raise Overloaded(f"about {self._outstanding} of {self._max_outstanding} tokens are in flight: retry later")
        tracked.prompt_tokens = ask.estimated_tokens
        self._outstanding += tokens
        try:
            await self._answer(ask, reply, tracked, tokens)
        finally:
            self._outstanding -= tokens

    async def _answer(self, ask: Ask, reply: Reply, tracked: Tracked, tokens: int) -> None:
        without: set[Worker] = set()
        while True:
            prefill, decode = await self._pair(ask, without)
            tracked.workers = {"prefill": prefill.url, "decode": decode.url}
            left_s = ask.lynx.deadline_s - tracked.elapsed() if tracked.retried else None
            attempt = Attempt(self._client, ask, _PATHS[ask.kind], tracked.onward, prefill, decode, left_s)
            tracked.transfer = attempt.transfer
            tracked.happened("dispatched", state="prefill")
            try:
                with ExitStack() as counted:
                    counted.enter_context(prefill.busy(ask.estimated_tokens))
                    counted.enter_context(decode.busy(tokens))
                    regular = await self._run(attempt, reply)
            except WorkerFailed as failure:
                worker = failure.worker
                over = reply.status is not None or tracked.elapsed() >= ask.lynx.deadline_s
                if over or failure.error.status not in _ELSEWHERE or worker.role in tracked.retried:
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
            else:  # the decode worker has told its failure in the stream, which was passed on
                tracked.error, tracked.status = "worker_error", reply.status
                self.activity.end(tracked, "failed")
            return

    async def _run(self, attempt: Attempt, reply: Reply) -> bool:
        """Whether the answer came to its regular end; of an attempt that does not, nothing is kept anywhere."""
        try:
            return await (attempt.in_turn(reply) if self._sequential else attempt.at_once(reply))
        except BaseException:
            told = asyncio.create_task(attempt.give_up(self.asking))
            self._giving_up.add(told)
            told.add_done_callback(self._giving_up.discard)
            raise

    async def _pair(self, ask: Ask, without: set[Worker]) -> tuple[Worker, Worker]:
        """Workers for the request; those that seem down are asked again before it is refused."""
        if not all(set(self.fleet.of(role)) - without for role in ("prefill", "decode")):
            await self.fleet.check(self.asking)
        return self.fleet.pair(ask.model, without)

    async def _began_anew(self, worker: Worker, attempt: Attempt) -> bool:
        """Whether the only prefill worker has restarted since it was chosen: only what it had is gone."""
        if worker.role != "prefill":
            return False
        await worker.check(self.asking)
        return worker.up and worker.about["kv"]["epoch"] != attempt.epoch

    def _others(self, worker: Worker) -> bool:
        return any(other is not worker for other in self.fleet.of(worker.role))

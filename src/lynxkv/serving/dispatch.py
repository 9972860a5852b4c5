"""One attempt at a request on workers of lynxkv's own: both at once or one after the other."""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from lynxkv.serving.ask import Ask
from lynxkv.serving.errors import HttpError, told_by
from lynxkv.serving.exchange import Reply
from lynxkv.serving.relay import WorkerFailed, lower, pass_on, post, unless_dead, unreachable
from lynxkv.serving.transfer import ToDecode
from lynxkv.serving.upstream import Worker

log = logging.getLogger(__name__)

_LOST = frozenset({502, 504})
"""What a decode worker answers when the KV did not come: the prefill worker's failure."""

_CONSEQUENCES = frozenset({"cancelled", "transfer_rejected"})
"""What a prefill worker answers when the decode worker gave the transfer up: the decode worker's answer says why."""

_REASON_S = 2.0
"""How long that answer is waited for."""

_GIVE_UP_S = 5.0
"""How long a prefill worker is told that a transfer is over; its lease ends it otherwise."""


class Attempt:
    """Runs a request on two workers under a transfer id and a seed drawn for it.

    Parameters
    ----------
    client : aiohttp.ClientSession
    ask : Ask
    path : str
        Of the endpoint.
    headers : mapping
        What both requests carry.
    prefill, decode : Worker
    sequential : bool
        One after the other.
    deadline_s : float, optional
        What is left of the request's own, where an attempt went before.
    """

    def __init__(
        self, client: aiohttp.ClientSession, ask: Ask, path: str, headers: Mapping[str, str],
        prefill: Worker, decode: Worker, *, sequential: bool = False, deadline_s: float | None = None,
    ) -> None:  # fmt: skip
        self._client, self._ask, self._path = client, ask, path
        self._headers = headers
        self._prefill, self._decode = prefill, decode
        self._sequential, self._deadline_s = sequential, deadline_s
        self._kv = prefill.about["kv"]
        self.epoch: int = self._kv["epoch"]
        self.transfer = secrets.token_bytes(16).hex()
        self._seed = secrets.randbits(62) if ask.params.seed is None else ask.params.seed

    async def run(self, reply: Reply) -> bool:
        """Answer; whether the answer came to its regular end.

        Raises
        ------
        WorkerFailed
            One of them failed; ``reply`` says whether the client has been told anything.
        """
        return await (self._in_turn(reply) if self._sequential else self._at_once(reply))

    async def _at_once(self, reply: Reply) -> bool:
        """Both workers begin now, and the KV travels while it is made."""
        prefilling = asyncio.create_task(unless_dead(self._prefill, self._ask_prefill()))
        decoding = asyncio.create_task(unless_dead(self._decode, self._ask_decode(self._whereabouts(), reply)))
        try:
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            failure = prefilling.exception() if prefilling.done() else None
            if failure is not None and reply.status is None:
                if isinstance(failure, WorkerFailed) and failure.error.code in _CONSEQUENCES:
                    await asyncio.wait((decoding,), timeout=_REASON_S)
                    if decoding.done():
                        return await decoding
                raise failure
            return await decoding
        finally:
            for task in (prefilling, decoding):
                task.cancel()
            await asyncio.gather(prefilling, decoding, return_exceptions=True)

    async def _in_turn(self, reply: Reply) -> bool:
        """In vLLM's order: the decode worker is asked with what the prefill worker answered."""
        told = await unless_dead(self._prefill, self._ask_prefill())
        where = told.get("kv_transfer_params")
        if not isinstance(where, dict):
            raise WorkerFailed(self._prefill, HttpError(502, "protocol_error", "no kv_transfer_params were answered"))
        return await unless_dead(self._decode, self._ask_decode(where, reply))

    async def give_up(self, client: aiohttp.ClientSession) -> None:
        """Tell the prefill worker that nobody wants the transfer, whoever of the three knows what of it."""
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                async with client.delete(f"{self._prefill.url}/lynx/transfers/{self.transfer}", headers=self._headers):
                    pass
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("transfer %s ends with its lease: %s", self.transfer[:12], error)

    async def _ask_prefill(self) -> dict[str, Any]:
        """The prefill worker's answer: token 1, and where the KV is."""
        left_out = ("stream", "stream_options", "max_completion_tokens", "n")
        body = {name: value for name, value in self._ask.plain.items() if name not in left_out}
        body["max_tokens"] = 1
        if self._ask.params.min_tokens > 1:
            body["min_tokens"] = 1
        body["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": self.transfer,
            "seed": self._seed,
        }
        try:
            async with self._post(self._prefill, body) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self._prefill, error) from error
        if response.status != 200:
            raise WorkerFailed(self._prefill, told_by(response.status, content, lower(response.headers)))
        told = msgspec.json.decode(content)
        return told if isinstance(told, dict) else {}

    async def _ask_decode(self, where: Mapping[str, Any] | ToDecode, reply: Reply) -> bool:
        body = {**self._ask.plain, "kv_transfer_params": where}
        if self._deadline_s is not None:
            body["lynx"] = {**(self._ask.plain.get("lynx") or {}), "deadline_s": max(0.001, self._deadline_s)}
        try:
            async with self._post(self._decode, body) as response:
                if response.status != 200:
                    error = told_by(response.status, await response.read(), lower(response.headers))
                    raise WorkerFailed(self._prefill if response.status in _LOST else self._decode, error)
                if self._ask.stream:
                    return await pass_on(response, self._decode, reply)
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self._decode, error) from error
        await reply.json(content)
        return True

    def _post(self, worker: Worker, body: Mapping[str, Any]) -> Any:
        return post(self._client, worker, self._path, body, self._headers)

    def _whereabouts(self) -> ToDecode:
        """Where the KV will be: what the prefill worker would answer in the end."""
        kv = self._kv
        return ToDecode(
            transfer_id=self.transfer,
            remote_engine_id=kv["engine_id"],
            remote_host=kv["host"],
            remote_port=kv["port"],
            remote_epoch=kv["epoch"],
            seed=self._seed,
        )

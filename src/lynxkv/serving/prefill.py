"""The prefill worker: prompts come by HTTP from a router, their KV goes to whoever pulls it."""

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from lynxkv.node.admission import sampling_to_wire, tokens_to_bytes
from lynxkv.node.prefill import PrefillNode
from lynxkv.serving.activity import Tracked
from lynxkv.serving.ask import Ask
from lynxkv.serving.errors import Refusal
from lynxkv.serving.exchange import Reply, encode
from lynxkv.serving.rendering import Choice, Rendering, usage
from lynxkv.serving.transfer import ToDecode, read_id, read_to_prefill
from lynxkv.serving.worker import WorkerService, check_seed, spec_of
from lynxkv.speculation import SamplingParams, Verified
from lynxkv.wire import Admit


class PrefillService(WorkerService):
    """Prefills under the transfer id that the router drew, and answers with token 1.

    Parameters
    ----------
    node : PrefillNode
    model : str
        Its name towards clients.
    host, port : str, int
        Where the KV is served; port 0: any free one.
    advertise : str, optional
        The host that decode workers are told, where it is not ``host``.
    """

    def __init__(
        self, node: PrefillNode, *, model: str, host: str, port: int, advertise: str | None = None, **options: Any
    ) -> None:
        super().__init__("prefill", node.engine, model=model, **options)
        self.node = node
        self._listen = host, port
        self._advertise = advertise
        self.kv: tuple[str, int] = host, port

    async def start(self) -> None:
        """Serve KV."""
        host, port = await self.node.start(*self._listen)
        self.kv = self._advertise or host, port

    async def close(self) -> None:
        """End every transfer."""
        self.tokenizer.close()
        await self.node.stop()

    async def drain(self, seconds: float) -> None:
        """Requests first, then the transfers that decode workers still pull."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        await super().drain(seconds)
        await self.node.stop(max(0.0, until - loop.time()))

    @property
    def engine_id(self) -> str:
        """Of this life of this process."""
        return f"{self.name}-{self.node.server.epoch:x}"

    def health(self) -> dict[str, Any]:
        """Where the KV is, and what is held."""
        host, port = self.kv
        return {
            **self.about,
            "kv": {"host": host, "port": port, "epoch": self.node.server.epoch, "engine_id": self.engine_id},
            "holdings": asdict(self.node.holdings()),
        }

    def routes(self) -> Iterable[APIRouter]:
        """``DELETE /lynx/transfers/ID``: a router's word that nobody will pull it."""
        router = APIRouter(include_in_schema=False)

        @router.delete("/lynx/transfers/{transfer_id}")
        async def give_up(transfer_id: str) -> Response:
            self.node.cancel(read_id(transfer_id), "the request is over")
            return Response(status_code=204)

        return (router,)

    async def answer(self, ask: Ask, reply: Reply, tracked: Tracked) -> None:
        """Prefill; one token, and where its KV is."""
        wanted = read_to_prefill(ask.transfer)
        if ask.stream:
            raise Refusal("a prefill worker does not stream: send stream: false", "stream")
        if wanted.seed is not None:
            check_seed(ask, wanted.seed)
        transfer = bytes.fromhex(wanted.transfer_id) if wanted.transfer_id else secrets.token_bytes(16)
        params = _for_token_1(ask.params, wanted.seed)
        tokens = await self.tokenizer.of(ask)
        tracked.transfer, tracked.prompt_tokens = transfer.hex(), len(tokens)
        tracked.happened("prefill", state="prefill")
        draw = await self.node.admit(
            Admit(
                transfer=transfer,
                tokens=tokens_to_bytes(tokens),
                spec=spec_of(ask.lynx.target),
                sampling=sampling_to_wire(params),
            )
        )
        tracked.happened("first_token")
        choice = Choice(0)
        ended = draw.token in self.node.engine.eos and not params.ignore_eos
        text = "" if ended else self.tokenizer.spell(draw.token)
        choice.add(Verified(0, draw, text, "stop" if ended else "length"))
        tracked.finish = choice.finish
        where = ToDecode(
            transfer_id=transfer.hex(),
            remote_engine_id=self.engine_id,
            remote_host=self.kv[0],
            remote_port=self.kv[1],
            remote_epoch=self.node.server.epoch,
            seed=params.seed or 0,
        )
        rendering = Rendering(ask, tracked.id, self.model, self.tokenizer.spell)
        body = rendering.whole([choice], usage(len(tokens), [choice]), kv_transfer_params=where)
        await reply.json(encode(body))


def _for_token_1(params: SamplingParams, seed: int | None) -> SamplingParams:
    return replace(params, seed=params.seed if seed is None else seed).seeded()

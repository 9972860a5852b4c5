"""Servers that answer as vLLM's OpenAI server does with a KV connector."""

import asyncio
import json
from contextlib import contextmanager

from aiohttp import web

MODEL = "served"
WHERE = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e-1", "remote_host": "10.0.0.1",
    "remote_port": 7, "remote_block_ids": [[1, 2]], "nobody_knows": {"deep": [1, None]},
}  # fmt: skip
WHOLE = b'{"id":"cmpl-1",  "choices":[{"text":"\\u00e9"}], "kv_transfer_params":null}'
CHUNK = b'data: {"id":"cmpl-1",  "choices":[{"text":"\\u00e9"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class VllmStub:
    """One server.

    Attributes
    ----------
    asked : list of dict
        Bodies of the requests that came, and in ``raw`` their bytes.
    status, content : int, bytes
        Of every answer that is not a stream; without content a prefill worker's or a decode worker's own.
    params : object
        What a prefill worker answers; the transfer id is added to a dict.
    gate : asyncio.Event or None
        Awaited between the chunks of a stream, or before an answer.
    gone : int
        Requests whose caller went away.
    """

    def __init__(self, role, *, models=(MODEL,), status=200, content=None, params=WHERE, gate=None):
        self.role, self.models, self.status, self.content, self.params = role, models, status, content, params
        self.gate, self.gone = gate, 0
        self.asked, self.raw, self.paths, self.headers = [], [], [], []

    @property
    def transfers(self):
        """What the requests said of the transfer."""
        return [body.get("kv_transfer_params") for body in self.asked]

    @contextmanager
    def serving(self, where):
        """Its URL while it runs on a site's loop."""

        async def start():
            app = web.Application()
            app.router.add_get("/health", self._health)
            app.router.add_get("/version", self._version)
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/chat/completions", self._answer)
            app.router.add_post("/v1/completions", self._answer)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return runner

        runner = where.call(start())
        try:
            yield "http://{}:{}".format(*runner.addresses[0][:2])
        finally:
            where.call(runner.cleanup())

    async def _health(self, _):
        return web.Response(status=200)

    async def _version(self, _):
        return web.json_response({"version": "0.32.0"})

    async def _models(self, _):
        cards = [{"id": model, "object": "model", "max_model_len": 4096} for model in self.models]
        return web.json_response({"object": "list", "data": cards})

    async def _answer(self, request):
        self.raw.append(await request.read())
        self.asked.append(json.loads(self.raw[-1]))
        self.paths.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        try:
            return await self._answered(request, self.asked[-1])
        except asyncio.CancelledError:
            self.gone += 1
            raise

    async def _answered(self, request, body):
        if self.role == "decode" and body.get("stream") and self.status == 200:
            return await self._streamed(request)
        if self.gate is not None:
            await self.gate.wait()
        content = self.content or (self._prefilled(body) if self.role == "prefill" else WHOLE)
        return web.Response(status=self.status, body=content, content_type="application/json")

    def _prefilled(self, body):
        params = self.params
        if isinstance(params, dict):
            params = {**params, "transfer_id": body["kv_transfer_params"]["transfer_id"]}
        return json.dumps({"id": "cmpl-0", "choices": [], "kv_transfer_params": params}).encode()

    async def _streamed(self, request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(CHUNK)
        if self.gate is not None:
            await self.gate.wait()
        await response.write(CHUNK + DONE)
        return response

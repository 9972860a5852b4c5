"""Workers that say what a test wants them to say."""

import asyncio
import json
from contextlib import contextmanager

from aiohttp import web

EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Stub:
    """One worker of ``role``.

    Attributes
    ----------
    asked, headers : list of dict
        Bodies and headers of the requests that came.
    answer : callable
        ``await answer(request, body)`` gives the response.
    given_up : list of str
        Transfers that a router said are over.
    gone : int
        Requests whose caller went away before they were answered.
    status : int
        Of ``/health``.
    """

    def __init__(self, role, answer=None, *, model="stub", fingerprint="f"):
        self.role, self.asked, self.headers, self.gone, self.status = role, [], [], 0, 200
        self.given_up = []
        self.answer = answer or (prefilled if role == "prefill" else answered)
        self.about = {"role": role, "status": "ok", "model": model, "fingerprint": fingerprint, "context": 100}
        if role == "prefill":
            self.about["kv"] = {"host": "10.0.0.1", "port": 7, "epoch": 1, "engine_id": "e"}

    @property
    def transfers(self):
        """Ids of the transfers that it was asked for."""
        return [body["kv_transfer_params"]["transfer_id"] for body in self.asked]

    @contextmanager
    def serving(self, where):
        """Its URL while it runs on a site's loop."""

        async def start():
            app = web.Application()
            app.router.add_get("/health", self._health)
            app.router.add_post("/v1/chat/completions", self._chat)
            app.router.add_delete("/lynx/transfers/{id}", self._give_up)
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
        return told(self.status, self.about)

    async def _give_up(self, request):
        self.given_up.append(request.match_info["id"])
        return web.Response(status=204)

    async def _chat(self, request):
        self.asked.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        try:
            return await self.answer(request, self.asked[-1])
        except asyncio.CancelledError:
            self.gone += 1
            raise


async def prefilled(_, body):
    """A prefill worker's answer."""
    params = body["kv_transfer_params"]
    where = {"do_remote_prefill": True, "transfer_id": params["transfer_id"], "seed": params["seed"], "from": "prefill"}
    return told(200, {"choices": [], "kv_transfer_params": where})


async def answered(request, body):
    """A decode worker's answer."""
    return await streamed(EVENT, EVENT, DONE)(request, body) if body.get("stream") else told(200, {"answer": 1})


async def never(_, __):
    """No answer, ever."""
    await asyncio.Event().wait()


def always(status, body, **headers):
    """An answer that is always the same."""

    async def answer(_, __):
        return told(status, body, **headers)

    return answer


def failing(status, code="made_up", **headers):
    """A failure in OpenAI's shape."""
    error = {"message": f"{code} happened", "type": "server_error", "param": None, "code": code}
    return always(status, {"error": error}, **headers)


def in_turn(*answers):
    """One answer after the other."""
    left = list(answers)

    async def answer(request, body):
        return await left.pop(0)(request, body)

    return answer


def once_asked(*prefills, then=answered):
    """A decode worker that answers when one of ``prefills`` was asked for the transfer, as if its KV came then."""

    async def answer(request, body):
        while not any(body["kv_transfer_params"]["transfer_id"] in prefill.transfers for prefill in prefills):
            await asyncio.sleep(0.002)
        return await then(request, body)

    return answer


def streamed(*parts, cut=False):
    """A stream of ``parts``; with ``cut`` the connection breaks behind the last one."""

    async def answer(request, _):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if cut:
            request.transport.abort()
        return response

    return answer


def told(status, body, **headers):
    """A JSON response."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.Response(status=status, text=json.dumps(body), content_type="application/json", headers=named)

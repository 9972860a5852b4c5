"""What the three kinds of process have in common: their requests, their health, how they begin, drain and end."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from lynxkv import __version__
from lynxkv.errors import LynxError
from lynxkv.serving.access import Access
from lynxkv.serving.activity import Activity, Observer, Tracked
from lynxkv.serving.ask import Ask, read
from lynxkv.serving.errors import Draining, HttpError, tell
from lynxkv.serving.exchange import Exchange, Reply, begin, encode, read_body
from lynxkv.serving.schema import Kind

MAX_BODY = 8 << 20
"""Default bound of a request's body in bytes."""


class Service(ABC):
    """One process.

    Parameters
    ----------
    role : {"prefill", "decode", "router"}
    name : str
        Of this process, as operators see it.
    tokens : iterable of str
        Bearer tokens, one of which a request needs; none: everyone may ask.
    observers : iterable of Observer
        Hear of every request.
    max_body : int
        Bytes of a request's body.
    """

    def __init__(
        self,
        role: str,
        name: str,
        *,
        tokens: Iterable[str] = (),
        observers: Iterable[Observer] = (),
        max_body: int = MAX_BODY,
    ) -> None:
        self.role, self.name = role, name
        self.tokens = tuple(tokens)
        self.activity = Activity(role, observers)
        self.max_body = max_body
        self.draining = False
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()

    async def start(self) -> None:  # noqa: B027  # not every kind has something to begin
        """Begin what runs besides requests."""

    async def close(self) -> None:  # noqa: B027
        """End it; every request has ended before."""

    async def take(self, kind: Kind, body: bytes, reply: Reply, tracked: Tracked) -> None:
        """Read a request's body and answer it."""
        ask = read(kind, body)
        self.check_model(ask.model)
        tracked.choices = ask.n
        await self.answer(ask, reply, tracked)

    @abstractmethod
    async def answer(self, ask: Ask, reply: Reply, tracked: Tracked) -> None:
        """Write the answer; LynxError for a failure, cancelled when nobody wants it any more."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """What ``/health`` says besides the role and the version; ``status`` other than "ok" is a 503."""

    @abstractmethod
    def models(self) -> list[dict[str, Any]]:
        """The models of ``/v1/models``: ``id`` and ``max_model_len``."""

    def routes(self) -> Iterable[APIRouter]:
        """What this kind of process serves besides what all do."""
        return ()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and let those in flight end within ``seconds``; the rest fail by name."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self.emptied()
        except TimeoutError:
            await self.stop()

    async def stop(self) -> None:
        """End every request now; returns when they have ended."""
        self.draining = True
        self._stopping.set()
        await self.emptied()

    async def emptied(self) -> None:
        """Wait until no request is in flight."""
        while self.activity.running:
            self._idle.clear()
            await self._idle.wait()

    async def exchange(self, kind: Kind, request: Request) -> Response:
        """Read, track and answer one request."""
        body: bytes | LynxError
        try:
            body = await read_body(request, self.max_body)
        except LynxError as error:
            body = error
        tracked = begin(self.activity, request, kind)  # nothing is awaited from here to the exchange, which ends it

        async def work(reply: Reply, tracked: Tracked) -> None:
            if isinstance(body, LynxError):
                raise body
            if self.draining:
                raise Draining
            await self.take(kind, body, reply, tracked)

        return _Counted(self, Exchange(work, self.activity, tracked, self._stopping))

    def check_model(self, wanted: str | None) -> None:
        """404 for a model that is not served here; without a name any is meant."""
        served = [model["id"] for model in self.models()]
        if wanted is not None and served and wanted not in served:
            raise HttpError(
                404, "model_not_found", f"model {wanted!r} is not served here: {', '.join(served)}", param="model"
            )

    def ended(self) -> None:
        """A request is over."""
        if not self.activity.running:
            self._idle.set()


def application(service: Service, routers: Iterable[APIRouter] = ()) -> FastAPI:
    """The service's HTTP: OpenAI's endpoints, ``/health``, ``/lynx/requests``, and what ``routers`` add."""
    app = FastAPI(title=f"lynxkv {service.role}", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Access, tokens=service.tokens)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.exchange("chat", request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.exchange("completion", request)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": service.models()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(next((model for model in service.models() if model["id"] == name), None))

    @app.get("/health")
    async def health() -> Response:
        state = {"status": "draining"} if service.draining else {}
        about = {"role": service.role, "name": service.name, "version": __version__}
        told = about | {"requests": service.activity.running} | service.health() | state
        return json_response(told, 200 if told["status"] == "ok" else 503)

    @app.get("/lynx/requests")
    async def requests() -> Response:
        return json_response(service.activity.plain())

    @app.exception_handler(LynxError)
    async def failed(_: Request, error: LynxError) -> Response:
        told = tell(error)
        return JSONResponse(told.body, told.status, told.headers)

    @app.exception_handler(404)
    async def unknown(request: Request, _: Exception) -> Response:
        return await failed(request, HttpError(404, "not_found", f"nothing is served at {request.url.path}"))

    @app.exception_handler(405)
    async def method(request: Request, _: Exception) -> Response:
        told = HttpError(405, "method_not_allowed", f"{request.url.path} does not take {request.method}")
        return await failed(request, told)

    for router in (*service.routes(), *routers):
        app.include_router(router)
    return app


class _Counted(Response):
    """An exchange after which its service looks whether it is idle."""

    def __init__(self, service: Service, exchange: Exchange) -> None:
        super().__init__()
        self._service, self._exchange = service, exchange

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._exchange(scope, receive, send)
        finally:
            self._service.ended()


def json_response(body: Any, status: int = 200) -> Response:
    """A response of JSON."""
    return Response(encode(body), status, media_type="application/json")

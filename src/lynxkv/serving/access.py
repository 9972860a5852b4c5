"""Who may ask: bearer tokens, as pure ASGI middleware; and which addresses may be bound without them."""

import hmac
import ipaddress
import socket
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from lynxkv.errors import RequestError
from lynxkv.serving.errors import HttpError, tell

_GUARDED = ("/v1/", "/lynx/")


class Access:
    """Refuses requests without one of the bearer tokens; without any token everything is open.

    ``/metrics`` is open to the loopback, so that a scraper beside the process needs no token. ``/health`` and the
    page are open: they hold nothing of a request.
    """

    def __init__(self, app: ASGIApp, tokens: Iterable[str]) -> None:
        self._app = app
        self._tokens = [token.encode() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and self._guards(scope) and not self._knows(scope):
            told = tell(HttpError(401, "invalid_api_key", "a known API key is needed: Authorization: Bearer KEY"))
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": told.status, "headers": headers})
            await send({"type": "http.response.body", "body": told.encoded()})
            return
        await self._app(scope, receive, send)

    def _guards(self, scope: Scope) -> bool:
        if not self._tokens:
            return False
        path = scope["path"]
        if path == "/metrics":
            client = scope.get("client")
            return client is None or not is_loopback(client[0])
        return any(path.startswith(prefix) for prefix in _GUARDED)

    def _knows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, token = given.partition(b" ")
        known = [hmac.compare_digest(token.strip(), each) for each in self._tokens]  # all, whichever fits
        return bool(kind.lower() == b"bearer" and any(known))


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address, is this machine's loopback and nothing else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RequestError(f"{host!r} is no address of this machine: {error}") from error
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def refuse_open(host: str, *, guarded: bool, insecure: bool, what: str) -> None:
    """Refuse to listen beyond the loopback without protection.

    Raises
    ------
    RequestError
        ``what`` names the options that would protect it.
    """
    if not guarded and not insecure and not is_loopback(host):
        raise RequestError(f"listening on {host} is open to others: give {what}, or --insecure if that is meant")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; RequestError names the address that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise RequestError(f"cannot listen on {host}:{port}: {reason}; choose another port or address") from error
    listener.setblocking(False)
    return listener

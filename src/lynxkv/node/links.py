"""Connections to prefill nodes, on a loop in a thread of its own; requests of one peer share one."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lynxkv.node.loops import Loop
from lynxkv.transport import Link, connect
from lynxkv.wire import Hello

T = TypeVar("T")
Peer = tuple[str, int]


class Links:
    """A decode node's sockets. :meth:`to` and :meth:`up` run on the loop, all else on any thread.

    Parameters
    ----------
    hello : Hello
        What this node says of itself.
    connect_s : float
        Deadline of a connection.
    tls : SSLContext or None
        See :class:`lynxkv.transport.Security`.
    """

    def __init__(self, hello: Hello, connect_s: float, tls: ssl.SSLContext | None) -> None:
        self._hello, self._connect_s, self._tls = hello, connect_s, tls
        self._links: dict[Peer, Link] = {}
        self._connecting: dict[Peer, asyncio.Task[Link]] = {}
        self._loop = Loop("lynxkv-links")

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._loop.closed

    def close(self) -> None:
        """Cancel what is pulled, close every link, end the thread; idempotent."""
        if not self.closed:
            self.call(self._end())
            self._loop.close()

    def post(self, function: Callable[..., object], *args: object) -> bool:
        """Have ``function(*args)`` called on the loop; False: it is closed, and so is every link."""
        return self._loop.post(function, *args)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop; an interrupt here cancels it there."""
        return self._loop.call(work)

    def held(self) -> tuple[int, int]:
        """Links that are up, and what is pulled or admitted on them."""
        up = [link for link in list(self._links.values()) if link.error is None]
        return len(up), sum(link.active for link in up)

    async def to(self, peer: Peer) -> Link:
        """The link to ``peer``, connected if there is none; errors as :func:`lynxkv.transport.connect`."""
        link = self.up(peer)
        if link is not None:
            return link
        connecting = self._connecting.get(peer)
        if connecting is None:
            connecting = self._connecting[peer] = asyncio.get_running_loop().create_task(self._connect(peer))
            connecting.add_done_callback(lambda task: self._connected(peer, task))
        return await asyncio.shield(connecting)  # it is for all who wait, and for those who come

    def up(self, peer: Peer) -> Link | None:
        """The link to ``peer`` if there is one."""
        link = self._links.get(peer)
        return None if link is None or link.error is not None else link

    async def _connect(self, peer: Peer) -> Link:
        link = await connect(*peer, self._hello, deadline_s=self._connect_s, tls=self._tls)
        for dead in [other for other, held in self._links.items() if held.error is not None]:
            del self._links[dead]
        self._links[peer] = link
        return link

    def _connected(self, peer: Peer, task: "asyncio.Task[Link]") -> None:
        del self._connecting[peer]
        if not task.cancelled():
            task.exception()  # those who waited have it; it is no news if all of them left

    async def _end(self) -> None:
        for link in self._links.values():
            await link.close()
        self._links.clear()

"""A relay between a decode node and a prefill node that damages, delays or cuts what the prefill node sends."""

import contextlib
import socket
import threading
from collections.abc import Callable

from lynxkv.codec import Tier
from lynxkv.wire.frames import HEADER_BYTES, FrameKind, Header, unpack_header

Damage = Callable[[Header, bytearray], bytearray | None]
"""Gets a frame's header and payload; gives the payload to send on, or None to cut the connection there."""


class Proxy:
    """Listens at ``address``; every frame of the server passes through ``damage``.

    Attributes
    ----------
    flow : threading.Event
        While it is cleared nothing passes from the server to the client.
    seen : list of Header
        Frames of the server so far, in order.
    """

    def __init__(self, target: tuple[str, int], damage: Damage = lambda _, payload: payload) -> None:
        self._target, self.damage = target, damage
        self.flow = threading.Event()
        self.flow.set()
        self.seen: list[Header] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def __enter__(self) -> "Proxy":
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.flow.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def cut(self) -> None:
        """End every connection now."""
        for each in list(self._sockets):
            _close(each)

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [client, server]
            self._start(self._there, client, server)
            self._start(self._back, server, client)

    def _there(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                server.sendall(data)
        except OSError:
            pass
        _close(server)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while True:
                head = _exactly(server, HEADER_BYTES)
                header = unpack_header(head)
                payload = _exactly(server, header.length)
                self.flow.wait()
                self.seen.append(header)
                damaged = self.damage(header, payload)
                if damaged is None:
                    break
                client.sendall(head + damaged)
        except OSError:
            pass
        _close(client)
        _close(server)


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise OSError("the connection ended")
        data += more
    return data


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def is_data(header: Header, tier: Tier) -> bool:
    """Whether a frame carries bytes of ``tier``."""
    return header.kind is FrameKind.DATA and header.tier is tier


class Flip:
    """Flips a bit in the first data frame of ``tier``, the first ``times`` times its segment is sent."""

    def __init__(self, tier: Tier, times: int) -> None:
        self.tier, self.left = tier, times
        self.segment: int | None = None

    def __call__(self, header: Header, payload: bytearray) -> bytearray:
        if is_data(header, self.tier) and self.left and self.segment in (None, header.segment) and not header.offset:
            self.segment, self.left = header.segment, self.left - 1
            payload[len(payload) // 2] ^= 0x10
        return payload


class CutAfter:
    """Cuts the connection instead of the data frame number ``frames`` of ``tier``."""

    def __init__(self, tier: Tier, frames: int = 0) -> None:
        self.tier, self.left = tier, frames

    def __call__(self, header: Header, payload: bytearray) -> bytearray | None:
        if is_data(header, self.tier):
            self.left -= 1
            if self.left < 0:
                return None
        return payload

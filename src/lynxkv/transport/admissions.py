"""Transfers that are being admitted: prompts on their way to an announcement, for peers and for this process."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from lynxkv.errors import Cancelled, LynxError, Overloaded, TransferError, TransferRejected
from lynxkv.transport.connection import Connection
from lynxkv.wire.events import Admit, Admitted, Hello, failed

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]
OnAdmit = Callable[[Admit, Hello], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class _Admission:
    connection: Connection | None
    task: "asyncio.Task[Any]"
    reason: str | None = None


class Admissions:
    """What is being admitted; used on the server's loop only.

    Parameters
    ----------
    most : int
        Admissions of peers at a time; one more is refused.
    check : callable
        Raises why an id cannot be admitted.
    gone : callable
        ``gone(transfer, error, cancelled)``: its admission failed, or was cancelled and what it announced is to end.
    """

    def __init__(
        self, most: int, check: Callable[[bytes], None], gone: Callable[[bytes, LynxError, bool], None]
    ) -> None:
        self._most, self._check, self._gone = most, check, gone
        self._running: dict[bytes, _Admission] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Admissions that have not been answered."""
        return len(self._running)

    async def run(self, transfer: bytes, work: Work[T], connection: Connection | None = None) -> T:
        """Run ``work``, which announces ``transfer``.

        Raises
        ------
        TransferRejected
            The id cannot be admitted.
        Cancelled
            :meth:`cancel` or :meth:`lost` ended it.
        LynxError
            Of ``work``.
        """
        self._refuse(transfer)
        task = asyncio.get_running_loop().create_task(work())
        admission = self._running[transfer] = _Admission(connection, task)
        try:
            return await task
        except asyncio.CancelledError:
            reason = admission.reason
            self._gone(transfer, TransferRejected(f"its admission was cancelled: {reason or 'given up'}"), True)
            if reason is None:
                raise
            raise Cancelled(f"the admission was cancelled: {reason}") from None
        except LynxError as error:
            self._gone(transfer, error, False)
            raise
        except Exception as error:
            self._gone(transfer, TransferError(f"the server could not admit it: {error!r}"), False)
            raise
        finally:
            del self._running[transfer]

    def ask(self, on_admit: OnAdmit | None, connection: Connection, admit: Admit, epoch: int) -> None:
        """A peer asks: admit and answer."""
        try:
            if on_admit is None:
                raise TransferRejected("this server admits no requests; it serves only what it announces")
            self._refuse(admit.transfer)
            if len(self._asking) >= self._most:
                raise Overloaded(f"no room: {self._most} admissions wait already; retry later")
        except LynxError as e:
            connection.send(failed(e), admit.transfer)
            return
        task = asyncio.get_running_loop().create_task(self._answer(on_admit, connection, admit, epoch))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def cancel(self, transfer: bytes, reason: str, connection: Connection | None = None) -> None:
        """End an admission if there is one, with ``connection`` only its own."""
        admission = self._running.get(transfer)
        if admission is not None and connection in (None, admission.connection):
            admission.reason = admission.reason or reason
            admission.task.cancel()

    def lost(self, connection: Connection) -> None:
        """A peer is gone, and with it its admissions."""
        for transfer in [t for t, running in self._running.items() if running.connection is connection]:
            self.cancel(transfer, "its peer is gone")

    def end(self, reason: str) -> None:
        """Cancel every admission."""
        for transfer in self._running:
            self.cancel(transfer, reason)

    def _refuse(self, transfer: bytes) -> None:
        if transfer in self._running:
            raise TransferRejected(f"transfer {transfer.hex()[:12]} is being admitted already; draw a new id")
        self._check(transfer)

    async def _answer(self, on_admit: OnAdmit, connection: Connection, admit: Admit, epoch: int) -> None:
        transfer = admit.transfer
        if connection.over or connection.peer is None:
            return
        peer = connection.peer
        try:
            await self.run(transfer, lambda: on_admit(admit, peer), connection)
        except Cancelled as e:
            connection.send(failed(TransferRejected(str(e))), transfer)
        except LynxError as e:
            connection.send(failed(e), transfer)
        except Exception as e:
            log.exception("admitting transfer %s failed", transfer.hex()[:12])
            connection.send(failed(TransferError(f"the server could not admit it: {e!r}")), transfer)
        else:
            connection.send(Admitted(transfer, epoch), transfer)

"""Transfers that are not there yet: being admitted, and pulled before their announcement."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from lynxkv.errors import Cancelled, DeadlineExceeded, LynxError, TransferRejected
from lynxkv.transport.connection import Connection
from lynxkv.transport.history import History
from lynxkv.wire.events import Pull, failed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parked:
    """A pull that waits for its transfer to be announced."""

    pull: Pull
    connection: Connection
    timer: asyncio.TimerHandle


@dataclass(slots=True)
class _Admission:
    connection: Connection | None
    task: "asyncio.Task[Any]"
    reason: str | None = None


class Admissions:
    """What waits for an announcement; used on the server's loop only.

    Parameters
    ----------
    history : History
        Hears of admissions that failed before anyone pulled.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._parked: dict[bytes, Parked] = {}
        self._running: dict[bytes, _Admission] = {}

    def __len__(self) -> int:
        """Admissions that have not been answered."""
        return len(self._running)

    @property
    def parked(self) -> dict[bytes, Parked]:
        """Pulls that wait, by transfer; not to be changed."""
        return self._parked

    def refuse(self, transfer: bytes) -> None:
        """Raise :class:`TransferRejected` if the id is being admitted already."""
        if transfer in self._running:
            raise TransferRejected(f"transfer {transfer.hex()[:12]} is being admitted already; draw a new id")

    async def run(
        self, transfer: bytes, work: Callable[[], Coroutine[Any, Any, T]], connection: Connection | None = None
    ) -> T:
        """Run ``work``, which announces ``transfer``; whoever pulls it by then or later hears why it failed.

        Raises
        ------
        Cancelled
            :meth:`cancel` or :meth:`lost` ended it.
        """
        task = asyncio.get_running_loop().create_task(work())
        admission = self._running[transfer] = _Admission(connection, task)
        try:
            return await task
        except LynxError as error:
            self._fail(transfer, error)
            raise
        except asyncio.CancelledError:
            self._fail(transfer, TransferRejected(f"its admission was cancelled: {admission.reason or 'given up'}"))
            if admission.reason is None:
                raise
            raise Cancelled(f"the admission was cancelled: {admission.reason}") from None
        finally:
            del self._running[transfer]

    def cancel(self, transfer: bytes, reason: str, connection: Connection | None = None) -> bool:
        """End an admission, with ``connection`` only its own; whether there was one."""
        admission = self._running.get(transfer)
        if admission is None or connection not in (None, admission.connection):
            return False
        admission.reason = admission.reason or reason
        admission.task.cancel()
        return True

    def park(self, pull: Pull, connection: Connection) -> None:
        """Keep a pull until its transfer is announced, fails, or its deadline passes."""
        error = DeadlineExceeded(f"transfer {pull.transfer.hex()[:12]} was not announced within {pull.deadline_s:g} s")
        timer = asyncio.get_running_loop().call_later(pull.deadline_s, self.unpark, pull.transfer, error)
        self._parked[pull.transfer] = Parked(pull, connection, timer)

    def take(self, transfer: bytes) -> Parked | None:
        """The pull that waits for ``transfer``, no longer kept; None: nobody does."""
        parked = self._parked.pop(transfer, None)
        if parked is not None:
            parked.timer.cancel()
        return parked

    def unpark(self, transfer: bytes, error: LynxError) -> bool:
        """Tell whoever waits for ``transfer`` that it will not come; whether somebody did."""
        parked = self.take(transfer)
        if parked is None:
            return False
        parked.connection.send(failed(error), transfer)
        return True

    def leave(self, connection: Connection, transfer: bytes) -> None:
        """A peer does not want ``transfer`` any more: its pull and its admission end."""
        parked = self._parked.get(transfer)
        if parked is not None and parked.connection is connection:
            self.take(transfer)
        self.cancel(transfer, "its peer cancelled it", connection)

    def lost(self, connection: Connection) -> None:
        """A peer is gone, and with it its pulls and admissions."""
        for transfer in [t for t, parked in self._parked.items() if parked.connection is connection]:
            self.take(transfer)
        for transfer in [t for t, running in self._running.items() if running.connection is connection]:
            self.cancel(transfer, "its peer is gone")

    def refuse_parked(self, error: LynxError) -> None:
        """Tell everyone who waits that nothing will come."""
        for transfer in list(self._parked):
            self.unpark(transfer, error)

    def end(self, reason: str) -> None:
        """Cancel every admission."""
        for transfer in list(self._running):
            self.cancel(transfer, reason)

    def _fail(self, transfer: bytes, error: LynxError) -> None:
        if not self.unpark(transfer, error):
            self._history.fail(transfer, error)

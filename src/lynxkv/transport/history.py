"""Ids that were used: to refuse their reuse by name, and to tell a late pull why there is nothing."""

from collections import OrderedDict

from lynxkv.errors import LynxError, TransferRejected

REMEMBERED = 4096
"""Ids that are remembered, the latest."""


class History:
    """How transfers ended that are no more."""

    def __init__(self) -> None:
        self._ended: OrderedDict[bytes, str] = OrderedDict()
        self._untold: OrderedDict[bytes, LynxError] = OrderedDict()

    def end(self, transfer: bytes, why: str) -> None:
        """``transfer`` is over; its id is not used again."""
        self._ended[transfer] = why[:200]
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def fail(self, transfer: bytes, error: LynxError) -> None:
        """Its producer gave up, and whoever wants it has not asked yet."""
        self._untold[transfer] = error
        if len(self._untold) > REMEMBERED:
            self._untold.popitem(last=False)

    def begin(self, transfer: bytes) -> None:
        """It is announced: what an earlier attempt of its admission failed with is void."""
        self._untold.pop(transfer, None)

    def refuse(self, transfer: bytes) -> None:
        """Raise :class:`TransferRejected` if the id was used."""
        if transfer in self._ended:
            raise TransferRejected(f"transfer {transfer.hex()[:12]} has ended ({self._ended[transfer]}); draw a new id")

    def tell(self, transfer: bytes) -> None:
        """For a pull: raise why there is nothing to pull, its producer's own error the first time."""
        error = self._untold.pop(transfer, None)
        if error is not None:
            raise error
        self.refuse(transfer)

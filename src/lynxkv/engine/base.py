"""What the nodes ask of a model runtime."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from numpy.typing import NDArray

from lynxkv.codec import CacheShape, Kind
from lynxkv.speculation.session import Logits, Session
from lynxkv.wire.fingerprint import Fingerprint


class Rows(Protocol):
    """KV rows that can be read and written in place."""

    def read(self, layer: int, kind: Kind, start: int, stop: int) -> NDArray[Any]:
        """Rows ``[kv_heads, stop - start, dim]`` in the handed-over dtype (bfloat16 as uint16 bits); may be a view."""
        ...

    def writing(self, layer: int, kind: Kind, start: int, stop: int) -> AbstractContextManager[NDArray[Any]]:
        """Rows ``[kv_heads, stop - start, dim]`` to fill, in the handed-over dtype or float32; in place on a CPU."""
        ...


class KVSession(Session, Rows, Protocol):
    """A session whose KV rows can be read and written in place."""

    @property
    def nbytes(self) -> int:
        """Bytes of the KV buffers, all of them allocated when the session was opened."""
        ...

    def close(self) -> None:
        """Free the KV buffers, whatever still refers to this session, which cannot be used any more; idempotent."""
        ...

    def place(self, shape: CacheShape) -> None:
        """Declare ``shape``'s rows present; their content is written afterwards."""
        ...


class Engine(Protocol):
    """A loaded model."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What another engine has to have in common with this one to use its KV."""
        ...

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def vocab(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def eos(self) -> frozenset[int]:
        """Token ids that end an answer."""
        ...

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer."""
        ...

    def check_prompt(self, tokens: Sequence[int], room: int = 0) -> None:
        """Raise PromptTooLong or RequestError for a prompt that cannot be run with ``room`` more tokens."""
        ...

    def shape(self, tokens: int) -> CacheShape:
        """The KV handed over for a prompt of ``tokens`` tokens."""
        ...

    def session_bytes(self, capacity: int, append: int) -> int:
        """``nbytes`` of the session that :meth:`open` would give."""
        ...

    def open(self, capacity: int, append: int) -> KVSession:
        """An empty session for ``capacity`` tokens; at most ``append`` are appended before old rows may drop."""
        ...

    def prefill(self, tokens: Sequence[int], chunk: int) -> Iterator[tuple[int, KVSession, Logits]]:
        """Prefill in chunks; after each, ``(tokens done, session, logits [vocab] of the next token)``."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` as it stands."""
        ...

    def chat(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of one user turn, or of turns of ``role`` and ``content``, in the model's chat template.

        Ready for the answer; plain text where the model has no template. RequestError for turns it does not take.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens left out."""
        ...

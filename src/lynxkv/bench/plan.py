"""What a comparison runs, as the decode process is told it."""

import msgspec


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    peer: tuple[str, int]
    model: str
    dtype: str
    kv_dtype: str
    tokens: int
    document: str | None = None
    prompt: str | None = None
    max_tokens: int
    temperature: float
    seed: int | None

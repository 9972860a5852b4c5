"""Loads the engine of a command, late: torch takes seconds, and a wrong option should be told at once."""

from typing import TYPE_CHECKING

from lynxkv.engine.models import resolve

if TYPE_CHECKING:
    from lynxkv.engine.transformers import TransformersEngine


def load_engine(model: str, *, dtype: str, kv_dtype: str, threads: int) -> "TransformersEngine":
    """The engine for ``model``; errors as :meth:`TransformersEngine.load`."""
    resolve(model)
    import torch

    from lynxkv.engine.transformers import TransformersEngine

    torch.set_num_threads(threads)
    return TransformersEngine.load(model, dtype=dtype, kv_dtype=kv_dtype)

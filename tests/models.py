"""Tiny random models of every shape the engine takes, and the loop of transformers' own that proofs compare with."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from lynxkv.engine.transformers import TransformersEngine

VOCAB = 199


def _llama(**changes):
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 2048,
            "eos_token_id": None,
            "bos_token_id": None,
            "initializer_range": 0.11,  # drafts on 4 bits are partly right, partly wrong
            **changes,
        }
    )


def _sliding():
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=100,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,  # tied, a random model says its last token for ever
        initializer_range=0.2,
    )


CONFIGS: dict[str, Callable[[], object]] = {
    "gqa-64": _llama,
    "mqa-80": lambda: _llama(num_key_value_heads=1, head_dim=80),
    "mha-96": lambda: _llama(num_key_value_heads=4, head_dim=96, num_hidden_layers=2),
    "sliding-mqa": _sliding,
}


@cache
def model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A random model of ``CONFIGS``."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()


@cache
def engine(name: str, dtype: str = "float32", kv_dtype: str = "bfloat16", seed: int = 0) -> TransformersEngine:
    """An engine over :func:`model`, without a tokenizer."""
    return TransformersEngine(model(name, getattr(torch, dtype), seed), None, kv_dtype=kv_dtype)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random token ids that repeat themselves now and then."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1, VOCAB, size=(12, 7))
    return [int(t) for t in words[rng.integers(0, 12, size=tokens // 7 + 1)].reshape(-1)[:tokens]]


def dynamic_logits(name: str, chunks: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    """Logits of a forward pass a chunk on transformers' own growing cache."""
    m = model(name, dtype)
    kv = DynamicCache(config=m.config)
    argument = "cache" if "cache" in inspect.signature(m.forward).parameters else "past_key_values"
    with torch.inference_mode():
        return [
            m(input_ids=torch.tensor([list(c)]), use_cache=True, **{argument: kv}).logits[0].float().numpy()
            for c in chunks
        ]

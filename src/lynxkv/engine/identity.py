"""The identity of a model's weights, tokenizer and positions, for the fingerprint."""

from typing import Any

import torch
import xxhash

_PART = 1 << 24  # elements that are copied at once
_READABLE = 500


def weights_identity(model: torch.nn.Module) -> str:
    """A digest of every parameter's name, shape and values: a fine-tune may touch a few rows only.

    Values are rounded to bfloat16 first, so that one checkpoint has one identity in every compute dtype.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        for values in tensor.detach().reshape(-1).split(_PART):
            if values.is_floating_point():
                values = values.to(torch.bfloat16).view(torch.int16)
            digest.update(values.cpu().numpy())
    return digest.hexdigest()


def tokenizer_identity(tokenizer: Any) -> str:
    """A digest of the vocabulary and chat template; ``none`` without a tokenizer."""
    if tokenizer is None:
        return "none"
    digest = xxhash.xxh3_128()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}:{token}\n".encode())
    digest.update((getattr(tokenizer, "chat_template", None) or "").encode())
    return digest.hexdigest()


def rope_identity(parameters: Any) -> str:
    """RoPE parameters as ``name=value`` pairs; the long tables of some models as a digest."""
    text = " ".join(f"{name}={value!r}" for name, value in sorted((parameters or {}).items()))
    return text if len(text) <= _READABLE else f"xxh3:{xxhash.xxh3_128_hexdigest(text.encode())}"

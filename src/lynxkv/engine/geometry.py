"""Which models have a cache that is K and V per layer, and how wide each layer's is."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lynxkv.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's cache: heads, widths, and its window (0: all tokens)."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int


def geometry(model: Any, cache_argument: str) -> tuple[LayerGeometry, ...]:
    """Heads, widths and windows of every layer, as a forward pass of one token leaves them in the cache.

    Raises
    ------
    UnsupportedModel
        The cache is anything but K and V per layer, full or sliding; the message names it.
    """
    config = model.config.get_text_config(decoder=True)
    windows = _windows(config)
    if any(getattr(module, "is_decoder", None) is False for module in model.modules()):
        raise UnsupportedModel(
            f"{config.model_type} is an encoder here: its attention is not causal; set is_decoder in its config"
        )
    cache = DynamicCache(config=config)
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device),
                **{cache_argument: cache, "use_cache": True},
            )
    except Exception as error:  # whatever a foreign model does with a cache that is not its own kind
        raise UnsupportedModel(
            f"{config.model_type} does not run on a cache of K and V per layer: "
            f"{type(error).__name__} {str(error)[:200]!r}"
        ) from error
    found = []
    for i, (layer, window) in enumerate(zip(cache.layers, windows, strict=True)):
        if layer.keys is None or layer.keys.ndim != 4 or layer.keys.shape[:3] != layer.values.shape[:3]:
            raise UnsupportedModel(
                f"layer {i} of {config.model_type} keeps no K and V of its own (shared or latent KV); "
                "lynxkv moves caches that are K and V per layer"
            )
        _, heads, _, k_dim = layer.keys.shape
        found.append(LayerGeometry(heads, k_dim, layer.values.shape[3], window))
    return tuple(found)


def context(config: Any) -> int:
    """Most tokens of a sequence.

    A model of rope type ``longrope`` ends where its short factors do: beyond, transformers rotates a whole pass by the
    long ones, so that KV would depend on how tokens are cut into passes, and a verified window on what it was drafted.
    """
    most = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            most = min(most, int(rope.get("original_max_position_embeddings") or most))
    return most


def _windows(config: Any) -> list[int]:
    """Each layer's window, from the cache transformers itself would build; refuses what is not K and V."""
    kind = config.model_type
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel(f"{kind} uses multi-head latent attention (MLA), which is not supported yet")
    allowed = {"full_attention", "sliding_attention"}
    for i, name in enumerate(getattr(config, "layer_types", None) or []):
        if name not in allowed:
            raise UnsupportedModel(f"layer {i} of {kind} is {name!r}; only full and sliding attention is supported")
    layers = DynamicCache(config=config).layers
    windows = []
    for i, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            windows.append(int(layer.sliding_window))
        elif type(layer) is DynamicLayer:
            windows.append(0)
        else:
            raise UnsupportedModel(
                f"layer {i} of {kind} keeps a {type(layer).__name__}, which is not K and V per layer"
            )
    if len(layers) != config.num_hidden_layers:
        raise UnsupportedModel(f"{kind} has {config.num_hidden_layers} layers but caches {len(layers)}: shared KV")
    return windows

"""What prefill and decode workers have in common."""

import hashlib
import time
from typing import Any

import msgspec

from lynxkv.codec import CodecSpec
from lynxkv.engine.base import Engine
from lynxkv.serving.ask import Ask
from lynxkv.serving.errors import Refusal
from lynxkv.serving.rendering import model_entry
from lynxkv.serving.service import Service
from lynxkv.serving.tokens import Tokens


class WorkerService(Service):
    """A service with a model.

    Parameters
    ----------
    engine : Engine
    model : str
        Its name towards clients.

    Attributes
    ----------
    about : dict
        What ``/health`` says of the model; a router pairs workers of one fingerprint.
    """

    def __init__(self, role: str, engine: Engine, *, model: str, **options: Any) -> None:
        super().__init__(role, options.pop("name", "") or model, **options)
        self.model = model
        self.tokenizer = Tokens(engine)
        self.about = {
            "status": "ok",
            "model": model,
            "fingerprint": hashlib.sha256(msgspec.json.encode(engine.fingerprint)).hexdigest()[:16],
            "context": engine.context,
        }
        self._models = [model_entry(model, int(time.time()), engine.context)]

    def models(self) -> list[dict[str, Any]]:
        """The one model."""
        return self._models


def spec_of(target: str) -> CodecSpec:
    """The codec spec of a request's target: as it is for "exact", else anchor and residual."""
    return CodecSpec(raw=True) if target == "exact" else CodecSpec()


def check_seed(ask: Ask, seed: int) -> None:
    """Refuse a request whose own seed is not that of its transfer."""
    if ask.params.seed not in (None, seed):
        raise Refusal("seed differs from kv_transfer_params.seed", "seed")

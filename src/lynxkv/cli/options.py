"""Options that several commands share, and how their failures are reported."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lynxkv.errors import LynxError

Model = Annotated[str, typer.Option(help="Alias (smollm2-135m, qwen2.5-coder-0.5b), local folder or hub id.")]
Dtype = Annotated[str, typer.Option(help="Compute dtype: float32, bfloat16 or float16.")]
KvDtype = Annotated[str, typer.Option(help="Dtype of the KV handed over: that of compute, or narrower under float32.")]
LinkRate = Annotated[str | None, typer.Option("--link", help="Rate of the link, e.g. 100mbit or 12.5MB.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of the answer.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampler; drawn and reported if not given.")]
Document = Annotated[Path | None, typer.Option(help="Text file that the prompt is about.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Chunk = Annotated[int, typer.Option(help="Tokens of a prefill chunk and a segment, a multiple of 64.")]
EntryMemory = Annotated[str, typer.Option("--memory", help="Bound of all held entries together, e.g. 4GB.")]
Ttl = Annotated[float, typer.Option(help="Seconds an entry lives after its last use.")]
Lease = Annotated[float, typer.Option(help="Seconds after which a transfer without progress ends.")]
Threads = Annotated[int, typer.Option(help="Compute threads.", min=1)]
UntilStdinCloses = Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)]

Verify = Literal["batched", "stepwise"]
OnLoss = Literal["fail", "recompute"]

DEFAULT_MODEL = "smollm2-135m"


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """One clear line and a non-zero exit for everything that can go wrong on purpose."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except LynxError as error:
            print(f"lynxkv: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except ModuleNotFoundError as error:
            if (error.name or "lynxkv").partition(".")[0] == "lynxkv":
                raise
            print(
                f"lynxkv: this needs {error.name}, which is not installed: pip install 'lynxkv[serve]'", file=sys.stderr
            )
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print("lynxkv: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return run

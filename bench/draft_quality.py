"""How good drafts are: KL of the next token on each KV, and how many drafts the target would have drawn.

For each model and document a prompt is prefilled once and its KV goes through each codec spec; every KV then sees the
same tokens.

KL: the prompt is the document's first tokens, and the next 64 (the draft cap) are the document's own.
Acceptance: the prompt is a chat turn about the document, and the next tokens are the target's own continuation, greedy
and sampled at temperature 1 with coupled noise; a draft is accepted if it is the token the target drew there. KL over
these positions is reported too (kl_own_*); bars are on the first.

    python bench/draft_quality.py [--model smollm2-135m ...] [--documents 7] [--json]
"""

import argparse
import http.client
import inspect
import json
import subprocess
import sys
import time
import typing
from collections.abc import Iterator

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from lynxkv.bench.documents import QUESTION, long_prompt, pydoc_text
from lynxkv.bench.schemes import SCHEMES
from lynxkv.codec import CodecSpec, Span, Tier, plan
from lynxkv.engine.models import ALIASES
from lynxkv.engine.transformers import TransformersEngine, TransformersSession
from lynxkv.errors import RequestError
from lynxkv.node.spans import decode_span, encode_session
from lynxkv.speculation import CAP, Sampler, SamplingParams

CHUNK = 512
LYNX, INT4 = SCHEMES["lynx"].spec, SCHEMES["int4"].spec
MODES = {"greedy": 0.0, "coupled": 1.0}
BARS = {
    "kl_anchor": ("≤", 0.009),
    "kl_ratio_to_int4": ("≤", 0.85),
    "kl_full": ("≤", 0.0001),
    "accept_greedy": ("≥", 0.95),
    "accept_coupled": ("≥", 0.95),
    "positions_greedy": ("≥", 2000),
    "positions_coupled": ("≥", 2000),
    "documents": ("≥", 6),
}


def documents(count: int) -> Iterator[tuple[str, str]]:
    """Names and texts: documentation pages, and source code in every third place."""
    sources = [argparse, inspect, subprocess, typing, http.client]
    for i in range(count):
        if i % 3 == 2:
            module = sources[i // 3 % len(sources)]
            yield f"source {module.__name__}", inspect.getsource(module)
        else:
            yield f"pydoc {i}", pydoc_text(first=i * 5)


def session_on(
    engine: TransformersEngine, source: TransformersSession, tokens: int, room: int, spec: CodecSpec, tier: Tier
) -> TransformersSession:
    """A session whose prompt KV went through ``spec`` up to ``tier``."""
    shape = engine.shape(tokens)
    segments = plan(shape, spec, segment_tokens=CHUNK)
    session = engine.open(tokens + room, room)
    session.place(shape)
    tiers: dict[Span, dict[Tier, np.ndarray]] = {}
    for index, data in encode_session(source, shape, spec, segments):
        tiers.setdefault(segments[index].span, {})[segments[index].tier] = data
    for span, held in tiers.items():
        residual = held.get(Tier.RESIDUAL) if tier >= Tier.RESIDUAL else None
        decode_span(session, shape, spec, span, held[Tier.ANCHOR], residual)
    return session


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def continuation(
    session: TransformersSession, first: int, sampler: Sampler, count: int
) -> tuple[list[int], np.ndarray]:
    """``count`` tokens the target draws after ``first``, and their logits; the session is left as it was."""
    base, tokens, rows = session.length, [first], []
    while len(tokens) <= count:
        rows.append(session.forward([tokens[-1]])[0])
        tokens.append(sampler.draw(rows[-1], tokens).token)
    session.truncate(base)
    return tokens, np.stack(rows)


def forced(session: TransformersSession, tokens: list[int]) -> np.ndarray:
    """Logits after each of ``tokens`` but the last; the session is left as it was."""
    base = session.length
    rows = session.forward(tokens[:-1])
    session.truncate(base)
    return rows


def every_kv(engine: TransformersEngine, source: TransformersSession, room: int) -> dict[str, TransformersSession]:
    """The prompt's KV as each scheme hands it over."""
    cases = {
        "bf16": (SCHEMES["bf16"].spec, Tier.ANCHOR),
        "anchor": (LYNX, Tier.ANCHOR),
        "full": (LYNX, Tier.RESIDUAL),
        "int4": (INT4, Tier.ANCHOR),
    }
    return {name: session_on(engine, source, source.length, room, *case) for name, case in cases.items()}


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL of each row, nats, from log-probabilities."""
    return (np.exp(p) * (p - q)).sum(-1)


def on_text(engine: TransformersEngine, text: str, prompt_tokens: int) -> dict[str, np.ndarray]:
    """Per-position KL where the document goes on."""
    ids = engine.encode(text)[: prompt_tokens + CAP + 1]
    if len(ids) <= prompt_tokens + CAP:
        raise RequestError(f"a document of more than {prompt_tokens + CAP} tokens expected, got {len(ids)}")
    *_, (_, source, _) = engine.prefill(ids[:prompt_tokens], CHUNK)
    rows = {name: forced(kv, ids[prompt_tokens:]) for name, kv in every_kv(engine, source, CAP + 1).items()}
    p = logprobs(rows["bf16"])
    return {f"kl_{name}": divergence(p, logprobs(rows[name])) for name in ("anchor", "int4", "full")}


def on_own_continuation(
    engine: TransformersEngine, text: str, prompt_tokens: int, steps: int, seed: int
) -> dict[str, np.ndarray]:
    """Per-position KL and agreement along what the target itself says."""
    prompt = long_prompt(engine, text, QUESTION, prompt_tokens)
    *_, (_, source, last) = engine.prefill(prompt, CHUNK)
    kv = every_kv(engine, source, steps + 1)
    out = {}
    for mode, temperature in MODES.items():
        sampler = Sampler(SamplingParams(temperature=temperature, seed=seed, max_tokens=steps), prompt, ())
        tokens, target = continuation(kv["full"], sampler.draw(last, []).token, sampler, steps)
        rows = {name: forced(session, tokens) for name, session in kv.items() if name != "full"} | {"full": target}
        drafts = [sampler.draw(row, tokens[: i + 1]).token for i, row in enumerate(rows["anchor"])]
        out[f"agree_{mode}"] = np.asarray(drafts) == np.asarray(tokens[1:])
        p = logprobs(rows["bf16"])
        for name in ("anchor", "int4", "full"):
            out[f"kl_own_{name}_{mode}"] = divergence(p, logprobs(rows[name]))
    return out


def evaluate(model: str, wanted: int, prompt_tokens: int, steps: int, console: Console) -> dict[str, float | str]:
    engine = TransformersEngine.load(model, dtype="float32", kv_dtype="bfloat16")
    parts = []
    for i, (name, text) in enumerate(documents(wanted)):
        begun = time.monotonic()
        part = on_text(engine, text, prompt_tokens)
        part |= on_own_continuation(engine, text, prompt_tokens, steps, seed=i)
        parts.append(part)
        console.print(
            f"[dim]{model}, {name}: KL anchor {part['kl_anchor'].mean():.4f}, int4 {part['kl_int4'].mean():.4f}, "
            f"agreement {part['agree_greedy'].mean():.3f} {part['agree_coupled'].mean():.3f}, "
            f"{time.monotonic() - begun:.0f} s[/dim]"
        )
    every = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    kl = {name: float(every[f"kl_{name}"].mean()) for name in ("anchor", "int4", "full")}
    own = {name: float(np.mean([every[f"kl_own_{name}_{mode}"].mean() for mode in MODES])) for name in kl}
    return {
        "model": model,
        "documents": len(parts),
        "prompt_tokens": prompt_tokens,
        "kl_anchor": kl["anchor"],
        "kl_int4": kl["int4"],
        "kl_ratio_to_int4": kl["anchor"] / kl["int4"],
        "kl_full": kl["full"],
        "kl_own_anchor": own["anchor"],
        "kl_own_int4": own["int4"],
        "accept_greedy": float(every["agree_greedy"].mean()),
        "accept_coupled": float(every["agree_coupled"].mean()),
        "positions_greedy": int(every["agree_greedy"].size),
        "positions_coupled": int(every["agree_coupled"].size),
    }


def holds(figures: dict[str, float | str]) -> bool:
    return all(
        float(figures[key]) <= bar if sign == "≤" else float(figures[key]) >= bar for key, (sign, bar) in BARS.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(ALIASES))
    parser.add_argument("--documents", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=300, help="positions per document and mode")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    results = [evaluate(model, args.documents, args.tokens, args.steps, console) for model in args.model]
    ok = all(holds(figures) for figures in results)
    if args.json:
        print(json.dumps({"models": results, "bars": {k: f"{s} {v}" for k, (s, v) in BARS.items()}, "ok": ok}))
    else:
        table = Table(title=f"draft quality, {args.tokens}-token prompts, float32 compute, bfloat16 KV")
        table.add_column("figure")
        table.add_column("bar", justify="right")
        for figures in results:
            table.add_column(str(figures["model"]), justify="right")
        for key in [*BARS, "kl_int4", "kl_own_anchor", "kl_own_int4"]:
            bar = " ".join(map(str, BARS[key])) if key in BARS else ""
            table.add_row(key, bar, *(f"{figures[key]:.5g}" for figures in results))
        Console().print(table, "ok" if ok else "MISSED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

"""The demo's figures over many prompts: ratios within each prompt, then their medians.

One prefill process behind a rate-limited link, this process decodes. Each prompt is prefilled once and its entries
are encoded before anything is timed; the schemes then take turns, in an order that rotates from prompt to prompt.

    python bench/demo_repeat.py [--prompts 10] [--tokens 4096] [--link 100mbit] [--json]
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from lynxkv.bench.compare import Row, equals_plain, prepare, run_scheme
from lynxkv.bench.documents import QUESTION, long_prompt, pydoc_text
from lynxkv.bench.processes import prefill_process
from lynxkv.bench.schemes import SCHEMES
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.node.decode import DecodeNode
from lynxkv.speculation import SamplingParams

BARS = {
    "draft_ttft_to_int8": 0.60,
    "draft_ttft_to_int4": 1.06,
    "ttkt32_to_int8": 0.90,
    "wire_bytes_to_int8": 1.03,
}


def ratios(rows: dict[str, Row]) -> dict[str, float]:
    lynx, int8, int4 = rows["lynx"], rows["int8"], rows["int4"]
    return {
        "draft_ttft_to_int8": lynx.ttft_draft_s / int8.ttft_draft_s,
        "draft_ttft_to_int4": lynx.ttft_draft_s / int4.ttft_draft_s,
        "ttkt32_to_int8": lynx.ttkt32_s / int8.ttkt32_s,
        "wire_bytes_to_int8": lynx.bytes / int8.bytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--schemes", nargs="+", default=["bf16", "int8", "int4", "lynx"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    schemes = [SCHEMES[name] for name in args.schemes]
    params = SamplingParams(max_tokens=args.max_tokens, seed=0, ignore_eos=True)
    results: list[dict[str, object]] = []
    equal = True
    with prefill_process(model=args.model, link=args.link) as peer:
        engine = TransformersEngine.load(args.model)
        with DecodeNode(engine, stall_s=120) as node:
            node.warm([scheme.spec for scheme in schemes])
            for i in range(args.prompts):
                tokens = long_prompt(engine, pydoc_text(first=i * 4), QUESTION, args.tokens)
                prepare(node, peer, tokens, schemes)
                rows, outcomes = {}, {}
                if i == 0:  # nothing is timed the first time it runs
                    for scheme in schemes:
                        run_scheme(node, peer, tokens, scheme, replace(params, max_tokens=3))
                for k in range(len(schemes)):
                    scheme = schemes[(i + k) % len(schemes)]
                    rows[scheme.name], outcomes[scheme.name] = run_scheme(node, peer, tokens, scheme, params)
                same = equals_plain(engine, peer, tokens, SCHEMES["lynx"], params, outcomes["lynx"])
                equal &= same
                results.append({"rows": {n: r.plain() for n, r in rows.items()}, **ratios(rows), "equal": same})
                lynx = rows["lynx"]
                console.print(
                    f"[dim]prompt {i}: {lynx.accepted} of {lynx.drafted} drafts kept, "
                    + ", ".join(f"{key} {value:.3f}" for key, value in ratios(rows).items())
                    + f", equal {same}[/dim]"
                )
    medians = {key: statistics.median(float(r[key]) for r in results) for key in BARS}
    ok = equal and len(results) >= 10 and all(medians[key] <= bar for key, bar in BARS.items())
    if args.json:
        print(json.dumps({"prompts": results, "medians": medians, "bars": BARS, "equal": equal, "ok": ok}))
    else:
        table = Table(title=f"{args.model}, {args.tokens} tokens, link {args.link}, {len(results)} prompts")
        for heading in ("lynx against", "median", "least", "most", "bar"):
            table.add_column(heading, justify="left" if heading == "lynx against" else "right")
        for key, bar in BARS.items():
            values = [float(r[key]) for r in results]
            table.add_row(key, f"{medians[key]:.3f}", f"{min(values):.3f}", f"{max(values):.3f}", f"≤ {bar}")
        times = Table(title="medians of each scheme, seconds")
        for heading in ("scheme", "MB", "TTFT prefill", "TTFT draft", "TTFT verified", "TTKT(32)", "drafted", "kept"):
            times.add_column(heading, justify="left" if heading == "scheme" else "right")
        for name in args.schemes:
            mid = {k: statistics.median(r["rows"][name][k] for r in results) for k in MEDIANS}
            times.add_row(name, f"{mid.pop('bytes') / 1e6:.1f}", *(f"{value:.2f}" for value in mid.values()))
        Console().print(times, table, f"equal to plain decoding: {equal}", "ok" if ok else "MISSED")
    return 0 if ok else 1


MEDIANS = ("bytes", "ttft_prefill_s", "ttft_draft_s", "ttft_verified_s", "ttkt32_s", "drafted", "accepted")

if __name__ == "__main__":
    sys.exit(main())

"""An answer drafted on the anchor and verified on the target is plain decoding's on that target.

The other side of every comparison is `lynxkv.bench.oracle`: a loop of its own on transformers' growing cache.
"""

from dataclasses import dataclass
from itertools import product

import pytest

from lynxkv.bench.oracle import plain_answer
from lynxkv.codec import Bits, CodecSpec
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import SamplingParams
from models import CONFIGS, engine, model, prompt
from node.running import finish, prefill_node

RATES = {"gqa-64": 1_500_000, "mqa-80": 900_000, "mha-96": 3_000_000, "sliding-mqa": 500_000}
"""Bytes a second at which the residual takes some draft steps."""

TOKENS = 354  # more than 3 windows of the sliding layers, which then hold a whole block
CAP = 24
SPEC = CodecSpec()
SAMPLING = {
    "greedy": SamplingParams(max_tokens=36, seed=0),
    "sampled": SamplingParams(max_tokens=36, temperature=1.0, seed=7),
    "shaped": SamplingParams(
        max_tokens=36,
        temperature=0.9,
        top_k=60,
        top_p=0.97,
        min_p=0.01,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=((3, 1.5), (5, -100.0)),
        min_tokens=9,
        seed=1 << 60,
    ),
    "endless": SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True),
}


@dataclass(frozen=True)
class Case:
    sampling: str
    seed: int
    verify: str


def answers(eng, name, cases, spec=SPEC):
    """Per case what lynx and what plain decoding say; and (drafted, accepted) of every window."""
    ours, plain, windows = {}, {}, []
    with prefill_node(eng, rate=RATES[name], chunk=128) as run, DecodeNode(eng) as node:
        for case in cases:
            tokens, params = tuple(prompt(TOKENS, case.seed)), SAMPLING[case.sampling]
            request = Request(tokens, params, spec=spec, verify=case.verify, cap=CAP)
            _, outcome = finish(node.generate(run.address, request))
            ours[case] = (outcome.tokens, outcome.finish)
            plain[case] = plain_answer(eng, run.address, tokens, spec, params)
            windows.append((outcome.drafted, outcome.accepted))
    return ours, plain, windows


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_answers_are_plain_decodings_with_right_and_with_wrong_drafts(name):
    cases = [Case(*c, "batched") for c in product(("greedy", "sampled", "shaped"), (0, 1))]
    cases += [Case("greedy", 2, "stepwise"), Case("sampled", 2, "stepwise")]
    ours, plain, windows = answers(engine(name), name, cases)
    assert ours == plain
    assert sum(accepted for _, accepted in windows) > 0
    assert sum(drafted - accepted for drafted, accepted in windows) > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_answers_verified_stepwise_are_plain_decodings(name):
    cases = [Case(sampling, 1, "stepwise") for sampling in ("greedy", "sampled")]
    ours, plain, _ = answers(engine(name, dtype="bfloat16"), name, cases)
    assert ours == plain


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_answers_from_other_kv_dtypes_are_plain_decodings(kv_dtype):
    ours, plain, _ = answers(engine("gqa-64", kv_dtype=kv_dtype), "gqa-64", [Case("sampled", 0, "batched")])
    assert ours == plain


def test_answers_of_specs_without_residual_and_with_uneven_bits_are_plain_decodings():
    eng, case = engine("gqa-64"), Case("sampled", 1, "batched")
    for spec in (
        CodecSpec(raw=True),
        CodecSpec(Bits(8, 0), Bits(8, 0), sinks=0, recent=0),
        CodecSpec(Bits(3, 5), Bits(2, 3)),
        CodecSpec(Bits(4, 4), Bits(5, 0)),
    ):
        ours, plain, _ = answers(eng, "gqa-64", [case], spec)
        assert ours == plain


def test_end_tokens_end_the_answer_where_plain_decoding_ends_it():
    eng = TransformersEngine(model("gqa-64"), None)
    eng.eos = frozenset(range(0, 199, 17))
    ours, plain, _ = answers(eng, "gqa-64", [Case("sampled", seed, "batched") for seed in range(4)])
    assert ours == plain
    assert "stop" in {finish for _, finish in ours.values()}


def test_end_tokens_that_are_ignored_are_tokens_like_others():
    eng = TransformersEngine(model("gqa-64"), None)
    eng.eos = frozenset(range(199))
    ours, plain, _ = answers(eng, "gqa-64", [Case("endless", 0, "batched")])
    assert ours == plain
    assert {finish for _, finish in ours.values()} == {"length"}


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 63, 64, 65, 95, 96])
def test_no_token_of_a_prompt_is_dropped_at_any_length(tokens):
    """Field report 6: the answer on the raw KV is the one of a prefill without any transfer."""
    eng, params = engine("sliding-mqa", kv_dtype="float32"), SamplingParams(max_tokens=8)
    ids = prompt(tokens, seed=tokens)
    with prefill_node(eng, chunk=64) as run, DecodeNode(eng) as node:
        _, outcome = finish(node.generate(run.address, Request(tuple(ids), params, spec=CodecSpec(raw=True))))
    session = eng.open(tokens + 8, 64)
    for start in range(0, tokens, 64):
        rows = session.forward(ids[start : start + 64])
    local = [int(rows[-1].argmax())]
    while len(local) < 8:
        local.append(int(session.forward([local[-1]])[0].argmax()))
    assert outcome.tokens == local


def test_samples_of_one_prompt_differ_and_each_is_plain_decodings():
    """Field report 13: n > 1."""
    eng = engine("mqa-80")
    tokens = tuple(prompt(TOKENS))
    seen = set()
    with prefill_node(eng, rate=2 * RATES["mqa-80"], chunk=128) as run, DecodeNode(eng) as node:
        for sample in range(3):
            params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, sample=sample)
            _, outcome = finish(node.generate(run.address, Request(tokens, params, cap=CAP)))
            assert (outcome.tokens, outcome.finish) == plain_answer(eng, run.address, tokens, CodecSpec(), params)
            seen.add(tuple(outcome.tokens))
    assert len(seen) == 3

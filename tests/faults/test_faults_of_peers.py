"""Peers that run another model, send another prompt's KV, or refuse."""

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from lynxkv.codec import Bits, CodecSpec, LayerBits
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.errors import HandshakeRefused, ProtocolError, RequestError, TransferRejected
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import SamplingParams
from lynxkv.wire import FirstToken, token_digest
from models import CONFIGS, _llama, _sliding, engine, prompt
from node.running import Asked, finish, prefill_node
from node.slow import SlowEngine

NAME = "gqa-64"


def request(tokens=200, **changes):
    return Request(tuple(prompt(tokens)), SamplingParams(max_tokens=4), **changes)


def made(config, seed=0, **options):
    torch.manual_seed(seed)
    return TransformersEngine(AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, **options)


def narrow():
    config = _sliding()
    config.sliding_window = 64
    return config


DIFFERENT = {
    "weights": (NAME, lambda: made(CONFIGS[NAME](), seed=1), "weights", None),
    "kv dtype": (NAME, lambda: engine(NAME, kv_dtype="float16"), "dtype", ("bfloat16", "float16")),
    "rope": (
        NAME,
        lambda: made(_llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
        "rope",
        ("10000", "500"),
    ),
    "layers": (NAME, lambda: made(_llama(num_hidden_layers=2)), "layers", ("3", "2")),
    "kv heads": (NAME, lambda: made(_llama(num_key_value_heads=4)), "kv_heads", ("2", "4")),
    "head dims": (NAME, lambda: made(_llama(head_dim=32)), "head_dims", ("64", "32")),
    "windows": ("sliding-mqa", lambda: made(narrow()), "windows", ("100", "64")),
    "architecture": (NAME, lambda: engine("sliding-mqa"), "architecture", ("llama", "gemma3_text")),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_model_that_differs_is_refused_by_field_and_both_values(what):
    """Field reports 7, 8 and 9; a loss to be recomputed it is not."""
    name, other, field, values = DIFFERENT[what]
    with prefill_node(engine(name)) as run, DecodeNode(other()) as node:
        with pytest.raises(HandshakeRefused) as refused:
            finish(node.generate(run.address, request(on_loss="recompute")))
        assert run.idle()
    assert field in str(refused.value)
    for value in values or ():
        assert value in str(refused.value)


def test_compute_dtypes_may_differ_where_the_kv_dtype_is_one():
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME, dtype="bfloat16")) as node:
        assert finish(node.generate(run.address, request()))[1].finish == "length"


def test_another_prompts_kv_is_refused_and_the_prefill_side_is_told_why(monkeypatch, caplog):
    """Field reports 1 and 5."""
    caplog.set_level("INFO", "lynxkv.transport")
    monkeypatch.setattr("lynxkv.node.prefill.token_digest", lambda _: token_digest(b"some"))
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME)) as node:
        with pytest.raises(ProtocolError, match="token digest differs"):
            finish(node.generate(run.address, request()))
        assert run.idle()
    assert "lease ended, rejected token digest differs" in caplog.text


def test_kv_of_another_spec_is_refused_and_the_prefill_side_is_told(caplog):
    """Field reports 1 and 5."""
    caplog.set_level("INFO", "lynxkv.transport")
    eng = engine(NAME)
    with prefill_node(eng) as run, DecodeNode(eng) as node:
        entry_of = run.node._entry

        async def other(admit):
            return await entry_of(msgspec.structs.replace(admit, spec=CodecSpec(Bits(3, 5), Bits(3, 5))))

        run.node._entry = other
        with pytest.raises(ProtocolError, match="codec spec differs"):
            finish(node.generate(run.address, request()))
        assert run.idle()
    assert "lease ended, rejected codec spec differs" in caplog.text


def test_a_request_that_ends_with_token_1_tells_the_prefill_side():
    """Field report 5: the KV is not needed at all."""
    with prefill_node(engine(NAME), rate=20_000) as run, DecodeNode(engine(NAME)) as node:
        wanted = Request(tuple(prompt(300)), SamplingParams(max_tokens=1))
        outcome = finish(node.generate(run.address, wanted))[1]
        assert len(outcome.tokens) == 1
        assert run.idle()  # long before 300 tokens have crossed that link


def test_a_prompt_the_peer_cannot_run_is_refused_with_its_reason():
    eng = engine(NAME)
    small = SlowEngine(eng)
    small.check_prompt = lambda _: (_ for _ in ()).throw(RequestError("this node takes no such prompt"))
    with prefill_node(small) as run, DecodeNode(eng) as node:
        with pytest.raises(RequestError, match="this node takes no such prompt"):
            finish(node.generate(run.address, request(on_loss="recompute")))
        assert run.idle()


def test_a_spec_that_names_a_layer_that_is_not_there_is_refused():
    eng = engine(NAME)
    spec = CodecSpec(overrides=(LayerBits(9, Bits(), Bits()),))
    with prefill_node(eng) as run, DecodeNode(eng) as node:
        with pytest.raises(TransferRejected, match="layer 9"):
            finish(node.generate(run.address, request(spec=spec)))
        assert run.idle()


def test_a_prefill_that_breaks_tells_everyone_who_waits():
    """Field report 3."""
    slow = SlowEngine(engine(NAME), chunks=1)
    with prefill_node(slow, chunk=64) as run, DecodeNode(engine(NAME)) as one, DecodeNode(engine(NAME)) as two:

        def broken():
            if slow.go.is_set():
                raise RuntimeError("out of memory, say")

        slow.between = broken
        asked = [Asked(node.generate(run.address, request(on_loss="recompute"))) for node in (one, two)]
        run.until(lambda: run.node.server.counters().deliveries == 2)
        slow.go.set()
        for each in asked:
            with pytest.raises(Exception, match="RuntimeError: out of memory, say"):
                each.outcome()
        assert run.idle()
        slow.between = lambda: None
        assert finish(one.generate(run.address, request()))[1].finish == "length"


@pytest.mark.parametrize("change", [{"token": 10**6}, {"seed": 12345}])
def test_a_token_1_this_request_cannot_have_drawn_is_refused(change, monkeypatch):
    """Field report 1."""
    monkeypatch.setattr("lynxkv.node.prefill.FirstToken", lambda **fields: FirstToken(**{**fields, **change}))
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME)) as node:
        with pytest.raises(ProtocolError, match=r"token 1 of 0\.\.198"):
            finish(node.generate(run.address, request()))
        assert run.idle()


def test_a_closed_node_and_tokens_that_are_text_are_refused_in_one_line():
    node = DecodeNode(engine(NAME))
    node.close()
    with pytest.raises(RequestError, match="closed"):
        node.generate(("127.0.0.1", 1), request())
    for tokens in (("a",), (1.5,)):
        with pytest.raises(RequestError, match="integers"):
            Request(tokens)

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    DeepseekV3Config,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
)

from lynxkv.codec import Kind
from lynxkv.engine import models as model_names
from lynxkv.engine.identity import weights_identity
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.errors import EngineError, PromptTooLong, RequestError, UnknownModel, UnsupportedModel
from models import CONFIGS, VOCAB, dynamic_logits, engine, model, prompt


def _chunks(tokens, sizes):
    edges = np.cumsum([0, *sizes])
    return [tokens[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_buffers_give_the_logits_of_the_growing_cache_bit_for_bit(name, dtype):
    sizes = [128, 128, 20, 1, 1, 1, 7, 1, 1]
    chunks = _chunks(prompt(sum(sizes)), sizes)
    session = engine(name, dtype).open(sum(sizes), 128)
    for chunk, expected in zip(chunks, dynamic_logits(name, chunks, getattr(torch, dtype)), strict=True):
        np.testing.assert_array_equal(session.forward(chunk), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_truncated_leaves_no_trace(name):
    tokens = prompt(300)
    eng = engine(name)
    clean, cut = eng.open(400, 128), eng.open(400, 128)
    for session in (clean, cut):
        for chunk in _chunks(tokens, [128, 128, 44]):
            session.forward(chunk)
    for token in prompt(65, seed=9):
        cut.forward([token])
    cut.truncate(300)
    assert cut.length == 300
    np.testing.assert_array_equal(cut.forward([5, 6, 7]), clean.forward([5, 6, 7]))


def test_sliding_layers_hold_a_window_and_a_chunk_and_no_more():
    session = engine("sliding-mqa").open(1000, 65)
    rows = [layer.capacity for layer in session._buffers.layers]
    assert rows == [99 + 65, 1000, 99 + 65, 99 + 65]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bytes_of_a_session_are_known_before_it_is_opened(name):
    eng = engine(name)
    assert eng.session_bytes(700, 65) == eng.open(700, 65).nbytes


def test_kv_moves_to_another_session_and_decoding_goes_on_as_before():
    eng = engine("sliding-mqa", kv_dtype="float32")
    tokens = prompt(301)
    source, target = eng.open(400, 128), eng.open(400, 65)
    for chunk in _chunks(tokens, [128, 128, 44]):
        source.forward(chunk)
    shape = eng.shape(300)
    target.place(shape)
    for i, layer in enumerate(shape.layers):
        for kind in Kind:
            with target.writing(i, kind, layer.start, layer.stop) as rows:
                rows[:] = source.read(i, kind, layer.start, layer.stop)
    np.testing.assert_array_equal(target.forward(tokens[300:]), source.forward(tokens[300:]))


def test_prompt_kv_keeps_its_address_while_tokens_are_appended():
    session = engine("sliding-mqa").open(400, 65)
    session.place(engine("sliding-mqa").shape(300))
    before = [layer.keys.data_ptr() for layer in session._buffers.layers]
    with session.writing(0, Kind.K, 201, 300) as rows:
        rows[:] = 1.0
    session.forward([3] * 65)
    assert [layer.keys.data_ptr() for layer in session._buffers.layers] == before
    assert np.all(session.read(0, Kind.K, 201, 300) == 0x3F80)


def test_prefill_chunks_and_one_pass_give_the_same_kv_to_rounding():
    eng = engine("gqa-64")
    tokens = prompt(200)
    *_, (done, chunked, _) = eng.prefill(tokens, 64)
    *_, (_, whole, _) = eng.prefill(tokens, 200)
    assert done == 200
    a, b = (s.read(2, Kind.V, 0, 200).astype(np.uint32) << 16 for s in (chunked, whole))
    np.testing.assert_allclose(a.view(np.float32), b.view(np.float32), rtol=0.02, atol=0.02)


def test_handed_over_kv_is_the_compute_value_rounded_once():
    eng = engine("gqa-64")
    *_, (_, session, _) = eng.prefill(prompt(70), 64)
    kept = session._buffers.layers[1].keys[0, :, :70]
    expected = kept.to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(session.read(1, Kind.K, 0, 70), expected)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (lambda: MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4), "mamba"),
        (
            lambda: DeepseekV3Config(
                vocab_size=32,
                hidden_size=32,
                intermediate_size=32,
                moe_intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                n_routed_experts=2,
                num_experts_per_tok=1,
                n_group=1,
                topk_group=1,
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=8,
            ),
            "MLA",
        ),
    ],
)
def test_models_whose_cache_is_not_k_and_v_are_refused_by_name(config, word, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=word):
        TransformersEngine.load(str(tmp_path))


def test_a_saved_folder_loads_and_text_without_a_tokenizer_is_refused(tmp_path):
    model("gqa-64").save_pretrained(tmp_path)
    loaded = TransformersEngine.load(str(tmp_path))
    assert loaded.fingerprint == engine("gqa-64").fingerprint
    with pytest.raises(EngineError, match="no tokenizer"):
        loaded.encode("text")


def test_an_empty_or_broken_folder_is_an_unknown_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnknownModel):
        TransformersEngine.load(str(tmp_path))


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "./missing/folder", ""])
def test_an_unknown_alias_names_the_known_ones(name):
    with pytest.raises(UnknownModel, match="smollm2-135m"):
        model_names.resolve(name)


def test_an_alias_whose_package_is_missing_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("LYNXKV_CACHE", str(tmp_path))
    monkeypatch.setitem(model_names.ALIASES, "gone", model_names.Packaged(("no_such_pkg",), "*", "pip install x"))
    with pytest.raises(UnknownModel, match="pip install x"):
        model_names.resolve("gone")


def test_prompts_beyond_the_context_and_tokens_beyond_the_vocabulary_are_refused():
    eng = engine("gqa-64")
    with pytest.raises(PromptTooLong, match=r"2048.*2049"):
        next(eng.prefill([1] * 2049, 64))
    with pytest.raises(PromptTooLong, match=r"2048.*2000 of prompt and 49"):
        eng.check_prompt([1] * 2000, 49)
    with pytest.raises(RequestError, match="got none"):
        next(eng.prefill([], 64))
    with pytest.raises(RequestError, match=str(VOCAB)):
        next(eng.prefill([VOCAB], 64))


def test_fingerprints_differ_when_weights_or_kv_dtype_differ_and_not_with_compute_dtype():
    ours = engine("gqa-64").fingerprint
    assert ours.weights != engine("gqa-64", seed=1).fingerprint.weights
    assert ours.dtype != engine("gqa-64", kv_dtype="float32").fingerprint.dtype
    rope = LlamaConfig(rope_theta=5.0).rope_parameters
    assert ours.rope != str(rope)


def test_compute_and_kv_dtypes_that_do_not_fit_are_refused():
    with pytest.raises(RequestError, match="float16"):
        TransformersEngine(model("gqa-64", torch.bfloat16), None, kv_dtype="float16")
    with pytest.raises(RequestError, match="int4"):
        TransformersEngine(model("gqa-64"), None, kv_dtype="int4")


def test_a_model_that_fails_on_a_kv_cache_is_refused_by_name():
    """Its config counts the encoder's layers, its decoder has more."""
    config = BartConfig(vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=32)
    with pytest.raises(UnsupportedModel, match="bart does not run on a cache of K and V"):
        TransformersEngine(AutoModelForCausalLM.from_config(config), None)


def test_an_encoder_is_refused_by_name_until_it_is_made_a_decoder():
    options = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with pytest.raises(UnsupportedModel, match="bert is an encoder"):
        TransformersEngine(AutoModelForCausalLM.from_config(BertConfig(**options)), None, kv_dtype="float32")
    decoder = AutoModelForCausalLM.from_config(BertConfig(**options, is_decoder=True))
    assert len(TransformersEngine(decoder, None, kv_dtype="float32").layers) == 2


def test_a_longrope_context_ends_where_its_factors_change():
    """Beyond, a window in one pass and a token at a time are rotated by different factors."""
    config = Phi3Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
        },
    )
    eng = TransformersEngine(AutoModelForCausalLM.from_config(config), None, kv_dtype="float32")
    assert eng.context == 64
    with pytest.raises(PromptTooLong):
        eng.check_prompt([1] * 60, 5)


def test_a_sliding_layer_is_never_cut_to_where_its_window_is_gone():
    session = engine("sliding-mqa").open(400, 8)
    session.place(engine("sliding-mqa").shape(300))
    for token in prompt(9):
        session.forward([token])
    with pytest.raises(AssertionError, match="row 202 must be there"):
        session.truncate(301)


def test_a_checkpoint_cut_short_or_without_some_weights_is_refused(tmp_path):
    model("gqa-64").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(UnknownModel, match=r"9 weights are not in its files, model\.layers\.3\.input_layernorm"):
        TransformersEngine.load(str(tmp_path))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnknownModel, match="could not be loaded"):
        TransformersEngine.load(str(tmp_path))


def test_a_fine_tune_of_one_row_is_another_model():
    config = LlamaConfig(vocab_size=4000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    tuned = AutoModelForCausalLM.from_config(config)
    before = weights_identity(tuned)
    with torch.no_grad():
        tuned.get_input_embeddings().weight[1234, 5:9] *= -1
    assert weights_identity(tuned) != before

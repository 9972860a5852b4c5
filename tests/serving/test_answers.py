"""What a client gets of a cluster in this process."""

from dataclasses import replace

import pytest

from lynxkv.codec import CodecSpec
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import SamplingParams
from serving.apps import MODEL, Stream, ask, cluster, events

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TEXT = "the quick brown fox jumps over the lazy dog and another one " * 5


@pytest.fixture(scope="module")
def run(eng):
    with cluster(eng) as running:
        yield running
        running.empties()


@pytest.fixture(scope="module")
def slow(eng):
    """Behind a slow link: there is time to draft."""
    with cluster(eng, prefill={"rate": 400_000}) as running:
        yield running
        running.empties()


@pytest.fixture(scope="module")
def alone(run, eng):
    """What one node alone answers: ``alone(params, spec)`` for TEXT as it stands."""
    node = DecodeNode(eng)

    def answer(params, spec=None):
        request = Request(tuple(eng.encode(TEXT)), params, spec=spec or CodecSpec(), cap=0)
        generation = node.generate(run.prefill.kv, request)
        list(generation)
        return generation.outcome

    yield answer
    node.close()


def complete(running, **body):
    status, _, answer = ask(running.url, COMPLETE, {"model": MODEL, "prompt": TEXT, "temperature": 0, **body})
    assert status == 200, answer
    return answer


def test_an_answer_is_the_one_a_node_gives_and_says_what_it_took(run, alone):
    answer = complete(run, max_tokens=12, return_token_ids=True)
    right = alone(SamplingParams(max_tokens=12))
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == (right.tokens, right.text, "length")
    assert answer["usage"] == {"prompt_tokens": len(TEXT), "completion_tokens": 12, "total_tokens": len(TEXT) + 12}
    lynx = answer["lynx"]
    assert lynx["target"] == "residual"
    assert lynx["on_loss"] is None
    assert lynx["bytes"]["anchor"] > lynx["bytes"]["residual"] > 0
    assert 0 < lynx["ttft_prefill_s"] <= lynx["ttft_draft_s"] <= lynx["ttft_verified_s"] <= lynx["times"]["end_s"]
    assert len(lynx["transfer_id"]) == 32
    assert lynx["prefill_worker"].startswith("prefill-0")
    assert lynx["decode_worker"] == "decode-0"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}])
def test_a_seed_gives_the_same_answer_and_is_told(run, alone, sampling):
    answer = complete(run, max_tokens=10, return_token_ids=True, **sampling)
    right = alone(SamplingParams(max_tokens=10, **{"temperature": 0.0, **sampling}))
    assert answer["choices"][0]["token_ids"] == right.tokens
    if sampling:
        assert answer["lynx"]["seed"] == 3


def test_an_unseeded_answer_can_be_had_again_with_the_seed_it_tells(run):
    first = complete(run, max_tokens=10, temperature=1.0)
    again = complete(run, max_tokens=10, temperature=1.0, seed=first["lynx"]["seed"])
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_choices_of_one_request_are_samples_of_their_own(run, alone):
    answer = complete(run, n=3, max_tokens=8, temperature=1.0, seed=5, return_token_ids=True)
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    right = [alone(replace(params, sample=i)).tokens for i in range(3)]
    assert [choice["token_ids"] for choice in answer["choices"]] == right
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(answer["lynx"]) == 3
    assert answer["usage"]["completion_tokens"] == 24


def test_a_stream_says_what_the_whole_answer_says(run):
    body = {"max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 8, "logprobs": 2, "return_token_ids": True}
    body["lynx"] = {"verify": "stepwise"}  # in one pass logprobs are rounded as its length goes
    whole = complete(run, **body)
    asked = {"model": MODEL, "prompt": TEXT, **body, "stream": True, "stream_options": {"include_usage": True}}
    status, headers, content = ask(run.url, COMPLETE, asked)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = [data for _, data in events(content)]
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    assert usage["choices"] == []
    assert len(usage["lynx"]) == 2
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for part in parts for value in part["logprobs"][name]] == choice["logprobs"][name]


def test_logprobs_of_a_chat_come_with_every_token(run):
    body = run.chat(TEXT, max_tokens=5, logprobs=True, top_logprobs=3)
    _, _, answer = ask(run.url, CHAT, body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for entry in content:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy: the likeliest
        assert len(entry["top_logprobs"]) == 3
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_a_stop_string_ends_the_answer_before_it(run):
    text = complete(run, max_tokens=24)["choices"][0]["text"]
    stop = text[6:9]
    choice = complete(run, max_tokens=24, stop=[stop])["choices"][0]
    assert choice["text"] == text[: text.find(stop)]
    assert choice["finish_reason"] == "stop"


def test_the_exact_target_has_no_drafts_and_the_kv_as_it_is(run, alone):
    answer = complete(run, max_tokens=8, return_token_ids=True, lynx={"target": "exact"})
    assert answer["lynx"]["target"] == "exact"
    assert answer["lynx"]["drafted"] == 0
    assert answer["choices"][0]["token_ids"] == alone(SamplingParams(max_tokens=8), CodecSpec(raw=True)).tokens


def test_token_ids_are_a_prompt(run, eng):
    ids = eng.encode(TEXT)
    assert complete(run, prompt=ids, max_tokens=6)["choices"] == complete(run, max_tokens=6)["choices"]
    assert complete(run, prompt=[ids], max_tokens=6)["choices"] == complete(run, max_tokens=6)["choices"]


def test_drafts_are_apart_from_content_and_can_be_put_together(slow):
    """As a client does that shows them: tentative text behind the verified one, until that takes its place."""
    body = slow.chat(TEXT * 2, max_tokens=40, temperature=1.0, seed=1, lynx={"emit": "draft", "cap": 12})
    stream = Stream(slow.url, CHAT, body)
    assert stream.begin() == 200
    verified, tentative, drafted, retracted = "", "", 0, 0
    *chunks, done = [data for _, data in stream.rest()]
    assert done == "[DONE]"
    for chunk in chunks:
        lynx = chunk.get("lynx", {})
        delta = chunk["choices"][0]["delta"]
        if lynx.get("event") == "draft":
            assert delta == {}
            assert lynx["index"] == len(verified) + len(tentative)
            tentative += lynx["text"]
            drafted += 1
        elif lynx.get("event") == "retract":
            assert delta == {}
            tentative = tentative[: lynx["index"] - len(verified)]
            retracted += 1
        else:
            content = delta["content"]
            assert tentative.startswith(content) or content.startswith(tentative)
            verified, tentative = verified + content, tentative[len(content) :]
    final = chunks[-1]["lynx"]
    _, _, whole = ask(slow.url, CHAT, body | {"lynx": {"cap": 0}})
    assert verified == whole["choices"][0]["message"]["content"]
    assert drafted == final["drafted"] > 0
    assert retracted == (final["accepted"] < final["drafted"])


def test_only_verified_text_is_content_by_default(slow):
    stream = Stream(slow.url, CHAT, slow.chat(TEXT * 2, max_tokens=12))
    assert stream.begin() == 200
    assert not [data for _, data in stream.rest() if data != "[DONE]" and "event" in data.get("lynx", {})]


def test_vllms_order_gives_the_same_answer(run, eng):
    right = complete(run, max_tokens=9)
    with cluster(eng, router={"sequential": True}) as sequential:
        assert complete(sequential, max_tokens=9)["choices"] == right["choices"]


def test_a_chat_without_a_limit_ends_with_the_context(run, eng):
    _, _, answer = ask(run.url, CHAT, run.chat("x" * 1000))
    assert answer["usage"]["total_tokens"] == eng.context
    assert answer["choices"][0]["finish_reason"] == "length"


def test_models_are_listed_and_others_are_not_found(run, eng):
    _, _, models = ask(run.url, "/v1/models")
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL, eng.context)]
    assert ask(run.url, f"/v1/models/{MODEL}")[0] == 200
    for status, _, told in (
        ask(run.url, "/v1/models/gpt"),
        ask(run.url, CHAT, run.chat() | {"model": "gpt"}),
    ):
        assert (status, told["error"]["code"], told["error"]["param"]) == (404, "model_not_found", "model")


def test_the_state_shows_what_happened_and_no_text(run):
    secret = "a secret that nobody else is told"
    _, headers, answer = ask(run.url, CHAT, run.chat(secret * 10, max_tokens=4))
    _, _, shown = ask(run.url, "/lynx/state")
    (request,) = [r for r in shown["requests"] if r["id"] == headers["x-request-id"]]
    happened = [moment["what"] for moment in request["moments"]]
    assert [what for what in happened if what in ("prefill", "first_token", "anchor", "target", "finished")][-1] == (
        "finished"
    )
    assert {"queued", "prefill", "first_token", "manifest", "segment", "anchor", "target"} <= set(happened)
    assert request["bytes"] == {k: v for k, v in answer["lynx"]["bytes"].items() if v}
    assert request["transfer_id"] == answer["lynx"]["transfer_id"]
    assert request["state"] == "finished"
    assert secret not in str(shown)

"""What a request may say: understood, ignored, or refused by name."""

import json

import pytest

from lynxkv.serving.ask import read
from lynxkv.serving.errors import Refusal


def chat(**fields):
    return read("chat", json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode())


def complete(**fields):
    return read("completion", json.dumps({"prompt": "Hi", **fields}).encode())


def test_openais_defaults_hold():
    assert (chat().params.temperature, chat().n, chat().stream) == (1.0, 1, False)
    assert complete().params.max_tokens == 16
    assert chat().max_tokens is None


def test_the_names_of_openai_and_vllm_are_understood():
    asked = chat(
        max_completion_tokens=7, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=3, stop="a", n=2,
        presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"5": -100}, logprobs=True,
        top_logprobs=4, min_tokens=2, ignore_eos=True, lynx={"emit": "draft", "cap": 3},
    )  # fmt: skip
    params = asked.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (7, 0.5, 0.9, 0, 0.1)
    assert (params.seed, params.stop, asked.n, params.logit_bias) == (3, ("a",), 2, ((5, -100.0),))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert (params.logprobs, params.min_tokens, params.ignore_eos) == (4, 2, True)
    assert (asked.lynx.emit, asked.lynx.cap, asked.lynx.target) == ("draft", 3, "residual")


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"foo": None},
    ],
)
def test_what_does_not_change_an_answer_is_taken(harmless):
    assert chat(**harmless).n == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"lynx": {"emit": "both"}}, "lynx.emit"),
        ({"lynx": {"deadline_s": 0}}, "lynx.deadline_s"),
        ({"lynx": {"speed": 2}}, "lynx"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, param):
    with pytest.raises(Refusal) as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_a_completion_cannot_be_is_refused_by_name(fields, param):
    with pytest.raises(Refusal) as refused:
        complete(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"messages": ' + b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(Refusal):
        read("chat", body)


def test_parts_of_text_and_an_earlier_answer_are_turns():
    turns = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        ]
    ).prompt
    assert turns == ({"role": "system", "content": "ab"}, {"role": "assistant", "content": "c"})

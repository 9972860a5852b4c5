"""The official client, as its users use it."""

import openai
import pytest

from lynxkv.errors import PeerLost
from serving.apps import MODEL, cluster

TEXT = "the quick brown fox jumps over the lazy dog and another one " * 5
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}
CHAT = {**GREEDY, "messages": [{"role": "user", "content": TEXT}]}


@pytest.fixture(scope="module")
def run(eng):
    with cluster(eng) as running:
        yield running
        running.empties()


@pytest.fixture
def client(run):
    with openai.OpenAI(base_url=f"{run.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_chat_is_answered(client):
    answer = client.chat.completions.create(**CHAT)
    choice = answer.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.id.startswith("chatcmpl-")
    assert answer.model_extra["lynx"]["target"] == "residual"


def test_a_chat_stream_says_what_the_whole_answer_says(client):
    whole = client.chat.completions.create(**CHAT).choices[0].message.content
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == whole
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 12


def test_a_client_that_knows_nothing_of_drafts_reads_the_right_answer_among_them(client):
    whole = client.chat.completions.create(**CHAT).choices[0].message.content
    stream = client.chat.completions.create(**CHAT, stream=True, extra_body={"lynx": {"emit": "draft", "cap": 8}})
    assert "".join(c.delta.content or "" for chunk in stream for c in chunk.choices) == whole


def test_a_completion_with_choices_stop_and_logprobs(client):
    answer = client.completions.create(**{**GREEDY, "temperature": 1}, prompt=TEXT, n=2, seed=4, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 12
        assert all(choice.logprobs.top_logprobs)
    stop = answer.choices[0].text[4:6]
    cut = client.completions.create(**{**GREEDY, "temperature": 1}, prompt=TEXT, seed=4, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (answer.choices[0].text.partition(stop)[0], "stop")


def test_models_are_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "invalid_request"),
        ({"model": "another"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "context_length_exceeded"),
    ],
)
def test_a_refusal_raises_the_clients_own_class(client, fields, kind, code):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**CHAT, **fields})
    assert caught.value.code == code


def test_an_error_in_mid_stream_raises_and_is_no_end(run, client, monkeypatch):
    """What came before it was right; the client never takes it for the whole answer."""
    whole = client.chat.completions.create(**CHAT).choices[0].message.content
    generate = run.decode.node.generate

    def failing(peer, request, observe):
        generation = generate(peer, request, observe)
        return Failing(generation, after=4)

    monkeypatch.setattr(run.decode.node, "generate", failing)
    text = ""
    with pytest.raises(openai.APIError) as caught:  # noqa: PT012  # it is raised on the way
        for chunk in client.chat.completions.create(**CHAT, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert (caught.value.code, caught.value.body["type"]) == ("peer_lost", "server_error")
    assert "the cable" in str(caught.value)
    assert text == whole[: len(text)] != ""


def test_an_unknown_key_raises(eng):
    with cluster(eng, router={"tokens": ["right"]}) as run:
        for key, fits in (("wrong", False), ("right", True)):
            with openai.OpenAI(base_url=f"{run.url}/v1", api_key=key, max_retries=0) as client:
                if fits:
                    assert client.chat.completions.create(**CHAT).choices
                else:
                    with pytest.raises(openai.AuthenticationError) as caught:
                        client.chat.completions.create(**CHAT)
                    assert caught.value.code == "invalid_api_key"


class Failing:
    """A generation that is lost after some events."""

    def __init__(self, generation, after):
        self._generation, self._left = generation, after

    def __iter__(self):
        return self

    def __next__(self):
        self._left -= 1
        if self._left < 0:
            self._generation.close()
            raise PeerLost("the cable was cut")
        return next(self._generation)

    def cancel(self, reason):
        self._generation.cancel(reason)

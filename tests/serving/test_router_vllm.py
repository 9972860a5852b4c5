"""The router in front of vLLM's OpenAI servers: what it tells them, what passes it, and which of them it pairs."""

import asyncio
import json
from contextlib import ExitStack, contextmanager

import pytest

from lynxkv.serving import state, upstream
from lynxkv.serving.router import RouterService
from serving.apps import Stream, ask, connect, events, site, until
from serving.stubs import Stub
from serving.vllm_stub import CHUNK, DONE, MODEL, WHERE, WHOLE, VllmStub

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NOWHERE = "http://127.0.0.1:1"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
PROMPT = {"model": MODEL, "prompt": "Hi", "max_tokens": 5}


@pytest.fixture(scope="module")
def where():
    with site() as it:
        yield it


@contextmanager
def routed(where, *stubs, **options):
    """The router's URL and service over ``stubs`` of either kind."""
    with ExitStack() as held:
        urls = {"prefill": [], "decode": []}
        for stub in stubs:
            urls[stub.role].append(held.enter_context(stub.serving(where)))
        service = RouterService(urls["prefill"], urls["decode"], **options)
        yield held.enter_context(where.running(service, state.routes(service))), service


def pair(**options):
    return VllmStub("prefill", **options), VllmStub("decode")


def content(url, path, body):
    """Status and bytes of an answer."""
    connection = connect(url)
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(("path", "body"), [(CHAT, BODY), (COMPLETIONS, PROMPT)])
def test_the_prefill_worker_is_asked_for_one_token_that_another_will_go_on_from(where, path, body):
    prefill, decode = pair()
    more = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "min_tokens": 3}
    with routed(where, prefill, decode) as (url, _):
        assert content(url, path, {**body, **more, "max_completion_tokens": 5})[0] == 200
    (wanted,) = prefill.asked
    params = wanted.pop("kv_transfer_params")
    assert wanted == {**body, "stream": False, "max_tokens": 1, "max_completion_tokens": 1}
    assert len(bytes.fromhex(params.pop("transfer_id"))) == 16
    assert params == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None,
    }  # fmt: skip
    assert (prefill.paths, decode.paths) == ([path], [path])


def test_without_max_completion_tokens_none_is_sent(where):
    prefill, decode = pair()
    with routed(where, prefill, decode) as (url, _):
        assert ask(url, CHAT, BODY)[0] == 200
    assert "max_completion_tokens" not in prefill.asked[0]


def test_the_prefill_workers_params_reach_the_decode_worker_whole(where):
    prefill, decode = pair()
    with routed(where, prefill, decode) as (url, service):
        assert content(url, CHAT, BODY) == (200, WHOLE)
        assert service.activity.requests()[0].transfer == prefill.transfers[0]["transfer_id"]
    (got,) = decode.asked
    assert got.pop("kv_transfer_params") == {**WHERE, "transfer_id": prefill.transfers[0]["transfer_id"]}
    assert got == BODY


def test_unknown_fields_reach_both_workers_as_they_came(where):
    prefill, decode = pair()
    odd = b'"guided": {"x":  [1e3, 99999999999999999999999999, "\\u00e9"]}'
    body = b'{"model": "served", "messages": [{"role": "tool", "content": null}], ' + odd + b"}"
    with routed(where, prefill, decode) as (url, _):
        assert content(url, CHAT, body)[0] == 200
    for stub in (prefill, decode):
        assert b'{"x":  [1e3, 99999999999999999999999999, "\\u00e9"]}' in stub.raw[0]
        assert stub.asked[0]["messages"] == [{"role": "tool", "content": None}]


@pytest.mark.parametrize("given", [{"kv_transfer_params": {"codec": "lynx", "emit": "draft"}}, {"lynx": None}])
def test_a_clients_own_params_reach_both_workers(where, given):
    if not given.get("kv_transfer_params"):
        given = {"lynx": {"codec": "lynx", "emit": "draft", "target": "residual"}}
    prefill, decode = pair()
    with routed(where, prefill, decode) as (url, _):
        assert ask(url, CHAT, {**BODY, **given})[0] == 200
    for stub in (prefill, decode):
        params = stub.transfers[0]
        assert (params["codec"], params["emit"], params.get("target")) == ("lynx", "draft", None)


def test_the_prefill_workers_word_counts_before_the_clients(where):
    prefill, decode = pair(params={"codec": "int4"})
    with routed(where, prefill, decode) as (url, _):
        assert ask(url, CHAT, {**BODY, "kv_transfer_params": {"codec": "lynx"}})[0] == 200
    assert decode.transfers[0]["codec"] == "int4"


@pytest.mark.parametrize("name", ["remote_host", "do_remote_prefill", "transfer_id"])
def test_a_client_cannot_say_where_kv_is(where, name):
    prefill, decode = pair()
    with routed(where, prefill, decode) as (url, _):
        status, _, answer = ask(url, CHAT, {**BODY, "kv_transfer_params": {name: "elsewhere"}})
    assert (status, answer["error"]["param"], prefill.asked) == (400, "kv_transfer_params", [])
    assert name in answer["error"]["message"]


def test_what_only_our_own_workers_can_do_is_refused_by_name(where):
    with routed(where, *pair()) as (url, _):
        status, _, answer = ask(url, CHAT, {**BODY, "lynx": {"target": "exact"}})
    assert (status, answer["error"]["param"]) == (400, "lynx")
    assert "lynx.target" in answer["error"]["message"]


def test_without_params_the_decode_worker_computes_by_itself(where):
    prefill, decode = pair(params=None)
    with routed(where, prefill, decode) as (url, _):
        assert ask(url, CHAT, {**BODY, "kv_transfer_params": {"codec": "lynx"}})[0] == 200
    assert decode.asked == [BODY]


def test_several_prompts_are_no_transfer(where):
    prefill, decode = pair()
    with routed(where, prefill, decode) as (url, _):
        assert ask(url, COMPLETIONS, {**PROMPT, "prompt": ["a", "b"]})[0] == 200
    assert (prefill.asked, decode.asked) == ([], [{**PROMPT, "prompt": ["a", "b"]}])


def test_a_stream_passes_byte_for_byte_and_as_it_is_made(where):
    gate = asyncio.Event()
    prefill, decode = VllmStub("prefill"), VllmStub("decode", gate=gate)
    with routed(where, prefill, decode) as (url, service):
        stream = Stream(url, CHAT, BODY)
        assert stream.begin() == 200
        assert stream.response.read(len(CHUNK)) == CHUNK
        assert service.activity.running == 1
        where.loop.call_soon_threadsafe(gate.set)
        assert stream.response.read() == CHUNK + DONE
        stream.vanish()
        until(lambda: not service.activity.running)
        assert service.activity.requests()[0].state == "finished"
    assert decode.asked[0]["stream"] is True


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_passes_as_it_is(where, role, stream):
    words = b'{"error":  {"message": "no", "type": "BadRequestError", "param": null, "code": 400}}'
    stubs = [VllmStub("prefill"), VllmStub("decode")]
    bad = stubs[role == "decode"]
    bad.status, bad.content = 400, words
    with routed(where, *stubs) as (url, service):
        assert content(url, CHAT, {**BODY, "stream": stream}) == (400, words)
        until(lambda: not service.activity.running)
        assert service.activity.requests()[0].state == "failed"
    assert (len(stubs[0].asked), len(stubs[1].asked)) == (1, role == "decode")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_dead_worker_is_passed_over(where, role):
    dead, *alive = VllmStub(role), VllmStub("prefill"), VllmStub("decode")
    with routed(where, dead, *alive) as (url, service):
        service.fleet.of(role)[0].url = NOWHERE
        assert content(url, CHAT, BODY) == (200, WHOLE)
        assert service.activity.requests()[0].retried == [role]
    assert dead.asked == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_breaks_is_passed_over_under_another_id(where, role):
    bad, prefill, decode = VllmStub(role, status=500, content=b"oops"), VllmStub("prefill"), VllmStub("decode")
    with routed(where, bad, prefill, decode) as (url, _):
        assert content(url, CHAT, BODY) == (200, WHOLE)
    assert len(bad.asked) == 1
    assert bad.transfers[0]["transfer_id"] != decode.transfers[0]["transfer_id"]


def test_a_failure_without_another_worker_is_told(where):
    prefill, decode = pair()
    with routed(where, prefill, decode) as (url, service):
        service.fleet.of("prefill")[0].url = NOWHERE
        told = [ask(url, CHAT, BODY)[0::2] for _ in range(2)]
        assert service.fleet.of("decode")[0].requests == 0
    assert [(status, answer["error"]["code"]) for status, answer in told] == [(502, "peer_lost"), (503, "no_workers")]
    assert decode.asked == []


def test_a_prefill_answer_that_is_none_is_no_answer(where):
    prefill, decode = pair(params="nonsense")
    with routed(where, prefill, decode) as (url, _):
        status, _, answer = ask(url, CHAT, BODY)
    assert (status, answer["error"]["code"], decode.asked) == (502, "protocol_error", [])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_that_vanishes_frees_both_workers(where, role):
    stubs = [VllmStub("prefill"), VllmStub("decode")]
    slow = stubs[role == "decode"]
    slow.gate = asyncio.Event()
    with routed(where, *stubs) as (url, service):
        stream = Stream(url, CHAT, BODY)
        until(lambda: slow.asked)
        stream.vanish()
        until(lambda: slow.gone)
        until(lambda: not service.activity.running)
        assert not any(worker.requests or worker.outstanding for worker in service.fleet.workers)


def test_the_worker_with_the_fewest_requests_is_asked(where):
    """However many tokens the one request is."""
    gate = asyncio.Event()
    decodes = [VllmStub("decode", gate=gate), VllmStub("decode", gate=gate)]
    with routed(where, VllmStub("prefill"), *decodes) as (url, service):
        streams = [Stream(url, CHAT, {**BODY, "max_tokens": 5000})]
        until(lambda: decodes[0].asked)
        for most in (1, 1, 1):
            streams.append(Stream(url, CHAT, {**BODY, "max_tokens": most}))
            until(lambda: sum(len(stub.asked) for stub in decodes) == len(streams))
        assert [worker.requests for worker in service.fleet.of("decode")] == [2, 2]
        where.loop.call_soon_threadsafe(gate.set)
        for stream in streams:
            stream.begin()
            assert stream.response.read().endswith(DONE)
            stream.vanish()


def test_workers_of_two_kinds_are_no_pair(where):
    stubs = VllmStub("prefill"), Stub("decode", model=MODEL)
    with routed(where, *stubs) as (url, _):
        status, _, answer = ask(url, CHAT, BODY)
        assert (status, answer["error"]["code"]) == (503, "no_workers")
        status, _, health = ask(url, "/health")
    assert (status, health["status"]) == (503, "no_workers")
    assert [worker["kind"] for worker in health["workers"]] == ["vllm", "lynxkv"]
    prefill, decode = (worker["url"] for worker in health["workers"])
    assert health["missing"] == [
        f"no prefill worker of kind lynxkv is up for decode worker {decode}",
        f"no decode worker of kind vllm is up for prefill worker {prefill}",
    ]
    assert [stub.asked for stub in stubs] == [[], []]


def test_workers_of_different_models_are_no_pair(where):
    with routed(where, VllmStub("prefill", models=["a"]), VllmStub("decode", models=["b", "c"])) as (url, _):
        status, _, answer = ask(url, CHAT, {**BODY, "model": "b"})
        assert (status, answer["error"]["code"]) == (503, "no_workers")
        _, _, health = ask(url, "/health")
    (missing,) = health["missing"]
    assert "runs a," in missing
    assert "runs b and c" in missing


def test_both_kinds_work_side_by_side_each_for_its_model(where):
    ours, theirs = [Stub("prefill"), Stub("decode")], [VllmStub("prefill"), VllmStub("decode")]
    with routed(where, *ours, *theirs) as (url, _):
        assert ask(url, CHAT, {**BODY, "model": "stub"})[0] == 200
        assert content(url, CHAT, {**BODY, "tools": [{"type": "function"}]}) == (200, WHOLE)
        status, _, answer = ask(url, CHAT, {**BODY, "model": "stub", "tools": [{"type": "function"}]})
        assert (status, answer["error"]["param"]) == (400, "tools")
        _, _, told = ask(url, "/v1/models")
        assert [(model["id"], model["max_model_len"]) for model in told["data"]] == [("stub", 100), (MODEL, 4096)]
        assert ask(url, "/health")[2]["missing"] == []
        assert ask(url, "/lynx/state")[0] == 200
    assert [len(stub.asked) for stub in (*ours, *theirs)] == [1, 1, 1, 1]


def test_a_worker_that_comes_up_later_is_found(where, monkeypatch):
    monkeypatch.setattr(upstream, "POLL_S", 0.02)
    prefill, decode = pair()
    with routed(where, prefill, decode) as (url, service):
        worker = service.fleet.of("decode")[0]
        there, worker.url = worker.url, NOWHERE
        until(lambda: not worker.up)
        assert ask(url, "/health")[0] == 503
        worker.url = there
        until(lambda: worker.up)
        assert content(url, CHAT, BODY) == (200, WHOLE)


def test_before_any_worker_has_answered_nothing_is_judged(where):
    service = RouterService([NOWHERE], [NOWHERE])
    with where.running(service) as url:
        status, headers, answer = ask(url, CHAT, {**BODY, "tools": [{"type": "function"}]})
    assert (status, answer["error"]["code"]) == (503, "no_workers")
    assert "retry-after" in headers


def test_a_decode_worker_that_ends_in_mid_answer_is_told(where):
    prefill, decode = pair()
    decode.gate = asyncio.Event()
    with routed(where, prefill, decode) as (url, service):
        stream = Stream(url, CHAT, BODY)
        assert stream.begin() == 200
        assert stream.response.read(len(CHUNK)) == CHUNK
        service.fleet.of("decode")[0].dead.set()
        ((name, told),) = events(stream.response.read())
        assert (name, told["error"]["code"]) == ("error", "worker_silent")
        stream.vanish()

"""The router against stub workers: whom it asks for what, and what becomes of their failures."""

import asyncio
from contextlib import ExitStack, contextmanager

import pytest

from lynxkv.serving import state, upstream
from lynxkv.serving.router import RouterService
from serving.apps import Stream, ask, events, site, until
from serving.stubs import DONE, EVENT, Stub, always, answered, failing, in_turn, never, once_asked, streamed

CHAT = "/v1/chat/completions"
NOWHERE = "http://127.0.0.1:1"
BODY = {"model": "stub", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def where():
    with site() as it:
        yield it


@contextmanager
def routed(where, *stubs, **options):
    """The router's URL and service over ``stubs``."""
    with ExitStack() as held:
        urls = {"prefill": [], "decode": []}
        for stub in stubs:
            urls[stub.role].append(held.enter_context(stub.serving(where)))
        service = RouterService(urls["prefill"], urls["decode"], **options)
        yield held.enter_context(where.running(service, state.routes(service))), service


def code(answer):
    return answer[2]["error"]["code"]


def test_both_are_asked_at_once_with_one_id_and_one_seed(where):
    prefill, decode = Stub("prefill", never), Stub("decode")
    with routed(where, prefill, decode) as (url, _):
        status, _, answer = ask(url, CHAT, {**BODY, "n": 2, "temperature": 0.5})
        assert (status, answer) == (200, {"answer": 1})
        until(lambda: prefill.gone)
    (wanted,), (got,) = prefill.asked, decode.asked
    to_prefill, to_decode = wanted.pop("kv_transfer_params"), got.pop("kv_transfer_params")
    assert got == {**BODY, "n": 2, "temperature": 0.5}
    assert wanted == {**BODY, "max_tokens": 1, "temperature": 0.5}
    assert to_prefill["do_remote_decode"] is True
    assert to_decode == {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": to_prefill["transfer_id"],
        "remote_engine_id": "e", "remote_host": "10.0.0.1", "remote_port": 7, "remote_epoch": 1,
        "seed": to_prefill["seed"],
    }  # fmt: skip
    assert len(bytes.fromhex(to_decode["transfer_id"])) == 16


def test_every_request_has_an_id_and_a_seed_of_its_own(where):
    prefill, decode = Stub("prefill"), Stub("decode")
    with routed(where, prefill, decode) as (url, _):
        for _ in range(20):
            ask(url, CHAT, BODY)
    params = [body["kv_transfer_params"] for body in decode.asked]
    assert len({each["transfer_id"] for each in params}) == 20
    assert len({each["seed"] for each in params}) == 20


def test_a_clients_seed_is_kept(where):
    prefill, decode = Stub("prefill"), Stub("decode")
    with routed(where, prefill, decode) as (url, _):
        ask(url, CHAT, {**BODY, "seed": 7})
    assert decode.asked[0]["kv_transfer_params"]["seed"] == prefill.asked[0]["kv_transfer_params"]["seed"] == 7


def test_in_vllms_order_the_prefill_workers_answer_is_handed_on(where):
    prefill, decode = Stub("prefill"), Stub("decode")
    with routed(where, prefill, decode, sequential=True) as (url, _):
        assert ask(url, CHAT, BODY)[0] == 200
    assert decode.asked[0]["kv_transfer_params"]["from"] == "prefill"


def test_a_stream_passes_byte_for_byte(where):
    parts = [b": a comment\n\n", EVENT[:9], EVENT[9:] + EVENT, b"event: x\ndata: {}\n\n" + DONE]
    with routed(where, Stub("prefill"), Stub("decode", streamed(*parts))) as (url, _):
        status, headers, content = ask(url, CHAT, {**BODY, "stream": True})
    assert (status, content) == (200, b"".join(parts))
    assert headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("half", [b"", EVENT[:20]])
@pytest.mark.parametrize("cut", [False, True])
def test_a_decode_worker_that_ends_in_mid_answer_is_told_and_not_done(where, half, cut):
    decodes = [Stub("decode", streamed(EVENT, half, cut=cut)) for _ in range(2)]
    with routed(where, Stub("prefill"), *decodes) as (url, _):
        _, _, content = ask(url, CHAT, {**BODY, "stream": True})
    found = events(content)
    assert [name for name, _ in found] == [None, "error"]
    assert found[-1][1]["error"]["code"] == "peer_lost"
    assert b"[DONE]" not in content
    assert sum(len(stub.asked) for stub in decodes) == 1


def test_a_decode_workers_own_error_event_ends_the_stream_as_it_is(where):
    error = (
        b'event: error\ndata: {"error": {"message": "lost", "type": "server_error", "param": null, "code": "c"}}\n\n'
    )
    decode = Stub("decode", streamed(EVENT, error))
    with routed(where, Stub("prefill"), decode) as (url, service):
        _, _, content = ask(url, CHAT, {**BODY, "stream": True})
        assert content == EVENT + error
        until(lambda: not service.activity.running)
        assert service.activity.requests()[0].state == "failed"


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_prefill_that_fails_is_tried_elsewhere_under_another_id(where, sequential, status):
    bad, good = Stub("prefill", failing(status)), Stub("prefill")
    decode = Stub("decode", once_asked(good))
    with routed(where, bad, good, decode, sequential=sequential) as (url, service):
        assert ask(url, CHAT, BODY)[0] == 200
        assert service.activity.requests()[0].retried == ["prefill"]
    assert good.transfers != bad.transfers
    assert decode.transfers[-1:] == good.transfers


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_decode_worker_that_fails_is_passed_over(where, sequential, status):
    prefill, bad, good = Stub("prefill"), Stub("decode", failing(status)), Stub("decode")
    with routed(where, prefill, bad, good, sequential=sequential) as (url, service):
        assert ask(url, CHAT, BODY)[0] == 200
        assert service.activity.requests()[0].retried == ["decode"]
    assert good.transfers == prefill.transfers[-1:] != bad.transfers


def test_two_failures_of_a_kind_are_told(where):
    bad = [Stub("prefill", failing(500, "first")), Stub("prefill", failing(500, "second"))]
    with routed(where, *bad, Stub("prefill", failing(500, "third")), Stub("decode", never)) as (url, _):
        answer = ask(url, CHAT, BODY)
    assert answer[0] == 500
    assert code(answer) in ("first", "second", "third")
    assert sum(len(stub.asked) for stub in bad) <= 2


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_what_is_the_requests_fault_is_not_tried_again(where, status):
    stubs = [Stub("prefill", failing(status)), Stub("prefill", failing(status)), Stub("decode", never)]
    with routed(where, *stubs) as (url, _):
        assert ask(url, CHAT, BODY)[0] == status
    assert len(stubs[0].asked) + len(stubs[1].asked) == 1
    until(lambda: stubs[2].gone == len(stubs[2].asked))


def test_a_full_worker_says_when_to_come_back(where):
    with routed(where, Stub("prefill", failing(429, "overloaded", retry_after="7")), Stub("decode", never)) as (url, _):
        status, headers, answer = ask(url, CHAT, BODY)
    assert (status, headers["retry-after"], answer["error"]["code"]) == (429, "7", "overloaded")


def test_a_kv_that_did_not_come_is_the_prefill_workers_failure(where):
    prefills = [Stub("prefill"), Stub("prefill")]
    answers = in_turn(failing(502, "peer_lost"), always(200, {"answer": 2}))
    decode = Stub("decode", once_asked(*prefills, then=answers))
    with routed(where, *prefills, decode) as (url, service):
        status, _, answer = ask(url, CHAT, BODY)
        assert (status, answer) == (200, {"answer": 2})
        assert service.activity.requests()[0].retried == ["prefill"]
    assert [len(stub.asked) for stub in prefills] == [1, 1]


def test_a_prefill_worker_that_restarted_since_is_asked_again(where):
    prefill = Stub("prefill")

    async def restarted(request, body):
        prefill.about["kv"]["epoch"] = 2
        return await failing(502, "stale_generation")(request, body)

    decode = Stub("decode", in_turn(restarted, always(200, {"answer": 2})))
    with routed(where, prefill, decode) as (url, _):
        assert ask(url, CHAT, BODY)[0] == 200
    assert [body["kv_transfer_params"]["remote_epoch"] for body in decode.asked] == [1, 2]


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_cannot_be_reached_is_passed_over(where, sequential, role):
    lost, good, other = Stub(role), Stub(role), Stub("decode" if role == "prefill" else "prefill")
    if role == "prefill":
        other.answer = once_asked(good)
    with routed(where, lost, good, other, sequential=sequential) as (url, service):
        service.fleet.of(role)[0].url = NOWHERE
        assert ask(url, CHAT, BODY)[0] == 200
        assert service.activity.requests()[0].retried == [role]
    assert (len(lost.asked), len(good.asked)) == (0, 1)


def test_the_worker_with_the_fewest_tokens_to_do_is_asked(where):
    decodes = [Stub("decode", never), Stub("decode")]
    with routed(where, Stub("prefill"), *decodes) as (url, service):
        busy = Stream(url, CHAT, {**BODY, "max_tokens": 50})
        until(lambda: decodes[0].asked)
        assert service.fleet.of("decode")[0].outstanding > 50
        for _ in range(3):
            assert ask(url, CHAT, BODY)[0] == 200
        busy.vanish()
        until(lambda: not any(worker.outstanding for worker in service.fleet.workers))
    assert (len(decodes[0].asked), len(decodes[1].asked)) == (1, 3)


def test_a_client_that_leaves_with_the_last_event_was_answered(where):
    gate = asyncio.Event()

    async def slow_to_end(request, body):
        response = await streamed(EVENT, DONE)(request, body)
        await gate.wait()
        return response

    decode = Stub("decode", in_turn(slow_to_end, answered))
    with routed(where, Stub("prefill"), decode) as (url, service):
        stream = Stream(url, CHAT, BODY)
        assert stream.begin() == 200
        assert [stream.event()[1] for _ in range(2)][-1] == "[DONE]"
        stream.vanish()
        assert ask(url, CHAT, BODY)[0] == 200
        where.loop.call_soon_threadsafe(gate.set)
        until(lambda: not service.activity.running)
        assert [request.state for request in service.activity.requests()] == ["finished", "finished"]
    assert decode.gone == 0


@pytest.mark.parametrize("sequential", [False, True])
def test_a_client_that_vanishes_frees_both_workers(where, sequential):
    prefill, decode = Stub("prefill", never), Stub("decode", never)
    with routed(where, prefill, decode, sequential=sequential) as (url, service):
        stream = Stream(url, CHAT, BODY)
        until(lambda: prefill.asked and (sequential or decode.asked))
        stream.vanish()
        until(lambda: prefill.gone and (sequential or decode.gone))
        until(lambda: not service.activity.running)
        assert service.activity.requests()[0].state == "aborted"
        until(lambda: prefill.given_up == prefill.transfers)


def test_a_transfer_that_nobody_pulled_yet_is_given_up_with_its_request(where):
    """The prefill worker has answered; the decode worker may not have read its request when the client goes."""
    prefill, decode = Stub("prefill"), Stub("decode", never)
    with routed(where, prefill, decode) as (url, _):
        assert ask(url, CHAT, BODY | {"model": "x"})[0] == 404
        stream = Stream(url, CHAT, BODY)
        until(lambda: prefill.asked and decode.asked)
        stream.vanish()
        until(lambda: prefill.given_up == prefill.transfers)
    assert len(prefill.given_up) == 1


def test_a_regular_answer_gives_nothing_up(where):
    prefill = Stub("prefill")
    with routed(where, prefill, Stub("decode")) as (url, _):
        assert ask(url, CHAT, BODY)[0] == 200
        assert ask(url, CHAT, BODY | {"stream": True})[0] == 200
    assert prefill.given_up == []


def test_more_than_may_be_outstanding_is_refused_for_now(where):
    with routed(where, Stub("prefill"), Stub("decode", never), max_outstanding=100) as (url, service):
        stream = Stream(url, CHAT, {**BODY, "max_tokens": 90})
        until(lambda: service.activity.running)
        status, headers, answer = ask(url, CHAT, BODY)
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert int(headers["retry-after"]) >= 1
        stream.vanish()
        until(lambda: not service.activity.running)
        stuck = Stream(url, CHAT, {**BODY, "max_tokens": 900})  # alone, anything may run
        until(lambda: service.fleet.of("decode")[0].outstanding)
        stuck.vanish()
        until(lambda: not service.activity.running)


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_without_a_worker_of_each_kind_nothing_is_promised(where, missing):
    with routed(where, Stub("decode" if missing == "prefill" else "prefill")) as (url, _):
        status, headers, answer = ask(url, CHAT, BODY)
        assert (status, answer["error"]["code"]) == (503, "no_workers")
        assert "retry-after" in headers
        assert f"0 {missing}" in answer["error"]["message"]
        assert ask(url, "/health")[0] == 503


def test_workers_of_different_models_are_no_pair(where):
    with routed(where, Stub("prefill", fingerprint="a"), Stub("decode", fingerprint="b")) as (url, _):
        assert code(ask(url, CHAT, BODY)) == "no_workers"


def test_a_draining_worker_gets_nothing_new(where):
    decodes = [Stub("decode"), Stub("decode")]
    decodes[0].status = 503
    with routed(where, Stub("prefill"), *decodes) as (url, _):
        for _ in range(3):
            assert ask(url, CHAT, BODY)[0] == 200
    assert (len(decodes[0].asked), len(decodes[1].asked)) == (0, 3)


def test_a_worker_that_is_silent_for_too_long_ends_its_requests(where, monkeypatch):
    monkeypatch.setattr(upstream, "POLL_S", 0.02)
    monkeypatch.setattr(upstream, "ANSWER_S", 0.1)
    monkeypatch.setattr(upstream, "DEAD_S", 0.3)
    decode = Stub("decode", never)
    with routed(where, Stub("prefill"), decode) as (url, service):
        stream = Stream(url, CHAT, BODY)
        until(lambda: decode.asked)
        service.fleet.of("decode")[0].url = NOWHERE
        assert stream.begin() == 504
        stream.vanish()


def test_ids_and_keys_go_on_to_workers(where):
    prefill, decode = Stub("prefill"), Stub("decode")
    with routed(where, prefill, decode, upstream_token="secret") as (url, _):
        _, headers, _ = ask(url, CHAT, BODY, {"x-request-id": "mine-1", "authorization": "Bearer client"})
        assert headers["x-request-id"] == "mine-1"
        _, headers, _ = ask(url, CHAT, BODY, {"x-request-id": "no\tgood"})
        assert len(headers["x-request-id"]) == 32
    for stub in (prefill, decode):
        assert stub.headers[0]["x-request-id"] == "mine-1"
        assert stub.headers[0]["authorization"] == "Bearer secret"


def test_a_client_cannot_say_where_kv_is(where):
    with routed(where, Stub("prefill"), Stub("decode")) as (url, _):
        status, _, answer = ask(url, CHAT, {**BODY, "kv_transfer_params": {"remote_host": "elsewhere"}})
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")

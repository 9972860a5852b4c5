"""A router written for vLLM in our router's place: its own requests, word for word, against our workers."""

import secrets

import pytest

from serving.apps import MODEL, ask, cluster, events

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
NULLS = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
TEXT = "the quick brown fox jumps over the lazy dog " * 6


@pytest.fixture(scope="module")
def run(eng):
    with cluster(eng, prefill={"lease_s": 2}) as running:  # some transfers here are never pulled
        yield running
        running.empties()


def to_prefill(body):
    """What vLLM's example proxies make of a client's request for the prefill instance."""
    body = {**body, "stream": False, "max_tokens": 1, "min_tokens": 1}
    body["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, **NULLS}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    body.pop("stream_options", None)
    return body


def routed(run, path, body):
    """The decode worker's answer to what vLLM's proxy sends it."""
    headers = {"authorization": "Bearer EMPTY", "x-request-id": secrets.token_hex(8)}
    status, _, first = ask(run.urls[0], path, to_prefill(body), headers)
    assert status == 200, first
    assert first["usage"]["completion_tokens"] == 1
    params = first.get("kv_transfer_params", {})
    return first, ask(run.urls[1], path, {**body, "kv_transfer_params": params}, headers)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 6}, {"temperature": 1.0}])
def test_the_answer_is_that_of_our_router(run, sampling):
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 10, **sampling}
    first, (status, _, answer) = routed(run, COMPLETE, body)
    assert status == 200, answer
    seed = first["kv_transfer_params"]["seed"]
    _, _, ours = ask(run.url, COMPLETE, {**body, "seed": seed})
    assert answer["choices"] == ours["choices"]
    token_1 = first["choices"][0]["text"].rstrip("\ufffd")  # it may be the first bytes of a longer character
    assert answer["choices"][0]["text"].startswith(token_1)
    assert answer["lynx"]["seed"] == seed


def test_a_chat_is_streamed(run):
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_completion_tokens": 6, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0, "logprobs": True,
    }  # fmt: skip
    _, (status, headers, content) = routed(run, CHAT, body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    *_, usage, done = [data for _, data in events(content)]
    assert usage["usage"]["completion_tokens"] == 6
    assert done == "[DONE]"


def test_what_a_prefill_worker_answers_is_complete(run):
    _, _, told = ask(run.urls[0], COMPLETE, to_prefill({"model": MODEL, "prompt": TEXT}))
    params = told["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_host"], params["remote_port"]) == run.prefill.kv
    assert params["remote_engine_id"] == run.prefill.engine_id
    assert len(bytes.fromhex(params["transfer_id"])) == 16
    assert ask(run.urls[0], f"/lynx/transfers/{params['transfer_id']}", method="DELETE")[0] == 204


def test_an_id_that_was_used_is_not_used_again(run):
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 3, "temperature": 0}
    first, (status, _, _) = routed(run, COMPLETE, body)
    assert status == 200
    used = first["kv_transfer_params"]
    again = to_prefill(body)
    again["kv_transfer_params"]["transfer_id"] = used["transfer_id"]
    status, _, told = ask(run.urls[0], COMPLETE, again)
    assert status == 502
    assert used["transfer_id"][:12] in told["error"]["message"]
    status, _, told = ask(run.urls[1], COMPLETE, {**body, "kv_transfer_params": used})
    assert status == 502


def test_a_transfer_can_be_given_up_before_it_is_pulled(run):
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 3}
    _, _, told = ask(run.urls[0], COMPLETE, to_prefill(body))
    params = told["kv_transfer_params"]
    for _ in range(2):
        assert ask(run.urls[0], f"/lynx/transfers/{params['transfer_id']}", method="DELETE")[0] == 204
    assert run.on_loop(run.prefill.node.holdings).readers == 0
    assert ask(run.urls[1], COMPLETE, {**body, "kv_transfer_params": params})[0] == 502
    status, _, told = ask(run.urls[0], "/lynx/transfers/short", method="DELETE")
    assert (status, told["error"]["param"]) == (400, "transfer_id")


def test_an_id_that_nobody_knows_is_waited_for_until_the_deadline(run):
    params = {
        "do_remote_prefill": True, "transfer_id": secrets.token_hex(16), "remote_host": run.prefill.kv[0],
        "remote_port": run.prefill.kv[1], "seed": 1,
    }  # fmt: skip
    body = {"model": MODEL, "prompt": TEXT, "kv_transfer_params": params, "lynx": {"deadline_s": 0.3}}
    status, _, told = ask(run.urls[1], COMPLETE, body)
    assert (status, told["error"]["code"]) == (504, "deadline_exceeded")
    run.empties()


def test_another_prompt_does_not_get_the_kv(run):
    _, _, told = ask(run.urls[0], COMPLETE, to_prefill({"model": MODEL, "prompt": TEXT}))
    body = {"model": MODEL, "prompt": TEXT + "!", "kv_transfer_params": told["kv_transfer_params"]}
    status, _, told = ask(run.urls[1], COMPLETE, body)
    assert (status, told["error"]["code"]) == (502, "protocol_error")


def test_a_lost_kv_is_recomputed_where_that_is_wanted(run):
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 6, "temperature": 0}
    _, (_, _, right) = routed(run, COMPLETE, body)
    _, _, told = ask(run.urls[0], COMPLETE, to_prefill(body))
    params = told["kv_transfer_params"] | {"remote_epoch": told["kv_transfer_params"]["remote_epoch"] - 1}
    _, _, answer = ask(run.urls[1], COMPLETE, {**body, "kv_transfer_params": params, "lynx": {"on_loss": "recompute"}})
    assert answer["lynx"]["on_loss"] == "recomputed"
    assert answer["choices"] == right["choices"]
    status, _, told = ask(run.urls[1], COMPLETE, {**body, "kv_transfer_params": params})
    assert (status, told["error"]["code"]) == (502, "stale_generation")

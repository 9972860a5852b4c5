"""What is not answered, and how clients are told: the status, OpenAI's error object, when to come back."""

import pytest

from node.slow import SlowEngine
from serving.apps import MODEL, Stream, ask, cluster, until

COMPLETE = "/v1/completions"
PROMPT = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2}


@pytest.fixture(scope="module")
def run(eng):
    with cluster(eng) as running:
        yield running
        running.empties()


def refused(url, body, path=COMPLETE):
    """Status, headers and error object."""
    status, headers, told = ask(url, path, body)
    assert set(told) == {"error"}, told
    assert set(told["error"]) == {"message", "type", "param", "code"}
    return status, headers, told["error"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"wish": 1}, "wish"),
        ({"temperature": "hot"}, "temperature"),
        ({"lynx": {"speed": 2}}, "lynx"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ],
)
def test_a_field_that_cannot_be_met_is_named(run, fields, param):
    status, _, error = refused(run.url, {**PROMPT, **fields})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert next(iter(fields)) in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(run, body):
    assert refused(run.url, body)[0] == 400


@pytest.mark.parametrize("fields", [{"prompt": "x" * 3000}, {"prompt": "x" * 600, "max_tokens": 600}])
def test_a_prompt_beyond_the_context_is_named(run, fields):
    status, _, error = refused(run.url, {**PROMPT, **fields})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    run.empties()


@pytest.mark.parametrize(("path", "body", "status"), [("/v1/nothing", None, 404), (COMPLETE, None, 405)])
def test_what_is_not_served_is_told_in_the_same_shape(run, path, body, status):
    assert refused(run.url, body, path)[0] == status


def test_a_worker_says_whom_it_answers(run):
    prefill, decode = run.urls
    for url, words in ((prefill, "do_remote_decode"), (decode, "do_remote_prefill")):
        status, _, error = refused(url, PROMPT)
        assert (status, error["param"]) == (400, "kv_transfer_params")
        assert words in error["message"]


def test_a_prefill_worker_does_not_stream_and_takes_no_made_up_id(run):
    asked = {**PROMPT, "kv_transfer_params": {"do_remote_decode": True}}
    assert refused(run.urls[0], {**asked, "stream": True})[2]["param"] == "stream"
    asked["kv_transfer_params"]["transfer_id"] = "short"
    assert "transfer_id" in refused(run.urls[0], asked)[2]["message"]


def test_a_body_that_is_too_large_is_refused(eng):
    with cluster(eng, router={"max_body": 5000}) as run:
        status, _, error = refused(run.url, {**PROMPT, "prompt": "x" * 6000})
        assert (status, error["code"]) == (413, "body_too_large")
        assert ask(run.url, COMPLETE, PROMPT)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{"node": {"memory_bytes": 100_000}}, {"prefill": {"memory_bytes": 10_000}}])
def test_what_never_fits_is_told_with_its_own_status(eng, options, stream):
    with cluster(eng, **options) as run:
        status, _, error = refused(run.url, {**PROMPT, "prompt": "x" * 600, "stream": stream})
        assert (status, error["code"]) == (503, "capacity_exceeded")
        run.empties()


@pytest.mark.parametrize(
    "options",
    [
        {"prefill": {"max_running": 1, "max_queue": 0}},
        {"decode": {"max_running": 1, "max_queue": 0}},
        {"router": {"max_outstanding": 450}},
    ],
    ids=["prefill worker", "decode worker", "router"],
)
def test_more_than_there_is_room_for_is_told_when_to_come_back(eng, options):
    slow = SlowEngine(eng, chunks=1)
    with cluster(eng, prefill_engine=slow, **options) as run:
        busy = Stream(run.url, COMPLETE, {**PROMPT, "prompt": "x" * 300, "max_tokens": 200})
        assert slow.reached.wait(30)
        until(lambda: run.decode.slots.asked == 1)
        status, headers, error = refused(run.url, {**PROMPT, "prompt": "y" * 300, "max_tokens": 400})
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")
        assert int(headers["retry-after"]) >= 1
        slow.go.set()
        busy.begin()
        assert busy.rest()[-1] == (None, "[DONE]")
        run.empties()
        assert ask(run.url, COMPLETE, PROMPT)[0] == 200


def test_more_choices_than_ever_run_are_refused(eng):
    with cluster(eng, decode={"max_running": 2, "max_queue": 1}) as run:
        assert ask(run.url, COMPLETE, {**PROMPT, "n": 3})[0] == 200
        status, _, error = refused(run.url, {**PROMPT, "n": 4})
        assert (status, error["code"]) == (503, "capacity_exceeded")
        run.empties()


def test_a_draining_router_takes_nothing_new_and_says_so(eng):
    with cluster(eng) as run:
        run.site.call(run.router.drain(5))
        status, headers, error = refused(run.url, PROMPT)
        assert (status, error["code"]) == (503, "draining")
        assert headers["retry-after"]
        status, _, health = ask(run.url, "/health")
        assert (status, health["status"]) == (503, "draining")

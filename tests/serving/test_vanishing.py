"""A client that goes away, at every stage: everything it held is free again, on every process."""

import json

import pytest

from node.slow import SlowEngine
from serving.apps import MODEL, Stream, ask, cluster, connect, until

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
BODY = {"model": MODEL, "prompt": "x y z " * 100, "max_tokens": 300, "temperature": 0, "lynx": {"emit": "draft"}}


@pytest.fixture(scope="module")
def slow(eng):
    """Behind a link that needs a second for either tier."""
    with cluster(eng, prefill={"rate": 120_000}) as running:
        yield running


def of_decode(run):
    """What the decode worker shows of its newest request."""
    found = run.decode.activity.requests()
    return found[0].plain() if found else {"state": None, "bytes": {}}


STAGES = {
    "admission": lambda run: run.decode.activity.running,
    "the anchor": lambda run: of_decode(run)["state"] == "anchor" and of_decode(run)["bytes"],
    "the drafts": lambda run: of_decode(run)["state"] == "draft",
    "decoding": lambda run: of_decode(run)["state"] == "decode",
}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_vanishes_frees_everything(slow, stage, streamed):
    stream = Stream(slow.url, COMPLETE, BODY)
    if not streamed:
        stream.vanish()
        until(lambda: not slow.router.activity.running)
        stream = Whole(slow.url)
    until(lambda: slow.router.activity.running and STAGES[stage](slow), shown=lambda: of_decode(slow))
    stream.vanish()
    slow.empties()
    assert slow.last().state == "aborted"
    assert of_decode(slow)["state"] == "aborted"


class Whole:
    """An answer that is not streamed, and not waited for."""

    def __init__(self, url):
        self.connection = connect(url)
        self.connection.request("POST", COMPLETE, json.dumps(BODY).encode())

    def vanish(self):
        self.connection.close()


def test_a_client_that_vanishes_during_its_prefill_stops_it(eng):
    engine = SlowEngine(eng, chunks=1)
    with cluster(eng, prefill_engine=engine) as run:
        stream = Stream(run.url, COMPLETE, BODY)
        assert engine.reached.wait(30)
        stream.vanish()
        until(lambda: not run.router.activity.running and not run.decode.activity.running)
        engine.go.set()
        run.empties()
        assert engine.chunks_done <= 2  # of five: the one it was in is finished
        assert run.on_loop(run.prefill.node.holdings).entries == 0


def test_a_client_that_vanishes_in_the_queue_gives_its_place_up(eng):
    engine = SlowEngine(eng, chunks=1)
    with cluster(eng, prefill_engine=engine, decode={"max_running": 1, "max_queue": 1}) as run:
        first, second = Stream(run.url, COMPLETE, BODY), None
        assert engine.reached.wait(30)
        second = Stream(run.url, COMPLETE, BODY | {"prompt": "another " * 70})
        until(lambda: run.decode.slots.waiting == 1)
        second.vanish()
        until(lambda: run.decode.slots.waiting == 0)
        engine.go.set()
        assert first.begin() == 200
        assert first.rest()[-1][1] == "[DONE]"
        run.empties()


def test_half_a_request_is_no_request(slow):
    connection = connect(slow.url)
    connection.putrequest("POST", COMPLETE)
    connection.putheader("content-length", "1000")
    connection.endheaders(b'{"model": ')
    connection.close()
    status, _, _ = ask(slow.url, COMPLETE, BODY | {"max_tokens": 2})
    assert status == 200
    slow.empties()


def test_a_reader_that_stops_reading_and_leaves_frees_everything(slow):
    stream = Stream(slow.url, COMPLETE, BODY | {"n": 4, "logprobs": 20})
    assert stream.begin() == 200
    assert stream.event() is not None
    stream.vanish()
    slow.empties()


def test_others_go_on_when_one_vanishes(slow):
    right = ask(slow.url, COMPLETE, BODY | {"max_tokens": 20})[2]["choices"]
    streams = [Stream(slow.url, COMPLETE, BODY | {"max_tokens": 20, "prompt": f"{i} " * 200}) for i in range(3)]
    for stream in streams:
        stream.vanish()
    assert ask(slow.url, COMPLETE, BODY | {"max_tokens": 20})[2]["choices"] == right
    slow.empties()

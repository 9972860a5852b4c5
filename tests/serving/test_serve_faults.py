"""Workers that die, freeze or come back, as processes: a request ends in its answer or in one typed error."""

import signal
import threading
import time

import openai
import pytest

from serving.apps import ask, until
from serving.processes import fleet

COMPLETE = "/v1/completions"
SHORT = {"prompt": "word " * 60, "max_tokens": 4, "temperature": 0}


class Asked(threading.Thread):
    """A request on a thread of its own."""

    def __init__(self, url, body):
        super().__init__(daemon=True)
        self._url, self._body = url, body
        self.start()

    def run(self):
        self._told = ask(self._url, COMPLETE, self._body)

    def result(self):
        """Its ``(status, headers, body)``."""
        self.join(60)
        assert not self.is_alive(), "the request hangs"
        return self._told


@pytest.fixture(scope="module")
def cluster(tiny_folder):
    with fleet(tiny_folder, prefills=2, prefill=("--lease", "4", "--ttl", "4")) as (prefills, decodes, router):
        yield *prefills, *decodes, router


@pytest.fixture
def fresh(cluster):
    """``(prefill, prefill, decode, router)``, all up; afterwards they are, and hold nothing."""
    *workers, router = cluster
    until(lambda: sum(worker["up"] for worker in router.health()["workers"]) == len(workers))
    yield cluster
    for worker in workers:
        worker.send(signal.SIGCONT)
        assert worker.empties()


def test_a_prefill_worker_that_dies_is_replaced_before_anything_was_told(fresh):
    first, second, decode, router = fresh
    right = ask(router.url, COMPLETE, SHORT)[2]
    for each in (first, second):
        each.send(signal.SIGSTOP)
    asked = Asked(router.url, SHORT)
    until(lambda: decode.health()["requests"] == 1)
    chosen = next(
        each for each in router.health()["workers"] if each["outstanding_tokens"] and each["role"] == "prefill"
    )
    dead, other = (first, second) if chosen["url"] == first.url else (second, first)
    other.send(signal.SIGCONT)
    dead.kill()
    status, _, told = asked.result()
    dead.start()
    assert status == 200
    assert told["choices"] == right["choices"]
    assert told["lynx"]["prefill_worker"] == other.health()["kv"]["engine_id"]


def test_frozen_prefill_workers_end_a_request_in_one_error_at_its_deadline(fresh):
    first, second, _, router = fresh
    for each in (first, second):
        each.send(signal.SIGSTOP)
    begun = time.monotonic()
    status, _, told = ask(router.url, COMPLETE, {**SHORT, "lynx": {"deadline_s": 2}})
    assert (status, told["error"]["code"]) == (504, "deadline_exceeded")
    assert 1.9 < time.monotonic() - begun < 4


def test_a_restarted_prefill_worker_is_found_on_its_ports(fresh):
    first, second, _, router = fresh
    second.send(signal.SIGSTOP)
    epoch = first.health()["kv"]["epoch"]
    first.kill()
    first.start()
    assert first.health()["kv"]["epoch"] != epoch
    until(lambda: router.health()["workers"][0]["up"])
    second.kill()  # only the new one is left
    status, _, told = ask(router.url, COMPLETE, SHORT)
    second.start()
    assert status == 200
    assert told["lynx"]["prefill_worker"] == first.health()["kv"]["engine_id"]


def test_a_decode_worker_that_dies_in_mid_answer_is_told_and_not_done(fresh):
    """Started again on its port, it is found again."""
    *_, decode, router = fresh
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        stream = iter(client.completions.create(model=model, stream=True, **{**SHORT, "max_tokens": 600}))
        next(stream)
        decode.kill()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "peer_lost"
    status, headers, told = ask(router.url, COMPLETE, SHORT)
    assert (status, told["error"]["code"]) == (503, "no_workers")
    assert headers["retry-after"]
    decode.start()
    until(lambda: router.health()["status"] == "ok")
    assert ask(router.url, COMPLETE, SHORT)[0] == 200


def test_a_worker_that_drains_finishes_what_it_has_and_ends(fresh):
    *_, decode, router = fresh
    asked = Asked(router.url, {**SHORT, "max_tokens": 600})
    until(lambda: decode.health()["requests"] == 1)
    decode.send(signal.SIGTERM)
    status, _, told = asked.result()
    assert (status, told["usage"]["completion_tokens"]) == (200, 600)
    assert decode.process.wait(30) == 0
    decode.start()

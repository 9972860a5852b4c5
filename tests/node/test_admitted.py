"""Transfers that the prefill node admits itself: pulled by their id before or after it, and cancelled at any stage."""

import asyncio
import secrets
import threading

import pytest

from lynxkv.errors import Cancelled, RequestError, TransferRejected
from lynxkv.node.admission import tokens_to_bytes
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import SamplingParams
from lynxkv.wire import Admit
from models import engine
from node.running import Asked, admit_of, finish, interrupted, nothing_is_held, prefill_node, request
from node.slow import SlowEngine
from node.test_decode_memory import size_of

NAME = "mqa-80"


@pytest.mark.parametrize("order", ["admitted first", "pulled first"])
def test_a_transfer_admitted_at_the_prefill_node_is_only_pulled(order):
    eng, wanted = engine(NAME), request()
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng) as node:
        right = finish(node.generate(run.address, wanted))[1].tokens
        admit = admit_of(wanted)
        given = request(transfer=admit.transfer, epoch=run.node.server.epoch)
        if order == "admitted first":
            draw = run.admitting(admit).result(30)
            asked = Asked(node.generate(run.address, given))
        else:
            asked = Asked(node.generate(run.address, given))
            run.until(lambda: run.node.server.counters().parked == 1)
            draw = run.admitting(admit).result(30)
        assert asked.outcome().tokens == right
        assert draw.token == right[0]
        assert nothing_is_held(run, node)


def test_a_transfer_of_an_earlier_life_is_refused_at_once():
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME)) as node:
        _, error = interrupted(node.generate(run.address, request(transfer=b"\x01" * 16, epoch=5)))
        assert "restarted" in str(error)
        assert nothing_is_held(run, node)


def test_an_id_given_to_two_requests_serves_the_first():
    eng = engine(NAME)
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng) as node:
        admit = admit_of(request())
        first = Asked(node.generate(run.address, request(transfer=admit.transfer)))
        run.until(lambda: run.node.server.counters().parked == 1)
        _, error = interrupted(node.generate(run.address, request(transfer=admit.transfer)))
        assert isinstance(error, TransferRejected)
        run.admitting(admit).result(30)
        assert first.outcome().finish == "length"
        assert nothing_is_held(run, node)


@pytest.mark.parametrize(
    "bad", [{"transfer": b"short"}, {"transfer": bytes(16)}, {"transfer": b"\x01" * 16, "epoch": 1 << 48}]
)
def test_ids_and_epochs_that_cannot_be_are_refused(bad):
    with pytest.raises(RequestError):
        request(**bad)


def test_a_transfer_admitted_elsewhere_needs_the_seed_of_its_admission():
    with pytest.raises(RequestError, match="seed"):
        Request((1, 2), SamplingParams(), transfer=b"\x01" * 16)


def test_a_pull_hears_why_its_admission_failed_before_and_after_it():
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME)) as node:
        for late in (False, True):
            admit = Admit(transfer=secrets.token_bytes(16), tokens=tokens_to_bytes([1 << 20]), spec=request().spec)
            given = request(transfer=admit.transfer)
            if not late:
                asked = Asked(node.generate(run.address, given))
                run.until(lambda: run.node.server.counters().parked == 1)
            with pytest.raises(RequestError, match="token ids must be"):
                run.admitting(admit).result(30)
            if late:
                asked = Asked(node.generate(run.address, given))
            with pytest.raises(RequestError, match="token ids must be"):
                asked.outcome()
        assert nothing_is_held(run, node)


def test_the_lease_of_a_transfer_is_kept_while_its_request_waits_for_memory(monkeypatch):
    monkeypatch.setattr("lynxkv.node.pulling.KEEP_S", 0.05)
    eng = engine(NAME)
    size = size_of(eng, request())
    with prefill_node(eng, chunk=128, lease_s=0.4) as run, DecodeNode(eng, memory_bytes=size) as node:
        admit = admit_of(request(seed=1))
        first = node.generate(run.address, request())
        while next(first).position < 5:
            pass
        run.admitting(admit).result(30)
        second = Asked(node.generate(run.address, request(seed=1, transfer=admit.transfer)))
        run.until(lambda: node.holdings().waiting == 1)
        threading.Event().wait(1.0)  # more than two leases
        assert run.node.server.counters().leases == 1
        finish(first)
        assert second.outcome().finish == "length"
        assert nothing_is_held(run, node)


def test_a_request_that_gives_up_its_wait_for_memory_ends_the_transfer_it_was_given():
    eng = engine(NAME)
    size = size_of(eng, request())
    with prefill_node(eng, chunk=128) as run, DecodeNode(eng, memory_bytes=size) as node:
        first = node.generate(run.address, request())
        while next(first).position < 5:
            pass
        admit = admit_of(request(seed=1))
        run.admitting(admit).result(30)
        waiting = node.generate(run.address, request(seed=1, transfer=admit.transfer))
        asked = Asked(waiting)
        run.until(lambda: node.holdings().waiting == 1)
        waiting.cancel("enough")
        with pytest.raises(Cancelled):
            asked.outcome()
        run.until(lambda: run.node.server.counters().leases == 0)
        finish(first)
        assert nothing_is_held(run, node)


@pytest.mark.parametrize("stage", ["unknown", "waiting for memory", "queued", "in a chunk", "drawn", "pulled"])
@pytest.mark.parametrize("how", ["cancel", "task"])
def test_an_admission_cancelled_at_any_stage_leaves_nothing(stage, how):
    """By PrefillNode.cancel, and by cancelling the task that admits; of a transfer pulled, a task is not its owner."""
    eng = SlowEngine(engine(NAME), chunks=1)
    small = 200_000 if stage == "waiting for memory" else 4 << 30
    with (
        prefill_node(eng, chunk=64, memory_bytes=small, max_running=1) as run,
        DecodeNode(engine(NAME)) as node,
    ):
        other = admit_of(request(seed=7))
        admit = admit_of(request())
        if stage == "drawn":
            eng.go.set()
        if stage in ("waiting for memory", "queued"):
            busy = run.admitting(other)
            assert eng.reached.wait(30)
        asked = None
        if stage == "pulled":
            asked = Asked(node.generate(run.address, request(transfer=admit.transfer)))
            run.until(lambda: run.node.server.counters().parked == 1)
        future = run.admitting(admit) if stage != "unknown" else None
        if stage == "waiting for memory":
            run.until(lambda: bool(run.node.store._waiting))
        elif stage == "queued":
            run.until(lambda: run.node.holdings().queued == 1)
        elif stage in ("in a chunk", "pulled"):
            assert eng.reached.wait(30)
        elif stage == "drawn":
            future.result(30)
        if how == "cancel" or stage in ("unknown", "drawn"):
            run.call(run.node.cancel, admit.transfer, "the client went away")
        else:
            future.cancel()
        if stage in ("waiting for memory", "queued"):
            run.until(lambda: run.node.holdings().queued == 0)
            eng.go.set()
            busy.result(30)
            run.call(run.node.cancel, other.transfer, "done")
        if how == "cancel" and future is not None and stage != "drawn":
            with pytest.raises(Cancelled, match="the client went away"):
                future.result(30)
        if asked is not None:
            eng.go.set()
            if how == "cancel":
                with pytest.raises(TransferRejected, match="cancelled by the prefill node"):
                    asked.outcome()
            else:
                assert asked.outcome().finish == "length"
        eng.go.set()
        assert nothing_is_held(run, node)
        with pytest.raises(TransferRejected, match="draw a new id"):
            run.admitting(admit).result(30)


def test_an_admission_whose_transfer_its_peer_cancels_ends_at_once():
    eng = SlowEngine(engine(NAME), chunks=1)
    with prefill_node(eng, chunk=64) as run, DecodeNode(engine(NAME)) as node:
        admit = admit_of(request())
        future = run.admitting(admit)
        assert eng.reached.wait(30)
        generation = node.generate(run.address, request(transfer=admit.transfer))
        asked = Asked(generation)
        run.until(lambda: run.node.server.counters().deliveries == 1)
        generation.cancel("the client went away")
        with pytest.raises(TransferRejected, match="ended before token 1"):
            future.result(30)
        with pytest.raises(Cancelled):
            asked.outcome()
        eng.go.set()
        assert nothing_is_held(run, node)


def test_an_admission_is_refused_by_a_node_that_drains_and_ended_by_one_that_stops():
    eng = SlowEngine(engine(NAME), chunks=1)
    with prefill_node(eng, chunk=64) as run:
        future = run.admitting(admit_of(request()))
        assert eng.reached.wait(30)
        eng.between = lambda: None
        stopping = asyncio.run_coroutine_threadsafe(run.node.stop(), run.loop)
        with pytest.raises(TransferRejected):
            future.result(30)
        eng.go.set()
        stopping.result(30)
        with pytest.raises(TransferRejected, match="draining"):
            run.admitting(admit_of(request())).result(30)

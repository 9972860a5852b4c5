"""A request can be cancelled from any thread at any moment, and then holds nothing anywhere."""

import contextlib
import os
import socket
import threading

import pytest

from faults.proxy import Proxy, is_data
from lynxkv.codec import Tier
from lynxkv.errors import Cancelled, RequestError
from lynxkv.node.decode import DecodeNode
from lynxkv.speculation import Verified
from models import engine
from node.running import Asked, finish, interrupted, nothing_is_held, prefill_node, request
from node.slow import SlowEngine

NAME = "mqa-80"


@pytest.mark.parametrize("stage", ["token 1", "anchor", "residual", "verified", "decoding"])
@pytest.mark.parametrize("on_loss", ["fail", "recompute"])
def test_a_cancel_at_any_stage_ends_the_request_and_holds_nothing(stage, on_loss):
    """It is no loss: nothing is recomputed."""
    eng = engine(NAME)
    with prefill_node(eng, chunk=128) as run, Proxy(run.address) as proxy, DecodeNode(eng) as node:
        finish(node.generate(proxy.address, request()))
        assert nothing_is_held(run, node)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        gate, held, moments = threading.Event(), threading.Event(), []
        tier = {"token 1": None, "anchor": Tier.ANCHOR, "residual": Tier.RESIDUAL}.get(stage, "never")

        def hold(header, payload):
            if not payload or tier == "never" or not (tier is None or is_data(header, tier)):
                return payload
            held.set()
            gate.wait(60)
            return payload

        proxy.damage = hold
        stop_at, resume = {"verified": 1, "decoding": 10}.get(stage), threading.Event()

        def pause(event):
            if isinstance(event, Verified) and event.position == stop_at:
                held.set()
                resume.wait(30)

        generation = node.generate(proxy.address, request(on_loss=on_loss), moments.append)
        asked = Asked(generation, pause)
        assert held.wait(30)
        generation.cancel("the client went away")
        generation.cancel("twice")
        resume.set()
        with pytest.raises(Cancelled, match="the client went away"):
            asked.outcome()
        gate.set()
        assert nothing_is_held(run, node)
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
        assert not {"lost", "recomputed"} & {m.what for m in moments}
        assert node.totals().losses == {}
        assert finish(node.generate(proxy.address, request()))[1].finish == "length"


def test_a_cancel_before_the_first_event_begins_nothing():
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME)) as node:
        generation = node.generate(run.address, request())
        generation.cancel("early")
        events, error = interrupted(generation)
        assert events == []
        assert isinstance(error, Cancelled)
        assert node.holdings().links == 0


def test_a_cancel_after_the_end_changes_nothing():
    with prefill_node(engine(NAME)) as run, DecodeNode(engine(NAME)) as node:
        generation = node.generate(run.address, request())
        tokens = finish(generation)[1].tokens
        generation.cancel("late")
        assert list(generation) == []
        assert generation.outcome.tokens == tokens
        assert nothing_is_held(run, node)


def test_a_cancel_while_the_generation_is_suspended_tells_the_prefill_node_at_once():
    with prefill_node(engine(NAME), chunk=128, rate=30_000) as run, DecodeNode(engine(NAME)) as node:
        generation = node.generate(run.address, request())
        next(generation)
        generation.cancel("nobody listens")
        assert run.idle()
        assert node.holdings().running == 1
        generation.close()
        assert nothing_is_held(run, node)
        with pytest.raises(RequestError):
            _ = generation.outcome


def test_a_cancel_while_connecting_ends_at_once():
    with DecodeNode(engine(NAME), connect_s=60) as node, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        generation = node.generate(silent.getsockname(), request())
        asked = Asked(generation)
        with silent.accept()[0]:  # it is there, and never greets
            generation.cancel("enough")
            with pytest.raises(Cancelled):
                asked.outcome()


def test_a_cancel_while_the_prompt_is_prefilled_stops_the_prefill():
    slow = SlowEngine(engine(NAME), chunks=1)
    with prefill_node(slow, chunk=64) as run, DecodeNode(engine(NAME)) as node:
        generation = node.generate(run.address, request(1000))
        asked = Asked(generation)
        assert slow.reached.wait(30)
        generation.cancel("enough")
        with pytest.raises(Cancelled):
            asked.outcome()
        slow.go.set()
        assert nothing_is_held(run, node)
        assert slow.chunks_done < 1000 // 64
        assert run.call(run.node.holdings).entries == 0


def test_a_cancel_during_a_recompute_ends_it_after_its_chunk():
    slow = SlowEngine(engine(NAME), chunks=1)
    with prefill_node(engine(NAME), chunk=64) as run, Proxy(run.address) as proxy, DecodeNode(slow) as node:
        proxy.damage = lambda header, payload: proxy.cut() if is_data(header, Tier.ANCHOR) else payload
        generation = node.generate(proxy.address, request(1000, on_loss="recompute"))
        asked = Asked(generation)
        assert slow.reached.wait(30)
        generation.cancel("enough")
        slow.go.set()
        with pytest.raises(Cancelled):
            asked.outcome()
        assert slow.chunks_done < 1000 // 64
        assert node.totals().losses == {"PeerLost": 1}
        assert nothing_is_held(run, node)


def test_cancels_at_random_moments_leave_nothing():
    eng = engine(NAME)
    with prefill_node(eng, chunk=64, rate=2_000_000) as run, DecodeNode(eng) as node:
        for i in range(40):
            generation = node.generate(run.address, request(200, seed=i % 3))
            timer = threading.Timer(i * 0.002, generation.cancel, args=("drawn",))
            timer.start()
            with contextlib.suppress(Cancelled):
                finish(generation)
            timer.join()
        assert nothing_is_held(run, node)

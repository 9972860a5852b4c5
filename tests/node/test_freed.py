"""What an ended request held is freed at once, even while somebody keeps its error."""

import gc
import weakref

import pytest

from faults.proxy import CutAfter, Proxy
from lynxkv.codec import CodecSpec, Tier
from lynxkv.errors import Cancelled, LynxError
from lynxkv.node.arrivals import Arrivals
from lynxkv.node.decode import DecodeNode
from models import engine
from node.running import Asked, admit_of, finish, interrupted, nothing_is_held, prefill_node, request
from node.slow import SlowEngine

NAME = "mqa-80"


class Tracking:
    """An engine that remembers the tensors of every session it opened, weakly."""

    def __init__(self, inner):
        self._inner, self.tensors = inner, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def track(self, session):
        self.tensors += [weakref.ref(t) for layer in session._buffers.layers for t in (layer.keys, layer.values)]
        return session

    def open(self, *arguments):
        return self.track(self._inner.open(*arguments))

    def prefill(self, tokens, chunk):
        for i, (done, session, logits) in enumerate(self._inner.prefill(tokens, chunk)):
            if i == 0:
                self.track(session)
            yield done, session, logits

    @property
    def alive(self):
        return sum(ref() is not None for ref in self.tensors)


@pytest.fixture
def no_collector():
    """Only reference counts free anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["finished", "failed", "cancelled", "closed", "recomputed"])
def test_the_kv_of_an_ended_request_is_freed_at_once(how):
    eng = Tracking(engine(NAME))
    with prefill_node(engine(NAME), chunk=64) as run, Proxy(run.address) as proxy, DecodeNode(eng) as node:
        if how in ("failed", "recomputed"):
            proxy.damage = CutAfter(Tier.RESIDUAL)
        generation = node.generate(proxy.address, request(on_loss="recompute" if how == "recomputed" else "fail"))
        error = None
        if how in ("finished", "recomputed"):
            finish(generation)
        elif how == "closed":
            next(generation)
            generation.close()
        else:
            if how == "cancelled":
                next(generation)
                generation.cancel("enough")
            _, error = interrupted(generation)
        assert isinstance(error, LynxError) == (how in ("failed", "cancelled"))
        assert len(eng.tensors) > 0
        assert eng.alive == 0
        assert nothing_is_held(run, node)
        del error


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["finished", "cancelled"])
@pytest.mark.parametrize("raw", [False, True])
def test_the_kv_of_a_prefill_is_freed_when_it_ends(how, raw):
    """Encoded from a prompt, and from a raw entry that is held."""
    tracking = Tracking(engine(NAME))
    eng = SlowEngine(tracking, chunks=0 if how == "finished" else 2)
    with prefill_node(eng, chunk=64) as run, DecodeNode(engine(NAME)) as node:
        if raw:
            eng.go.set()
            node.prepare(run.address, request().tokens, CodecSpec(raw=True), deadline_s=60)
            eng.go.clear()
        tracking.tensors.clear()
        admit = admit_of(request())
        future = run.admitting(admit)
        if how == "finished" or raw:
            future.result(30)
        else:
            assert eng.reached.wait(30)
            run.call(run.node.cancel, admit.transfer, "enough")
            with pytest.raises(Cancelled):
                future.result(30)
            eng.go.set()
        run.until(lambda: run.node.holdings().running == 0)
        assert len(tracking.tensors) > 0
        assert tracking.alive == 0
        run.call(run.node.cancel, admit.transfer, "done")


@pytest.mark.usefixtures("no_collector")
def test_compressed_bytes_of_an_ended_request_are_freed_at_once(monkeypatch):
    made, original = [], Arrivals.buffer

    def buffer(self, segment, size):
        view = original(self, segment, size)
        made.append(weakref.ref(self._buffers[segment]))
        return view

    monkeypatch.setattr(Arrivals, "buffer", buffer)
    with prefill_node(engine(NAME), chunk=64) as run, Proxy(run.address) as proxy, DecodeNode(engine(NAME)) as node:
        proxy.damage = CutAfter(Tier.RESIDUAL, 1)
        _, error = interrupted(node.generate(proxy.address, request(1000)))
        assert made
        run.until(lambda: all(ref() is None for ref in made))
        del error


@pytest.mark.usefixtures("no_collector")
def test_a_thousand_aborts_leave_no_kv():
    eng = Tracking(engine(NAME))
    with prefill_node(engine(NAME), chunk=64) as run, DecodeNode(eng) as node:
        finish(node.generate(run.address, request(100)))
        for i in range(1000):
            generation = node.generate(run.address, request(100))
            for _ in range(i % 5):
                next(generation)
            generation.close()
        assert eng.alive == 0
        asked = Asked(node.generate(run.address, request(100)))
        assert asked.outcome().finish == "length"
        assert nothing_is_held(run, node)

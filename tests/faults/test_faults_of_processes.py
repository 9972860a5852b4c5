"""A prefill node in a process of its own that is killed, stopped, restarted or asked to end."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from faults.proxy import Proxy, is_data
from lynxkv.bench.processes import READY
from lynxkv.codec import Tier
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.errors import DeadlineExceeded, PeerLost, StaleGeneration, TransferError
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import Drafted, SamplingParams, Verified
from models import model, prompt
from node.running import Asked, finish, interrupted, prefill_node

RATE = "150kB"
"""Such that a transfer takes seconds: there is time to interfere."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("tiny")
    model("mqa-80").save_pretrained(where)
    return str(where)


@pytest.fixture(scope="module")
def eng(folder):
    return TransformersEngine.load(folder)


def request(on_loss="fail", tokens=500):
    return Request(
        tuple(prompt(tokens)), SamplingParams(max_tokens=20, temperature=1.0, seed=4), cap=8, on_loss=on_loss
    )


class Peer:
    def __init__(self, process, address):
        self.process, self.address = process, address

    def signal(self, number):
        self.process.send_signal(number)


@contextmanager
def prefill(folder, *options, port=0):
    """A running ``lynxkv prefill``; killed at the end."""
    command = [sys.executable, "-m", "lynxkv.cli.main", "prefill", "--model", folder, "--chunk", "128"]
    process = subprocess.Popen(
        [*command, "--port", str(port), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline().strip()
        assert READY in line, process.stderr.read()
        host, _, number = line.partition(READY)[2].rpartition(":")
        yield Peer(process, (host, int(number)))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def lasting(folder):
    """A node for tests that leave it alive."""
    with prefill(folder, "--link", RATE) as peer:
        yield peer


@pytest.fixture(scope="module")
def right(lasting, eng):
    """The uninterrupted answer."""
    with DecodeNode(eng) as node:
        return finish(node.generate(lasting.address, request()))[1].tokens


def drafting(generation):
    """Run until the first draft: the anchor is in, the residual is on its way."""
    while not isinstance(next(generation), Drafted):
        pass
    return generation


def killed_in(stage, peer, proxy):
    """Kill the peer at the first data frame of ``stage``."""

    def damage(header, payload):
        if is_data(header, stage) and peer.process.poll() is None:
            peer.process.kill()
            peer.process.wait()
        return payload

    proxy.damage = damage


@pytest.mark.parametrize("tier", [Tier.ANCHOR, Tier.RESIDUAL])
def test_a_node_killed_during_a_tier_fails_the_request_by_name(folder, eng, right, tier):
    """Field report 3: kill -9."""
    with prefill(folder, "--link", RATE) as peer, Proxy(peer.address) as proxy, DecodeNode(eng) as node:
        killed_in(tier, peer, proxy)
        events, error = interrupted(node.generate(proxy.address, request()))
    assert isinstance(error, PeerLost)
    verified = [event.draw.token for event in events if isinstance(event, Verified)]
    assert verified == right[: len(verified)]
    assert len(verified) <= 1


def test_a_node_killed_after_the_anchor_is_recomputed_and_the_answer_is_right(folder, eng, right):
    """Field report 3: kill -9."""
    with prefill(folder, "--link", RATE) as peer, DecodeNode(eng) as node:
        generation = drafting(node.generate(peer.address, request("recompute")))
        peer.signal(signal.SIGKILL)
        outcome = finish(generation)[1]
    assert outcome.tokens == right
    assert outcome.loss is not None


def test_a_node_that_is_stopped_fails_the_request_at_the_stall_deadline(lasting, eng):
    """Field report 3: SIGSTOP."""
    with DecodeNode(eng, stall_s=1.0) as node:
        generation = drafting(node.generate(lasting.address, request()))
        lasting.signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="nothing arrived for 1 s"):
            finish(generation)
        lasting.signal(signal.SIGCONT)
        assert finish(node.generate(lasting.address, request()))[1].finish == "length"


def test_a_node_that_was_stopped_before_it_was_asked_fails_the_request_at_a_deadline(lasting, eng):
    """Field report 3."""
    with DecodeNode(eng, connect_s=1.0, admit_s=1.0, stall_s=1.0) as node:
        lasting.signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            finish(node.generate(lasting.address, request()))
        lasting.signal(signal.SIGCONT)
        assert finish(node.generate(lasting.address, request()))[1].finish == "length"


def test_a_restarted_node_on_the_same_port_serves_new_requests(folder, eng, right):
    """Field report 17."""
    with DecodeNode(eng) as node:
        with prefill(folder, "--link", RATE) as peer:
            generation = drafting(node.generate(peer.address, request()))
            peer.signal(signal.SIGKILL)
            with pytest.raises(PeerLost):
                finish(generation)
        with prefill(folder, port=peer.address[1]) as again:
            assert again.address == peer.address
            for _ in range(2):
                assert finish(node.generate(peer.address, request()))[1].tokens == right


def test_a_node_restarted_between_admission_and_pull_refuses_the_stale_pull(eng):
    """Field report 17: behind one address, another life of the node."""
    with prefill_node(eng) as old, prefill_node(eng) as new, Proxy(old.address) as proxy, DecodeNode(eng) as node:
        link = node._links.call(node._links.to(proxy.address))
        pull = link.pull

        async def elsewhere(wanted, sink, **options):
            return await (await node._links.to(new.address)).pull(wanted, sink, **options)

        link.pull = elsewhere
        with pytest.raises(StaleGeneration, match="restarted"):
            finish(node.generate(proxy.address, request()))
        link.pull = pull
        assert finish(node.generate(proxy.address, request()))[1].finish == "length"


def test_sigterm_lets_a_running_transfer_finish(folder, eng, right):
    """Field report 3: draining."""
    with prefill(folder, "--link", RATE, "--drain", "60") as peer, DecodeNode(eng) as node:
        generation = drafting(node.generate(peer.address, request()))
        peer.signal(signal.SIGTERM)
        assert finish(generation)[1].tokens == right
        assert peer.process.wait(30) == 0


def test_sigterm_ends_what_does_not_finish_in_time_by_name(folder, eng):
    """Field report 3: draining."""
    with prefill(folder, "--link", "20kB", "--drain", "0.5") as peer, DecodeNode(eng) as node:
        begun = threading.Event()
        asked = Asked(node.generate(peer.address, request(), lambda _: begun.set()))
        assert begun.wait(60)
        peer.signal(signal.SIGTERM)
        with pytest.raises(TransferError):
            asked.outcome()
        assert peer.process.wait(30) == 0
        assert "Traceback" not in peer.process.stderr.read()


def test_a_dead_decode_process_leaves_nothing_at_the_prefill_node(folder, eng):
    """Field report 3: kill -9 on the other side."""
    program = (
        "import sys\n"
        "from lynxkv.engine.transformers import TransformersEngine\n"
        "from lynxkv.node.decode import DecodeNode, Request\n"
        "from lynxkv.speculation import Drafted, SamplingParams\n"
        "node = DecodeNode(TransformersEngine.load(sys.argv[1]))\n"
        "for event in node.generate(('127.0.0.1', int(sys.argv[2])), Request(tuple(range(1, 190)) * 2)):\n"
        "    print(type(event).__name__, flush=True)\n"
    )
    with prefill_node(eng, chunk=128, rate=50_000) as run:
        with subprocess.Popen(
            [sys.executable, "-c", program, folder, str(run.address[1])], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout.readline().strip() == "Verified"
            os.kill(child.pid, signal.SIGKILL)
        assert run.idle()
        run.until(lambda: run.node.server.counters().connections == 0)

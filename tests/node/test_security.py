"""A decode node reads KV of a prefill node only if they know each other."""

import pytest

from certificates import Authority
from lynxkv.errors import HandshakeRefused, PeerLost
from lynxkv.node.decode import DecodeNode
from lynxkv.transport import Security
from models import engine
from node.running import finish, interrupted, nothing_is_held, prefill_node, request

NAME = "mqa-80"
SECRET = "correct horse battery staple"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("ours"))
    return [Security(*authority.issue(name), authority.ca, SECRET) for name in ("prefill", "decode")]


def test_nodes_that_know_each_other_answer_as_nodes_without_security(nodes):
    eng = engine(NAME)
    with prefill_node(eng) as run, DecodeNode(eng) as node:
        right = finish(node.generate(run.address, request()))[1].tokens
    with prefill_node(eng, security=nodes[0]) as run, DecodeNode(eng, security=nodes[1]) as node:
        assert finish(node.generate(run.address, request()))[1].tokens == right
        assert nothing_is_held(run, node)


@pytest.mark.parametrize("on_loss", ["fail", "recompute"])
def test_a_node_without_the_secret_gets_no_kv_and_its_prompt_stays_here(on_loss, caplog):
    eng = engine(NAME)
    for theirs in (None, Security(secret="another")):
        with prefill_node(eng, security=Security(secret=SECRET)) as run, DecodeNode(eng, security=theirs) as node:
            events, error = interrupted(node.generate(run.address, request(on_loss=on_loss)))
            assert events == []
            assert isinstance(error, HandshakeRefused)
            assert run.call(run.node.holdings).entries == 0
            assert SECRET not in str(error) + caplog.text
            assert nothing_is_held(run, node)


def test_a_node_without_a_certificate_gets_no_kv(nodes):
    eng = engine(NAME)
    with prefill_node(eng, security=nodes[0]) as run, DecodeNode(eng, security=Security(secret=SECRET)) as node:
        _, error = interrupted(node.generate(run.address, request()))
        assert isinstance(error, PeerLost | HandshakeRefused)
        assert run.call(run.node.holdings).entries == 0
        assert nothing_is_held(run, node)

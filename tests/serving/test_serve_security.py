"""Nodes that know each other by certificates and a secret; everyone else gets nothing, on HTTP and on the KV's port."""

import ssl

import httpx
import pytest

from certificates import Authority
from cli.commands import complaint
from lynxkv.errors import LynxError
from lynxkv.node.decode import DecodeNode, Request
from lynxkv.speculation import SamplingParams
from lynxkv.transport import Security
from serving.apps import ask
from serving.processes import fleet

PROMPT = {"prompt": "word " * 30, "max_tokens": 4, "temperature": 0}
SECRETS = {"LYNXKV_NODE_SECRET": "nodes-only", "LYNXKV_API_KEY": "clients-only"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def node_files(authority):
    return authority.issue("node")


@pytest.fixture(scope="module")
def closed(tiny_folder, authority, node_files):
    """Workers and router with certificates, a secret and a key."""
    cert, key = node_files
    tls = ("--tls-cert", cert, "--tls-key", key, "--tls-ca", authority.ca)
    with fleet(tiny_folder, prefill=tls, decode=tls, router=tls, secrets=SECRETS) as all_of_them:
        yield all_of_them


def client(authority, *, certificate=None, token=None):
    context = ssl.create_default_context(cafile=str(authority.ca))
    if certificate is not None:
        context.load_cert_chain(*certificate)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx.Client(verify=context, headers=headers, timeout=60)


def test_a_client_with_a_key_is_answered_over_tls_without_a_certificate(closed, authority):
    _, _, router = closed
    assert router.url.startswith("https://")
    with client(authority, token="clients-only") as known:
        answer = known.post(f"{router.url}/v1/completions", json=PROMPT)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
    for token in (None, "nodes-only", "guess"):
        with client(authority, token=token) as unknown:
            assert unknown.post(f"{router.url}/v1/completions", json=PROMPT).status_code == 401


def test_a_worker_talks_to_nobody_without_a_certificate_of_its_authority(closed, authority, tmp_path):
    (prefill,), (decode,), _ = closed
    other = Authority(tmp_path, "somebody else's").issue("node")
    for certificate in (None, other):
        with client(authority, certificate=certificate, token="nodes-only") as stranger:
            for worker in (prefill, decode):
                with pytest.raises(httpx.TransportError):
                    stranger.get(f"{worker.url}/health")
    for worker in (prefill, decode):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{worker.url.partition('://')[2]}/health")


def test_a_certificate_without_the_secret_or_a_key_is_not_enough(closed, authority, node_files):
    (prefill,), (decode,), _ = closed
    with client(authority, certificate=node_files) as half:
        for worker in (prefill, decode):
            assert half.post(f"{worker.url}/v1/completions", json=PROMPT).status_code == 401
            assert half.get(f"{worker.url}/lynx/requests").status_code == 401
    with client(authority, certificate=node_files, token="nodes-only") as whole:
        assert whole.get(f"{decode.url}/lynx/requests").status_code == 200


@pytest.mark.parametrize("known", ["nothing", "secret", "certificate", "both"])
def test_kv_is_pulled_with_both_only(closed, authority, node_files, eng, known):
    (prefill,), *_ = closed
    cert, key = node_files if known in ("certificate", "both") else (None, None)
    security = Security(
        cert, key, authority.ca if cert else None, "nodes-only" if known in ("secret", "both") else None
    )
    host, _, port = prefill.kv.rpartition(":")
    request = Request(tuple(eng.encode("some text")), SamplingParams(max_tokens=2), deadline_s=20)
    with DecodeNode(eng, security=security) as node:
        generation = node.generate((host, int(port)), request)
        if known == "both":
            assert len(list(generation)) >= 2
            return
        with pytest.raises(LynxError) as caught:
            list(generation)
        assert "nodes-only" not in str(caught.value)


def test_a_secret_alone_is_enough_on_the_loopback(tiny_folder):
    with fleet(tiny_folder, secrets={"LYNXKV_NODE_SECRET": "nodes-only"}) as ((prefill,), (decode,), router):
        assert ask(router.url, "/v1/completions", PROMPT)[0] == 200
        for worker in (prefill, decode):
            status, _, told = ask(worker.url, "/v1/completions", PROMPT)
            assert (status, told["error"]["code"]) == (401, "invalid_api_key")
        metrics = ask(prefill.url, "/metrics")
        assert metrics[0] == 200  # asked from the loopback


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prefill", "--host", "0.0.0.0"), "--advertise"),
        (("prefill", "--host", "0.0.0.0", "--advertise", "here"), "--node-secret"),
        (("decode", "--host", "0.0.0.0"), "--node-secret"),
        (("router", "--host", "0.0.0.0", "--prefill", "http://a:1", "--decode", "http://b:1"), "--api-key"),
        (("decode", "--tls-cert", "x"), "the authority"),
        (("decode", "--tls-cert", "x", "--tls-key", "y", "--tls-ca", "z"), "x"),
        (("decode", "--node-secret", ""), "1..1024"),
    ],
)
def test_nothing_is_opened_to_others_by_mistake(arguments, words):
    assert words in complaint("serve", *arguments)

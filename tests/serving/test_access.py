"""Who may ask, and what may be bound."""

import pytest
from fastapi import FastAPI

from lynxkv.errors import RequestError
from lynxkv.serving.access import Access, bind, is_loopback, refuse_open
from serving.apps import ask, site


@pytest.fixture(scope="module")
def guarded():
    app = FastAPI()
    for path in ("/v1/models", "/lynx/state", "/health", "/metrics"):
        app.get(path)(lambda: {})
    app.add_middleware(Access, tokens=["one", "two"])
    with site() as where, where.serving(app) as url:
        yield url


@pytest.mark.parametrize("path", ["/v1/models", "/lynx/state", "/v1/no/such"])
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer three", "Basic one", "Bearer one two", "one"])
def test_without_a_key_nothing_is_told(guarded, path, given):
    status, headers, told = ask(guarded, path, headers={} if given is None else {"authorization": given})
    assert status == 401
    assert told["error"]["code"] == "invalid_api_key"
    assert headers["www-authenticate"] == "Bearer"
    assert "one" not in str(told).split()


@pytest.mark.parametrize("key", ["one", "two"])
def test_each_key_opens(guarded, key):
    assert ask(guarded, "/v1/models", headers={"authorization": f"Bearer {key}"})[0] == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_what_operators_read_on_this_machine_needs_no_key(guarded, path):
    assert ask(guarded, path)[0] == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_the_loopback_is_known(host, loopback):
    assert is_loopback(host) is loopback


def test_listening_beyond_the_loopback_needs_protection():
    with pytest.raises(RequestError, match="--api-key, or --insecure"):
        refuse_open("0.0.0.0", guarded=False, insecure=False, what="--api-key")
    refuse_open("0.0.0.0", guarded=True, insecure=False, what="--api-key")
    refuse_open("0.0.0.0", guarded=False, insecure=True, what="--api-key")
    refuse_open("127.0.0.1", guarded=False, insecure=False, what="--api-key")


def test_a_port_in_use_is_named():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RequestError, match=f"127.0.0.1:{port}: Address already in use"):
            bind("127.0.0.1", port)

import pytest

from lynxkv.cli.generate import parse_address
from lynxkv.cli.prefill import parse_bytes
from lynxkv.errors import RequestError


@pytest.mark.parametrize(("text", "size"), [("4GB", 4 << 30), ("1.5MB", 3 << 19), ("77", 77), ("2kb", 2048), ("9B", 9)])
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "many", "infGB", "nan"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(RequestError, match="4GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "address"), [("127.0.0.1:7600", ("127.0.0.1", 7600)), ("[::1]:80", ("::1", 80)), ("host:1", ("host", 1))]
)
def test_addresses_are_read(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:0", "host:70000", "host:-1"])
def test_addresses_that_are_none_are_refused(text):
    with pytest.raises(RequestError, match="7600"):
        parse_address(text)

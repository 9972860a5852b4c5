"""``lynxkv prefill`` as a user runs it."""

import signal
import socket

import pytest

from cli.commands import complaint, ended, prefill, the_line


def test_an_interrupt_ends_it_and_frees_the_port(tiny):
    with prefill(tiny) as (process, address):
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
    assert code == 130
    assert the_line(err) == "interrupted"
    host, _, port = address.rpartition(":")
    socket.create_server((host, int(port))).close()


def test_a_termination_drains_and_is_no_error(tiny):
    with prefill(tiny) as (process, _):
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
    assert (code, err) == (0, "")


def test_a_port_in_use_is_named(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = complaint("prefill", "--model", tiny, "--port", port)
    assert f"127.0.0.1:{port}" in line
    assert "choose another port" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--link", "fast"), "a rate such as 100mbit"),
        (("--memory", "much"), "a size like 4GB"),
        (("--chunk", "100"), "a multiple of 64"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--model", "no-such-model"), "smollm2-135m"),
    ],
)
def test_a_bad_option_is_refused_by_name(tiny, options, words):
    assert words in complaint("prefill", "--model", tiny, "--port", 0, *options)

"""``lynxkv generate`` as a user runs it."""

import json
import signal
import socket
import threading

import pytest

from cli.commands import complaint, ended, lynxkv, prefill, save_model, start, the_line
from faults.proxy import Proxy, is_data
from lynxkv.codec import Tier


def asked(peer, tiny, document, *more):
    return "generate", "--prefill", peer, "--model", tiny, "--document", document, "--prompt", "Why?", *more


def test_an_answer_goes_to_standard_output_and_its_figures_to_standard_error(peer, tiny, document):
    arguments = asked(peer, tiny, document, "--max-tokens", 12, "--temperature", 1, "--seed", 3)
    code, text, figures = lynxkv(*arguments)
    assert code == 0
    assert text
    assert "12 answer tokens, finish length" in figures
    assert "seed 3" in figures
    code, out, err = lynxkv(*arguments, "--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert result["text"] == text
    assert len(result["tokens"]) == 12
    assert result.keys() == {
        "prompt_tokens", "tokens", "text", "finish", "seed", "drafted", "accepted", "bytes", "wire_bytes", "loss",
        "target", "times",
    }  # fmt: skip
    assert result["bytes"].keys() == {"anchor", "residual", "exact"}
    assert result["loss"] is None


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
def test_every_scheme_answers(peer, tiny, document, scheme):
    code, out, _ = lynxkv(*asked(peer, tiny, document, "--max-tokens", 4, "--json", "--scheme", scheme))
    assert code == 0
    assert json.loads(out)["bytes"]["residual"] == 0


def test_an_unknown_alias_names_the_known_ones(document):
    assert "smollm2-135m" in complaint(*asked("127.0.0.1:1", "no-such-model", document))


def test_a_missing_document_is_named(tiny):
    assert "/no/such/file.txt" in complaint(*asked("127.0.0.1:1", tiny, "/no/such/file.txt"))


def test_a_document_that_is_no_text_is_named(tiny, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    assert "UTF-8" in complaint(*asked("127.0.0.1:1", tiny, path))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--scheme", "int2", "bf16, int8, int4, lynx"),
        ("--prefill", "nowhere", "an address like"),
        ("--temperature", "-1", "temperature must be"),
        ("--max-tokens", "0", "max_tokens must be"),
        ("--cap", "-1", "cap must be"),
        ("--deadline", "0", "deadline_s must be"),
        ("--dtype", "int8", "dtype must be one of"),
        ("--kv-dtype", "float8", "dtype must be one of"),
        ("--tokens", "3", "no room for a document"),
    ],
)
def test_a_bad_option_is_refused_by_name(tiny, document, option, value, words):
    assert words in complaint(*asked("127.0.0.1:1", tiny, document, option, value))


def test_a_choice_that_is_none_is_refused_with_those_there_are(tiny, document):
    code, out, err = lynxkv(*asked("127.0.0.1:1", tiny, document, "--verify", "never"))
    assert (code, out) == (2, "")
    assert "batched" in err
    assert "stepwise" in err


def test_nobody_listening_is_said(tiny, document):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "is the node running there" in complaint(*asked(f"127.0.0.1:{port}", tiny, document))


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(peer, tiny, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("a long story " * 200)
    line = complaint(*asked(peer, tiny, path))
    assert "context is 1024 tokens; got 2" in line


def test_another_model_at_the_other_end_is_refused_by_field(peer, document, tmp_path):
    line = complaint(*asked(peer, save_model(tmp_path, seed=1), document))
    assert "weights" in line


def test_another_kv_dtype_at_the_other_end_is_refused_with_both_values(peer, tiny, document):
    line = complaint(*asked(peer, tiny, document, "--kv-dtype", "float16"))
    assert "float16" in line
    assert "bfloat16" in line


def port_of(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("tier", [Tier.ANCHOR, Tier.RESIDUAL])
def test_a_peer_that_is_killed_ends_the_command_with_one_line(tiny, document, tier):
    with prefill(tiny) as (process, address), Proxy(port_of(address)) as proxy:

        def kill(header, payload):
            if is_data(header, tier):
                process.kill()
                process.wait()
                return None
            return payload

        proxy.damage = kill
        code, _, err = lynxkv(*asked("{}:{}".format(*proxy.address), tiny, document))
    assert code == 1
    assert "ended" in the_line(err)


def test_a_peer_that_is_killed_after_the_anchor_is_done_without_if_asked(tiny, document, peer):
    arguments = "--temperature", 1, "--seed", 5, "--max-tokens", 20, "--json"
    right = json.loads(lynxkv(*asked(peer, tiny, document, *arguments))[1])["text"]
    with Proxy(port_of(peer)) as proxy:
        proxy.damage = lambda header, payload: None if is_data(header, Tier.RESIDUAL) else payload
        code, out, _ = lynxkv(
            *asked("{}:{}".format(*proxy.address), tiny, document, "--on-loss", "recompute", *arguments)
        )
    assert code == 0
    assert json.loads(out)["text"] == right
    assert json.loads(out)["loss"] is not None


@pytest.fixture
def stalling(peer):
    """A proxy through which no residual passes; ``reached`` is set once one should."""
    with Proxy(port_of(peer)) as proxy:
        proxy.reached = threading.Event()

        def stall(header, payload):
            if is_data(header, Tier.RESIDUAL):
                proxy.flow.clear()
                proxy.reached.set()
            proxy.flow.wait()
            return payload

        proxy.damage = stall
        yield proxy


def test_a_link_that_stalls_ends_the_command_at_its_deadline(tiny, document, stalling):
    address = "{}:{}".format(*stalling.address)
    code, _, err = lynxkv(*asked(address, tiny, document, "--deadline", 3))
    assert code == 1
    assert "before the request's deadline" in the_line(err)


def test_an_interrupt_in_the_middle_ends_the_command(tiny, document, stalling):
    process = start(*asked("{}:{}".format(*stalling.address), tiny, document))
    assert stalling.reached.wait(60)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert the_line(err) == "interrupted"


def test_a_reader_that_goes_away_ends_the_command_quietly(tiny, document, stalling):
    process = start(*asked("{}:{}".format(*stalling.address), tiny, document, "--max-tokens", 60))
    assert stalling.reached.wait(60)
    process.stdout.close()
    process.stdout = None
    stalling.damage = lambda _, payload: payload
    stalling.flow.set()
    code, _, _ = ended(process)
    assert code in (0, 1)

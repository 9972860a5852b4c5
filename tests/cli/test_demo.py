"""``lynxkv demo`` as a user runs it."""

import json
import signal

import pytest

from cli.commands import all_end, children, complaint, ended, lynxkv, start

KEYS = {
    "scheme", "bytes", "ttft_prefill_s", "ttft_draft_s", "ttft_verified_s", "ttkt32_s", "drafted", "accepted", "equal",
}  # fmt: skip


def check(out):
    """What programs rely on."""
    schemes = json.loads(out)["schemes"]
    assert [row["scheme"] for row in schemes] == ["bf16", "int8", "int4", "lynx"]
    for row in schemes:
        assert row.keys() >= KEYS
        assert row["equal"] is True
        assert row["ttft_prefill_s"] <= row["ttft_draft_s"] <= row["ttft_verified_s"] <= row["ttkt32_s"]
    by_name = {row["scheme"]: row for row in schemes}
    assert by_name["bf16"]["bytes"] > by_name["int8"]["bytes"] > by_name["int4"]["bytes"]
    assert by_name["lynx"]["drafted"] > 0
    for plain in ("bf16", "int8", "int4"):
        assert by_name[plain]["drafted"] == 0
        assert by_name[plain]["ttft_draft_s"] == by_name[plain]["ttft_verified_s"]


def test_it_prints_one_object_for_programs(tiny, document):
    code, out, _ = lynxkv(
        "demo", "--json", "--model", tiny, "--document", document, "--tokens", 500, "--max-tokens", 40,
        "--link", "2mbit", "--temperature", 1, "--seed", 1, "--prompt", "Why?",
    )  # fmt: skip
    assert code == 0
    check(out)


@pytest.mark.slow
def test_it_prints_one_object_for_programs_with_a_real_model():
    code, out, _ = lynxkv("demo", "--json", "--tokens", 300, "--max-tokens", 40, "--link", "20mbit")
    assert code == 0
    check(out)


def running(tiny, document):
    """A demo in the middle of a request over a slow link, and its children."""
    process = start(
        "demo", "--model", tiny, "--document", document, "--tokens", 500, "--link", "40kbit", "--prompt", "Why?"
    )
    for line in process.stdout:
        if "prefill and a decode process" in line:
            break
    for line in process.stdout:
        if line.startswith("prompt of"):
            return process, children(process.pid)
    raise AssertionError(process.stderr.read())


def test_an_interrupt_in_the_middle_ends_it_and_its_children(tiny, document):
    process, started = running(tiny, document)
    assert len(started) == 2
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert err.strip().splitlines()[-1] == "lynxkv: interrupted"
    assert all_end(started, 0)


def test_its_children_end_when_it_is_killed(tiny, document):
    process, started = running(tiny, document)
    assert len(started) == 2
    process.kill()
    process.communicate()
    assert all_end(started)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--link", "fast"), "a rate such as 100mbit"),
        (("--tokens", "0"), "--tokens and --max-tokens must be at least 1"),
        (("--document", "/no/such/file.txt"), "/no/such/file.txt"),
        (("--model", "no-such-model"), "smollm2-135m"),
    ],
)
def test_a_bad_option_is_refused_by_name(tiny, options, words):
    assert words in complaint("demo", "--model", tiny, "--json", *options)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(tiny):
    code, out, err = lynxkv("demo", "--model", tiny, "--json", "--tokens", 5000)
    assert (code, out) == (1, "")
    assert "context is 1024 tokens; got 5000" in err

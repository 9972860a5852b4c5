"""``lynxkv serve all``: three processes that begin together and end together."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from cli.commands import all_end, children, complaint, ended, the_line
from serving.apps import Stream, ask, until
from serving.processes import served

COMPLETE = "/v1/completions"
LONG = {"prompt": "word " * 60, "max_tokens": 600, "temperature": 0}


@pytest.fixture
def running(tiny_folder):
    with served("all", "--model", tiny_folder, "--chunk", "128") as each:
        yield each


def began(url, body=LONG):
    """A stream that has told its first token."""
    stream = Stream(url, COMPLETE, body)
    assert stream.begin() == 200
    stream.event()
    return stream


def test_the_official_client_talks_with_a_real_model_and_the_page_is_there():
    with served("all", "--model", "smollm2-135m", "--link", "200mbit") as it:
        assert ask(it.url, "/ui/")[0] == 200
        with openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client:
            wanted = {
                "model": client.models.list().data[0].id,
                "messages": [{"role": "user", "content": "What is a cache? " * 30}],
                "max_tokens": 16,
                "temperature": 0,
            }
            whole = client.chat.completions.create(**wanted)
            chunks = client.chat.completions.create(**wanted, stream=True, extra_body={"lynx": {"emit": "draft"}})
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content != ""
        it.send(signal.SIGTERM)
        code, _, err = ended(it.process)
        assert (code, err) == (0, "")


def test_an_interrupt_ends_all_at_once_and_frees_the_port(running):
    pids = children(running.process.pid)
    stream = began(running.url)
    running.send(signal.SIGINT)
    code, _, err = ended(running.process)
    assert (code, the_line(err)) == (130, "interrupted")
    assert len(pids) == 3
    assert all_end(pids)
    assert (None, "[DONE]") not in stream.rest()
    socket.create_server(("127.0.0.1", int(running.port))).close()


def test_a_termination_lets_answers_end_and_is_no_error(running):
    pids = children(running.process.pid)
    stream = began(running.url)
    running.send(signal.SIGTERM)
    until(lambda: ask(running.url, "/health")[2]["status"] == "draining")
    assert ask(running.url, COMPLETE, LONG)[0] == 503
    assert stream.rest()[-1] == (None, "[DONE]")
    code, _, err = ended(running.process)
    assert (code, err) == (0, "")
    assert all_end(pids)


def test_an_answer_that_takes_longer_than_the_drain_is_told(tiny_folder):
    with served("all", "--model", tiny_folder, "--link", "20kB", "--drain", "0.5") as it:
        stream = began(it.url)
        it.send(signal.SIGTERM)
        name, data = stream.rest()[-1]
        assert (name, data["error"]["code"]) == ("error", "draining")
        assert ended(it.process)[0] == 0


def test_when_one_process_dies_all_end_and_it_is_named(running):
    pids = children(running.process.pid)
    (pid,) = [pid for pid in pids if "decode" in words_of(pid)]
    os.kill(pid, signal.SIGKILL)
    code, _, err = ended(running.process)
    assert code == 1
    assert the_line(err) == "the decode process was ended by SIGKILL: the others end too"
    assert all_end(pids)


def test_children_do_not_outlive_a_parent_that_is_killed(running):
    pids = children(running.process.pid)
    running.kill()
    assert all_end(pids)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--link", "fast"), "a rate such as 100mbit"),
        (("--memory", "much"), "a size like 4GB"),
        (("--max-body", "much"), "a size like 4GB"),
        (("--chunk", "100"), "a multiple of 64"),
        (("--model", "no-such-model"), "smollm2-135m"),
        (("--host", "0.0.0.0"), "--api-key"),
        (("--tls-cert", "/no/such.pem"), "--tls-key"),
        (("--api-key", "a,,b"), "one of them is empty"),
    ],
)
def test_a_bad_option_is_one_line_before_anything_is_started(options, words):
    assert words in complaint("serve", "all", "--port", 0, *options)


def test_a_key_is_needed_where_one_is_given_and_shows_nowhere(tiny_folder):
    """It ends with its input, which its starter closes."""
    secrets = {"LYNXKV_API_KEY": "hush-hush"}
    with served("all", "--model", tiny_folder, "--until-stdin-closes", secrets=secrets, stdin=subprocess.PIPE) as it:
        pids = children(it.process.pid)
        for pid in [it.process.pid, *pids]:
            assert "hush-hush" not in words_of(pid)
        assert ask(it.url, "/v1/models")[0] == 401
        assert ask(it.url, "/v1/models", headers={"authorization": "Bearer hush-hush"})[0] == 200
        code, _, err = ended(it.process)
        assert (code, err) == (0, "")
        assert all_end(pids)


def words_of(pid):
    """Of a process's command line."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_what_is_not_installed_is_named():
    program = "import sys; sys.modules['fastapi'] = None; from lynxkv.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", "decode"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert the_line(done.stderr) == "this needs fastapi, which is not installed: pip install 'lynxkv[serve]'"

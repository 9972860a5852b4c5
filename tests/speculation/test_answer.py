import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynxkv.errors import RequestError
from lynxkv.speculation import Answer, Draw, SamplingParams


def _bytes(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def _run(text, **params):
    answer = Answer(SamplingParams(**{"max_tokens": 1000, **params}), (), _bytes)
    pieces = [answer.push(Draw(b)).text for b in text.encode() if answer.finish is None]
    return answer, pieces


def test_characters_of_several_tokens_come_out_whole():
    _, pieces = _run("aé€😀b", ignore_eos=True)
    assert [p for p in pieces if p] == ["a", "é", "€", "😀", "b"]


def test_text_that_may_begin_a_stop_string_is_held_back_until_certain():
    answer, pieces = _run("xSTOz", stop=("STOP",))
    assert pieces == ["x", "", "", "", "STOz"]
    assert answer.finish is None


def test_a_stop_string_ends_the_text_before_itself():
    answer, pieces = _run("hello STOP world", stop=("STOP", "zzz"))
    assert "".join(pieces) == answer.text == "hello "
    assert answer.finish == "stop"
    assert len(answer.tokens) == len("hello STOP")


def test_the_earliest_of_several_stop_strings_wins():
    answer, _ = _run("abcd", stop=("cd", "bcd"))
    assert answer.text == "a"


def test_stop_strings_are_not_looked_for_before_min_tokens():
    answer, _ = _run("ab" * 5, stop=("ab",), min_tokens=5)
    assert len(answer.tokens) >= 5


def test_the_last_token_of_a_length_limit_gives_what_text_there_is():
    answer = Answer(SamplingParams(max_tokens=2), (), _bytes)
    answer.push(Draw(ord("a")))
    step = answer.push(Draw("é".encode()[0]))
    assert (step.finish, answer.text) == ("length", "a\ufffd")


def test_an_end_token_ends_with_reason_stop_and_gives_no_text():
    answer = Answer(SamplingParams(max_tokens=9), (0,), _bytes)
    assert answer.push(Draw(65)).finish is None
    step = answer.push(Draw(0))
    assert (step.text, step.finish, answer.text) == ("", "stop", "A")


def test_ignore_eos_makes_end_tokens_tokens_like_others():
    answer = Answer(SamplingParams(max_tokens=9, ignore_eos=True), (0,), _bytes)
    assert answer.push(Draw(0)).finish is None


def test_a_copy_can_run_ahead_without_changing_the_original():
    answer, _ = _run("ab")
    ahead = answer.copy()
    ahead.push(Draw(ord("c")))
    assert (answer.text, ahead.text) == ("ab", "abc")


@given(st.text(max_size=40), st.text("ab", min_size=1, max_size=3))
def test_streamed_text_equals_the_whole_text_cut_at_the_stop(text, stop):
    answer, pieces = _run(text, stop=(stop,))
    assert "".join(pieces) == answer.text
    whole = text.split(stop)[0]
    assert answer.text == whole if stop in text else whole.startswith(answer.text)


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(RequestError, match="tokenizer"):
        Answer(SamplingParams(stop=("x",)), (), None)

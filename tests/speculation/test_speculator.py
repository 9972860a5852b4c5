import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynxkv.errors import PeerLost, RequestError
from lynxkv.speculation import (
    Answer,
    Drafted,
    Draw,
    Retracted,
    Sampler,
    SamplingParams,
    Speculator,
    State,
    Verified,
    Window,
)
from speculation.toy import VOCAB, ToySession, detokenize, plain, speculate

PARAMS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=1.0, seed=7),
    SamplingParams(max_tokens=40, temperature=0.8, seed=1, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(max_tokens=40, temperature=1.0, seed=3, presence_penalty=0.5, frequency_penalty=0.7),
    SamplingParams(max_tokens=40, repetition_penalty=1.5, logit_bias=((5, 4.0), (6, -100.0))),
    SamplingParams(max_tokens=40, min_tokens=20, temperature=1.0, seed=9, logprobs=3),
]


@pytest.mark.parametrize("verify", ["batched", "stepwise"])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("steps", [0, 1, 20, 1000])
def test_answer_is_what_plain_decoding_on_the_target_gives(params, steps, verify):
    answer, *_ = speculate(params, noise=1.0, steps=steps, eos=(0, 1), verify=verify)
    expected = plain(params, (0, 1))
    assert (answer.draws, answer.text, answer.finish) == (expected.draws, expected.text, expected.finish)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    noise=st.floats(0, 4),
    steps=st.integers(0, 70),
    cap=st.integers(0, 64),
    length=st.integers(1, 60),
    eos=st.sets(st.integers(0, VOCAB - 1), max_size=8),
    stop=st.lists(st.text("abcXYZ", min_size=1, max_size=3), max_size=2),
)
def test_any_window_any_noise_any_ending_equals_plain_decoding(seed, noise, steps, cap, length, eos, stop):
    params = SamplingParams(max_tokens=length, temperature=1.0, seed=seed, stop=tuple(stop))
    answer, events, session, _, speculator = speculate(params, noise=noise, steps=steps, eos=tuple(eos), cap=cap)
    expected = plain(params, tuple(eos))
    assert (answer.tokens, answer.text, answer.finish) == (expected.tokens, expected.text, expected.finish)
    verified = [e for e in events if isinstance(e, Verified)]
    assert [e.draw.token for e in verified] == answer.tokens
    assert "".join(e.text for e in verified) == answer.text
    assert speculator.state is State.FINISHED
    assert session.tokens[:4] == [1, 2, 3, 4]
    assert session.tokens[4:] in (answer.tokens, answer.tokens[:-1])


def test_drafts_are_verified_in_one_pass_over_the_window():
    answer, events, session, *_ = speculate(SamplingParams(max_tokens=40), noise=0.0, steps=20)
    drafted = [e for e in events if isinstance(e, Drafted)]
    assert len(drafted) == 20
    assert session.passes == [1] * 20 + [21] + [1] * (len(answer.tokens) - 22)
    assert Window(20, 20) in events


def test_cap_stops_drafting_and_waits_for_the_target():
    _, events, _, refinement, _ = speculate(SamplingParams(max_tokens=40), noise=0.0, steps=1000, cap=8)
    assert sum(isinstance(e, Drafted) for e in events) == 8
    assert refinement.blocked


def test_cap_zero_never_drafts():
    _, events, *_ = speculate(SamplingParams(max_tokens=10), noise=1.0, steps=1000, cap=0)
    assert not any(isinstance(e, Drafted | Window | Retracted) for e in events)


def test_a_wrong_draft_is_retracted_at_its_position_and_replaced():
    answer, events, *_ = speculate(SamplingParams(max_tokens=40), noise=3.0, steps=20)
    retracted = [e.position for e in events if isinstance(e, Retracted)]
    drafted = {e.position: e.token for e in events if isinstance(e, Drafted)}
    assert len(retracted) == 1
    assert drafted[retracted[0]] != answer.tokens[retracted[0]]
    assert all(drafted[p] == answer.tokens[p] for p in drafted if p < retracted[0])


def test_eos_in_a_draft_stops_drafting_and_nothing_else():
    params = SamplingParams(max_tokens=40)
    eos = (plain(params).tokens[5],)
    expected = plain(params, eos)
    answer, events, _, refinement, _ = speculate(params, noise=0.0, steps=1000, eos=eos)
    assert refinement.blocked
    assert answer.tokens == expected.tokens
    assert answer.finish == "stop"
    first = next(i for i, e in enumerate(events) if isinstance(e, Drafted))
    assert not any(e.finish for e in events[:first] if isinstance(e, Verified))


def test_drafts_carry_the_text_that_would_be_certain_with_them():
    params = SamplingParams(max_tokens=12)
    tokens = plain(params).tokens
    held_back = detokenize(tokens[4:6])
    answer, events, *_ = speculate(SamplingParams(max_tokens=12, stop=(held_back + "?",)), noise=0.0, steps=1000)
    drafted = [e.text for e in events if isinstance(e, Drafted)]
    assert events[0].text + "".join(drafted) == answer.text
    assert drafted[3:6] == ["", "", detokenize(tokens[4:7])]


def test_eos_inside_an_accepted_window_leaks_no_token_logprob_or_text():
    """Field report 14."""
    params = SamplingParams(max_tokens=40, logprobs=2)
    tokens = plain(params).tokens
    params = SamplingParams(max_tokens=40, logprobs=2, stop=(detokenize(tokens[4:6]),))
    answer, events, *_ = speculate(params, noise=0.0, steps=1000)
    verified = [e for e in events if isinstance(e, Verified)]
    assert [e.draw.token for e in verified] == tokens[:6]
    assert answer.text == "".join(e.text for e in verified) == detokenize(tokens[:4])
    assert all(len(e.draw.top) == 2 for e in verified)


def test_length_is_exact_when_it_falls_inside_the_window():
    answer, *_ = speculate(SamplingParams(max_tokens=7), noise=0.0, steps=1000)
    assert len(answer.tokens) == 7
    assert answer.finish == "length"


def test_one_token_answers_need_no_kv_at_all():
    answer, events, session, *_ = speculate(SamplingParams(max_tokens=1), noise=0.0, steps=5)
    assert len(answer.tokens) == len(events) == 1
    assert session.passes == []


def test_a_lost_target_fails_and_no_draft_passes_for_verified():
    params = SamplingParams(max_tokens=40)

    class Lost:
        calls = 0

        def first(self):
            return Draw(5)

        def ready(self):
            pass

        def refine(self, block):
            self.calls += 1
            if self.calls > 3:
                raise PeerLost("the peer is gone")
            return False

    speculator = Speculator(ToySession([1], 1.0), Sampler(params, [1], ()), Answer(params, (), None), Lost())
    events = []
    with pytest.raises(PeerLost):
        events.extend(speculator.run())
    assert speculator.state is State.FAILED


@pytest.mark.parametrize(("name", "value"), [("verify", "hopeful"), ("cap", -1)])
def test_bad_options_are_refused(name, value):
    params = SamplingParams()
    with pytest.raises(RequestError, match=str(value)):
        Speculator(ToySession([1], 0), Sampler(params, [1], ()), Answer(params, (), None), None, **{name: value})

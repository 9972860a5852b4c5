import numpy as np
import pytest

from lynxkv.errors import NotFinite, RequestError
from lynxkv.speculation import Sampler, SamplingParams, gumbel


def _logits(values):
    return np.asarray(values, dtype=np.float32)


def test_noise_is_a_function_of_seed_sample_position_and_token_and_never_changes():
    noise = gumbel(7, 0, 3, 8)
    assert np.array_equal(gumbel(7, 0, 3, 5), noise[:5])
    for other in (gumbel(8, 0, 3, 8), gumbel(7, 1, 3, 8), gumbel(7, 0, 4, 8)):
        assert not np.any(other == noise)
    np.testing.assert_allclose(
        gumbel(1, 2, 3, 4),
        [-0.6858337622251235, -0.39920842065106577, -0.3115990568809628, 1.7260834145833075],
        rtol=1e-12,
    )


def test_every_bit_of_a_large_seed_counts():
    top = (1 << 64) - 1
    assert not np.any(gumbel(top, 0, 0, 8) == gumbel(top - 1, 0, 0, 8))


def test_draws_follow_the_tempered_distribution():
    logits = _logits([0.0, 1.0, 2.0, -1.0])
    p = np.exp(logits / 0.7)
    p /= p.sum()
    sampler = Sampler(SamplingParams(temperature=0.7, seed=5), [], ())
    counts = np.bincount([sampler.draw(logits, [0] * i).token for i in range(4000)], minlength=4)
    chi2 = (((counts - 4000 * p) ** 2) / (4000 * p)).sum()
    assert chi2 < 16.3  # 3 degrees of freedom, p = 0.001


def test_greedy_takes_the_likeliest_and_the_first_of_equals():
    assert Sampler(SamplingParams(), [], ()).draw(_logits([1, 3, 3, 2]), []).token == 1


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=1, seed=0, top_k=2), {1, 3}),
        (SamplingParams(temperature=1, seed=0, top_p=0.5), {3}),
        (SamplingParams(temperature=1, seed=0, top_p=0.9), {1, 3}),
        (SamplingParams(temperature=1, seed=0, min_p=0.3), {1, 3}),
    ],
)
def test_filters_leave_exactly_the_tokens_they_should(params, allowed):
    logits = _logits(np.log([0.06, 0.3, 0.04, 0.6]))
    sampler = Sampler(params, [], ())
    assert {sampler.draw(logits, [0] * i).token for i in range(300)} == allowed


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    sampler = Sampler(SamplingParams(temperature=1, seed=0, top_p=0.5), [], ())
    assert {sampler.draw(_logits([2, 2, -200, -200]), [0] * i).token for i in range(100)} == {0}


def test_presence_and_frequency_penalties_count_the_answer_only():
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.5), [1], ())
    assert sampler.draw(_logits([1.0, 1.4]), [1]).token == 0
    assert sampler.draw(_logits([1.0, 1.4]), []).token == 1


def test_repetition_penalty_counts_prompt_and_answer():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [1], ())
    assert sampler.draw(_logits([1.0, 1.5, -3.0]), []).token == 0
    assert sampler.draw(_logits([1.0, 1.5, -3.0]), [0]).token == 1


def test_logit_bias_forces_and_bans():
    sampler = Sampler(SamplingParams(logit_bias=((0, 100.0), (2, -100.0))), [], ())
    assert sampler.draw(_logits([0, 5, 9]), []).token == 0


def test_end_tokens_wait_for_min_tokens():
    sampler = Sampler(SamplingParams(min_tokens=2, max_tokens=5), [], [1])
    assert sampler.draw(_logits([0, 9]), [0]).token == 0
    assert sampler.draw(_logits([0, 9]), [0, 0]).token == 1


def test_end_tokens_outside_the_vocabulary_hold_nothing_back():
    sampler = Sampler(SamplingParams(min_tokens=2, max_tokens=5), [], [-1, 7])
    assert sampler.draw(_logits([0, 9]), [0]).token == 1


def test_logprobs_are_of_the_raw_logits_whatever_the_temperature():
    draw = Sampler(SamplingParams(temperature=5.0, seed=0, logprobs=2), [], ()).draw(
        _logits(np.log([0.7, 0.1, 0.2])), []
    )
    assert [t for t, _ in draw.top] == [0, 2]
    assert draw.top[0][1] == pytest.approx(np.log(0.7), abs=1e-6)
    assert draw.logprob == pytest.approx(np.log([0.7, 0.1, 0.2][draw.token]), abs=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": 1e-310},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": 2},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, 5.0), (1, 6.0))},
        {"logit_bias": tuple((token, 1.0) for token in range(4097))},
        {"seed": -1},
        {"seed": 1 << 64},
        {"max_tokens": 0},
        {"min_tokens": 500},
        {"stop": ("",)},
        {"logprobs": 21},
    ],
)
def test_values_out_of_range_are_refused_by_name(bad):
    with pytest.raises(RequestError, match=next(iter(bad)).split("_")[0]):
        SamplingParams(**bad)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error_and_never_a_token(bad, temperature):
    with pytest.raises(NotFinite, match="position 2"):
        Sampler(SamplingParams(temperature=temperature, seed=1), [], ()).draw(_logits([0, bad, 1]), [0, 0])


def test_an_unseeded_request_gets_a_seed_and_a_seeded_one_keeps_its_own():
    assert SamplingParams().seeded().seed is not None
    assert SamplingParams(seed=4).seeded().seed == 4
    with pytest.raises(RequestError, match="seed"):
        Sampler(SamplingParams(temperature=1.0), [], ())

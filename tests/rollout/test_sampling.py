"""Sampling one token a row: the distribution, truncated sets, log-probabilities, uniform numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.rollout.sampling import invert_cdf, row_uniforms, sample, truncate

ALMOST_1 = np.float32(1 - 2**-24)  # above every number that jax.random.uniform gives
invert = jax.jit(invert_cdf)
draw_once = jax.jit(sample, static_argnames=("temperature", "top_k", "top_p"))
cut = jax.jit(truncate, static_argnames=("top_k", "top_p"))


def softmax(logits):
    """In float64."""
    weight = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weight / weight.sum()


def draw(logits_V, uniforms):
    logits_NV = np.broadcast_to(np.asarray(logits_V, np.float32), (len(uniforms), len(logits_V)))
    return np.asarray(invert(jnp.asarray(logits_NV), jnp.asarray(uniforms, jnp.float32)))


def random_logits(V):
    return np.random.default_rng(V).normal(size=V) * 1.5


@pytest.mark.parametrize(
    "V", [5, 256, 700], ids=["one short block", "one whole block", "three blocks, one short"]
)
def test_the_samples_are_distributed_as_softmax(V):
    """Chi-square of 20,000 draws with the uniform numbers that generation uses."""
    logits, N = random_logits(V), 20_000
    uniforms = row_uniforms(jax.random.key(0), jnp.arange(N), jnp.int32(3))
    counts = np.bincount(draw(logits, uniforms), minlength=V)
    assert len(counts) == V
    expected = N * softmax(logits)
    rare = expected < 5  # chi-square needs some expected draws in each class
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    chi2 = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    # Mean `freedom`, variance 2 * `freedom`: four standard deviations, once in 30,000 seeds.
    assert abs(chi2 - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("V", [256, 700])
def test_even_uniform_numbers_give_even_counts(V):
    """N evenly spread numbers fall into an interval of length p either floor(N p) or ceil(N p) times."""
    logits, N = random_logits(V), 10_000
    counts = np.bincount(draw(logits, (np.arange(N) + 0.5) / N), minlength=V)
    # 1 for the two ends; float32 sums shift an end by up to 1e-5, a tenth of the numbers' distance.
    assert np.abs(counts - N * softmax(logits)).max() <= 1.1


@pytest.mark.parametrize("seed", range(6))
def test_a_token_of_probability_zero_is_never_drawn(seed):
    """Half the tokens have none, and the uniform numbers lie around every step of the distribution function.

    Sums in parallel may round to a tiny step where there is none: searched alone, they gave such tokens.
    """
    rng = np.random.default_rng(seed)
    possible = rng.random(700) < 0.5
    logits = np.where(possible, np.log(rng.random(700)), -np.inf)
    steps = np.cumsum(softmax(logits)).astype(np.float32)
    around = np.concatenate([steps + np.float32(k * 2**-24) for k in range(-4, 5)])
    tokens = draw(logits, np.concatenate([np.clip(around, 0, ALMOST_1), [0.0, ALMOST_1]]))
    assert possible[tokens].all()


@pytest.mark.parametrize(
    ("possible", "first", "last"),
    [
        ([0, 1, 2], 0, 2),
        ([7], 7, 7),
        ([3, 255, 256], 3, 256),
        ([300, 690], 300, 690),
    ],
    ids=["at the start", "one token", "at the edge of a block", "later blocks only"],
)
def test_the_ends_of_the_uniform_numbers(possible, first, last):
    logits = np.full(700, -np.inf)
    logits[possible] = 0.0
    assert draw(logits, [0.0, ALMOST_1]).tolist() == [first, last]


def kept(logits, **options):
    row = np.asarray(cut(jnp.asarray([logits], jnp.float32), **options))[0]
    chosen = np.flatnonzero(row > -np.inf)
    np.testing.assert_array_equal(row[chosen], np.asarray(logits, np.float32)[chosen])
    return chosen.tolist()


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(0, [0, 1, 2, 3]), (1, [1]), (2, [1, 2, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])],
    ids=["off", "one", "a tie at the edge is kept", "three", "all", "more than there are"],
)
def test_top_k(top_k, expected):
    assert kept([1.0, 3.0, 2.0, 2.0], top_k=top_k) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, [2]),
        (0.45, [2]),
        (0.55, [1, 2]),
        (0.74, [1, 2]),
        (0.8, [0, 1, 2, 3]),
        (0.99, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
    ids=["tiny keeps the likeliest", "below one", "above one", "below two", "a tie", "nearly all", "off"],
)
def test_top_p(top_p, expected):
    """The smallest set of likeliest tokens whose probability reaches top_p."""
    assert kept(np.log([0.125, 0.25, 0.5, 0.125]), top_p=top_p) == expected


def test_top_p_counts_what_top_k_left():
    """Of (.4, .3, .2, .1) top_k=2 leaves (4/7, 3/7), whose first alone reaches .5; without it .4 does not."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(logits, top_p=0.5) == [0, 1]
    assert kept(logits, top_p=0.5, top_k=2) == [0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_in_the_draw_and_in_the_log_probability(temperature):
    """Logits (0, log 3): at temperature 1/2 the odds are 9, at 2 they are the root of 3."""
    odds = 3 ** (1 / temperature)
    logits = jnp.log(jnp.asarray([[1.0, 3.0]] * 2))
    uniforms = jnp.asarray([1 / (1 + odds) - 1e-3, 1 / (1 + odds) + 1e-3])
    tokens, logprobs = draw_once(logits, uniforms, temperature=temperature)
    assert tokens.tolist() == [0, 1]
    # A few float32 roundings of numbers around 1.
    np.testing.assert_allclose(logprobs, np.log([1 / (1 + odds), odds / (1 + odds)]), atol=1e-6)


def test_the_log_probability_is_of_the_full_tempered_distribution():
    """Whatever top-k and top-p cut away: the learner knows the full distribution only."""
    logits = jnp.asarray([[0.0, 1.0, 2.0, 0.5]])
    whole = jax.nn.log_softmax(logits / 0.7)[0]
    token, logprob = draw_once(logits, jnp.asarray([0.999]), temperature=0.7, top_k=2, top_p=0.3)
    assert token.tolist() == [2]  # top_p leaves the likeliest alone
    np.testing.assert_allclose(logprob, whole[2:3], atol=1e-6)


def test_greedy_takes_the_likeliest_whatever_the_uniform_number():
    logits = jnp.asarray([[0.0, 2.0, 1.0], [0.0, 1.0, 1.0], [5.0, 1.0, 1.0]])
    for uniform in (0.0, 0.5, ALMOST_1):
        token, logprob = draw_once(logits, jnp.full(3, uniform), temperature=0)
        assert token.tolist() == [1, 1, 0]
        expected = jax.nn.log_softmax(logits)[jnp.arange(3), token]
        np.testing.assert_allclose(logprob, expected, atol=1e-6)


def test_bfloat16_logits_have_float32_log_probabilities():
    """A module of one's own may give any float type; 8 bits of a log-probability would ruin the ratios."""
    logits = jnp.asarray(random_logits(50), jnp.bfloat16)[None]
    token, logprob = draw_once(logits, jnp.asarray([0.3]), temperature=0.7)
    assert logprob.dtype == jnp.float32
    expected = jax.nn.log_softmax(logits.astype(jnp.float32) / 0.7)[0, token[0]]
    np.testing.assert_allclose(logprob[0], expected, atol=1e-6)


def test_a_rows_uniform_number_does_not_depend_on_its_place_in_the_batch():
    key, rows = jax.random.key(5), np.array([4, 9, 0, 17])
    numbers = np.asarray(row_uniforms(key, jnp.asarray(rows), jnp.int32(2)))
    again = np.asarray(row_uniforms(key, jnp.asarray(rows[::-1].copy()), jnp.int32(2)))
    np.testing.assert_array_equal(numbers, again[::-1])
    single = row_uniforms(key, jnp.asarray([9]), jnp.int32(2))
    np.testing.assert_array_equal(numbers[1:2], single)


def test_uniform_numbers_differ_by_row_step_and_key():
    """The same numbers at every step or for every row gave copies of one sample."""
    rows = jnp.arange(8)
    numbers = [
        np.asarray(row_uniforms(jax.random.key(seed), rows, jnp.int32(t)))
        for seed in (0, 1)
        for t in range(4)
    ]
    assert len(np.unique(numbers)) == 2 * 4 * 8
    assert np.min(numbers) >= 0
    assert np.max(numbers) < 1

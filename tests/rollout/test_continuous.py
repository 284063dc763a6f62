"""Few slots and a queue give what all rows at once give, whatever slot a row lands in."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import Transformer, logical_axes, unstack_layers
from rlhf_jax.rollout.continuous import continuous
from rlhf_jax.rollout.decoder import Decoder, decoder_for
from rlhf_jax.rollout.generate import generate
from rlhf_jax.rollout.sampling import Sampling
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.rules import batch_sharding, in_view, parameter_shardings
from tests.models.tiny import GPT2

from . import tiny

KEY = jax.random.key(1)
RNG = np.random.default_rng(0)
ROWS = [RNG.integers(0, 24, RNG.integers(1, 6)).tolist() for _ in range(40)]
# The batch of a matrix product decides how its sums are split: float32 rounding of logits of about 10.
ATOL = 1e-5


def assert_same(got, expected):
    """Equal tokens, masks and ends; log-probabilities to rounding."""
    np.testing.assert_array_equal(got.tokens_BS, expected.tokens_BS)
    np.testing.assert_array_equal(got.mask_BS, expected.mask_BS)
    np.testing.assert_array_equal(got.mask_BT, expected.mask_BT)
    np.testing.assert_array_equal(got.truncated_B, expected.truncated_B)
    np.testing.assert_allclose(got.logprobs_BT, expected.logprobs_BT, atol=ATOL)


@functools.cache
def at_once():
    return tiny.respond(tiny.prompts_of(ROWS), KEY)


@pytest.mark.parametrize("slots", [1, 5, 33], ids="{} slots".format)
def test_slots_change_nothing(slots):
    """One slot; refills of one prompt; refills of two."""
    lengths = at_once().length_B
    assert {1, tiny.SETTINGS["response_length"]} <= set(lengths.tolist())
    assert_same(tiny.respond(tiny.prompts_of(ROWS), KEY, slots=slots), at_once())


@pytest.mark.parametrize("changes", [{"temperature": 0}, {"top_k": 6, "top_p": 0.8}], ids=["greedy", "cut"])
def test_every_way_of_sampling(changes):
    prompts = tiny.prompts_of(ROWS)
    assert_same(tiny.respond(prompts, KEY, slots=6, **changes), tiny.respond(prompts, KEY, **changes))


def test_learned_positions():
    """GPT-2 has no room past its positions, and an idle slot runs past them: only rows may be heard."""
    model = Transformer(GPT2, scan_layers=False)
    params = unstack_layers(tiny.randomised(Transformer(GPT2)))
    prompts = tiny.prompts_of(ROWS)
    some = {**tiny.SETTINGS, "response_length": GPT2.max_positions - 5}
    runs = [tiny.generator(model, **some, slots=slots)(params, prompts, KEY) for slots in (None, 7)]
    expected, got = jax.device_get(runs)
    assert_same(got, expected)
    assert np.isfinite(got.logprobs_BT).all()


def test_a_module_without_a_cache():
    model, params = tiny.Plain(tiny.MODEL), {"inner": tiny.PARAMS}
    got = tiny.generator(model, **tiny.SETTINGS, slots=5)(params, tiny.prompts_of(ROWS), KEY)
    assert_same(jax.device_get(got), at_once())


@pytest.mark.parametrize("slots", [None, 5], ids=["at once", "five slots"])
def test_limits_by_row(slots):
    """A row with a limit is the row without one, cut off there; truncated unless it had ended by then."""
    limit_B = 1 + np.arange(40) % 8
    sample = tiny.generator(**tiny.SETTINGS, slots=slots)
    got = jax.device_get(
        sample(unstack_layers(tiny.PARAMS), tiny.prompts_of(ROWS), KEY, jnp.asarray(limit_B))
    )
    whole = at_once()
    assert got.length_B.tolist() == np.minimum(whole.length_B, limit_B).tolist()
    assert got.truncated_B.tolist() == (whole.truncated_B | (whole.length_B > limit_B)).tolist()
    np.testing.assert_array_equal(got.response_BT, np.where(got.mask_BT, whole.response_BT, 0))
    np.testing.assert_allclose(got.logprobs_BT, np.where(got.mask_BT, whole.logprobs_BT, 0), atol=ATOL)


@pytest.mark.parametrize("slots", [None, 2, 25], ids=["at once", "too few slots", "eight prompts"])
def test_samples_of_one_prompt_are_rows_of_copies_of_it(slots):
    """Keys and values computed once for three samples; slots for less than one prompt become enough."""
    prompts = tiny.prompts_of(ROWS[:10])
    copies = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), prompts).replace(row_B=jnp.arange(30))
    assert_same(tiny.respond(prompts, KEY, samples=3, slots=slots), tiny.respond(copies, KEY))


def scripted(limits, *, slots, samples=1):
    """(rollout, work, rows of each prefill) of a policy that never ends by itself."""
    prefills = []

    def prefill(params, tokens_BP, mask_BP, cache_length):
        jax.debug.callback(lambda tokens: prefills.append(tokens[:, -1].tolist()), tokens_BP)
        return jnp.zeros((tokens_BP.shape[0], 10)), tokens_BP[:, -1:]

    def decode(params, token_B, cache):
        return jnp.zeros((token_B.shape[0], 10)), cache

    def run(prompts, limit_B):
        some = {"samples": samples, "slots": slots}
        return continuous(Decoder(prefill, decode), None, prompts, KEY, limit_B, Sampling(()), 8, **some)

    prompts = tiny.prompts_of([[b] for b in range(len(limits) // samples)], width=1)
    got, work = jax.device_get(jax.jit(run)(prompts, jnp.asarray(limits)))
    jax.effects_barrier()
    return got, work, prefills


def test_a_free_slot_takes_the_next_row():
    """By hand. Two slots, rows of 4, 2, 3, 2 tokens, one of them from the prefill.

    Slot 0 works on row 0 in steps 1 to 3, slot 1 on row 1 in step 1 and on row 2 in steps 2 and 3. Row 3 is
    placed after step 3 and has one step, beside a slot without a row; by then no row waits.
    """
    got, work, prefills = scripted([4, 2, 3, 2], slots=2)
    assert got.length_B.tolist() == [4, 2, 3, 2]
    assert prefills == [[0], [1], [2], [3]]
    assert (work.steps, work.waiting_steps, work.busy) == (4, 3, 6)


def test_a_row_that_ends_with_its_first_token_leaves_its_slot_at_once():
    got, work, prefills = scripted([1, 1, 1, 2, 2], slots=2)
    assert got.length_B.tolist() == [1, 1, 1, 2, 2]
    assert prefills == [[0], [1], [2], [3], [4]]
    assert work.steps == 1


def test_sixteen_slots_are_filled_two_at_a_time():
    """And a refill waits for its second slot, but not for rows that do not exist."""
    limits = [2] + [8] * 15 + [3, 3, 3]
    got, work, prefills = scripted(limits, slots=16)
    assert got.length_B.tolist() == limits
    assert prefills[:8] == [[b, b + 1] for b in range(0, 16, 2)]
    assert prefills[8:] == [[16, 17], [18, 18]]  # 18 alone; the second place is nobody's
    assert work.waiting_steps == 7  # after step 1 one slot is free, and a refill could place two


def test_slots_stay_busy_while_rows_wait():
    limits = np.random.default_rng(0).permutation(np.tile(np.arange(1, 9), 12))
    _, work, _ = scripted(limits, slots=8)
    assert work.busy / (8 * work.waiting_steps) > 0.99  # refills of one row leave no slot waiting


def sharded(sizes):
    """(jitted generation through two slots a group, its arguments) on eight devices."""
    view = training_view(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    model, params = tiny.MODEL.clone(scan_layers=False), unstack_layers(tiny.PARAMS)
    params = jax.device_put(params, parameter_shardings(view, logical_axes(model), params))
    prompts = jax.device_put(tiny.prompts_of(ROWS), batch_sharding(view))
    sample = functools.partial(generate, decoder_for(model), **tiny.SETTINGS, slots=2 * view.batch_shards)
    return in_view(view, sample, out_shardings=batch_sharding(view)), (params, prompts, KEY)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)], ids=lambda sizes: "x".join(map(str, sizes)))
def test_eight_devices_give_the_responses_of_one(sizes):
    """Each group of devices has slots and a queue of its own."""
    run, arguments = sharded(sizes)
    got = run(*arguments)
    assert got.tokens_BS.sharding.is_equivalent_to(arguments[1].tokens_BP.sharding, 2)
    assert_same(jax.device_get(got), at_once())


def test_nothing_but_the_conditions_crosses_from_one_group_of_devices_to_another():
    """An index that names rows of all devices, in the cache's writes, collected every token everywhere."""
    operations = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    run, arguments = sharded((8, 1, 1))
    text = run.lower(*arguments).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(rf" ({operations})(-start)?\(", line)]
    assert len(lines) == 2
    assert all("/cond/" in line for line in lines)


def test_the_cache_is_written_in_place():
    """No copy of a buffer of keys [6 slots, 2 heads, 4, 13 positions] or values at each token."""
    sample = tiny.generator(**tiny.SETTINGS, slots=6)
    arguments = unstack_layers(tiny.PARAMS), tiny.prompts_of(ROWS), KEY
    blocks = sample.lower(*arguments).compile().as_text().split("\n\n")
    for shape in ("6,2,4,13", "6,2,13,4"):
        inside = [block for block in blocks if not block.startswith("ENTRY") and f"f32[{shape}]" in block]
        assert inside
        assert not [block for block in inside if re.search(rf"f32\[(1,)?{shape}\]\S* copy\(", block)]

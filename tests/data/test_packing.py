"""Packing by property: every text once, whole, in one row; groups of about one size; few shapes."""

import numpy as np
import pytest

from rlhf_jax.data.packing import deal, first_fit, pack, row_width


def texts(count, longest, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(1, 999, rng.integers(1, longest + 1)).tolist()) for _ in range(count)]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_text_is_found_where_its_first_cell_says(groups, together):
    items = list(zip(texts(16, 50), texts(16, 50, seed=1), strict=True))
    packed = pack(items, 50, groups, together=together)
    assert sorted(packed.item_GP.ravel()) == list(range(16))
    covered = 0
    for g in range(groups):
        tokens, segments = packed.tokens_GRL[g].ravel(), packed.segments_GRL[g].ravel()
        for item, firsts in zip(packed.item_GP[g], packed.first_GPK[g], strict=True):
            for text, first in zip(items[item], firsts, strict=True):
                cells = slice(first, first + len(text))
                assert tuple(tokens[cells]) == text
                assert len(set(segments[cells])) == 1
                covered += len(text)
    assert covered == (packed.segments_GRL > 0).sum() == sum(len(t) for item in items for t in item)
    assert (packed.tokens_GRL[packed.segments_GRL == 0] == 0).all()


def test_segments_of_a_row_are_numbered_from_one_in_one_stretch_each():
    packed = pack([(text,) for text in texts(32, 20)], 64, 2)
    for row in packed.segments_GRL.reshape(-1, 64):
        valid = row[row > 0]
        assert (np.diff(valid) >= 0).all()
        assert set(valid) == set(range(1, valid.max() + 1))
        assert (row[len(valid) :] == 0).all()


def test_packed_rows_hold_little_padding():
    lengths = [len(text) for text in texts(64, 100)]
    rows = first_fit(lengths, 128)
    assert sorted(n for row in rows for n in row) == list(range(64))
    assert all(sum(lengths[n] for n in row) <= 128 for row in rows)
    assert len(rows) <= 1.1 * sum(lengths) / 128


def test_items_are_dealt_out_evenly():
    assert deal([5, 1, 4, 2], 2).tolist() == [[0, 1], [2, 3]]
    sizes = np.random.default_rng(0).integers(1, 1000, 64)
    totals = sizes[deal(sizes, 8)].sum(1)
    assert totals.max() / totals.min() < 1.06


@pytest.mark.parametrize("count", [9, 11, 17])
def test_texts_apart_have_a_row_each_and_there_is_no_other(count):
    """A row too many would be scored as a text."""
    items = list(zip(texts(count, 50), texts(count, 50, seed=1), strict=True))
    assert pack(items, 50, 1, together=False).tokens_GRL.shape == (1, 2 * count, 50)


def test_rows_hold_several_short_texts_and_are_no_longer_than_the_model_allows():
    assert [row_width(longest, 512) for longest in (10, 128, 130, 300, 400)] == [128, 128, 192, 384, 512]
    assert row_width(60, 64) == 64


def test_row_counts_are_few():
    counts = {
        pack([(text,) for text in texts(n, 60, seed=n)], 60, 1).tokens_GRL.shape[1] for n in range(1, 80)
    }
    assert counts <= {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48}

"""Order: exact lengths, every row as often as promised, ranks' shares that together are one process's batches."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weldtrain.data.sampler import InOrder, Order, balancing, repeat_factors

EPOCHS = range(4)


def rows(count):
    """Rows of an index of which other splits hold some."""
    return np.arange(count) * 3 + 5


def modes(count):
    """Every way to make an order of so many rows."""
    expected = np.random.default_rng(count).uniform(0.2, 3, count)
    shapes = np.array([0.5, 1, 1, 2.5] * count)[:count]
    return {"uniform": {}, "sampled": {"expected": expected}, "grouped": {"shapes": shapes},
            "both": {"expected": expected, "shapes": shapes}}


def keys(order, epoch):
    return list(itertools.chain(*order.batches(epoch)))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("mode", modes(1))
def test_an_epoch_has_as_many_batches_as_the_order_says(mode, shuffle, drop_last):
    for count, batch_size, ranks in itertools.product((1, 7, 8, 9, 41), (1, 4, 8), (1, 2, 3)):
        of = modes(count)[mode]
        of |= {"shuffle": shuffle, "drop_last": drop_last}
        orders = [Order(rows(count), batch_size, share=(rank, ranks), **of) for rank in range(ranks)]
        total = round(of["expected"].sum()) if "expected" in of else count
        together = batch_size * ranks
        # What is left for a last batch may not be enough for every rank; an empty one is none.
        left = [] if drop_last else [rank < total % together for rank in range(ranks)]
        assert [len(order) - total // together for order in orders] == (left or [0] * ranks)
        for epoch in EPOCHS:
            dealt = [list(order.batches(epoch)) for order in orders]
            assert [len(batches) for batches in dealt] == [len(order) for order in orders]
            sizes = [len(batch) for batches in dealt for batch in batches]
            assert sum(sizes) == (total // together * together if drop_last else total)
            assert max(sizes, default=0) <= batch_size and min(sizes, default=1) > 0
            assert not drop_last or set(sizes) <= {batch_size}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("shapes", [None, np.array([1, 2.5, 2.5] * 7)])
def test_every_row_comes_once_in_an_epoch_under_a_key_of_that_epoch(shuffle, shapes):
    order = Order(rows(21), 4, shuffle=shuffle, shapes=shapes, seed=1)
    for epoch in EPOCHS:
        assert sorted(keys(order, epoch)) == [(epoch, row, 0) for row in rows(21).tolist()]


@pytest.mark.parametrize("mode", modes(1))
def test_the_order_is_a_function_of_seed_and_epoch(mode):
    def drawn(seed, epoch):
        return [(row, repeat) for _, row, repeat in keys(Order(rows(50), 4, shuffle=True, seed=seed, **modes(50)[mode]), epoch)]

    assert drawn(1, 3) == drawn(1, 3)
    assert len({tuple(drawn(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


def test_without_shuffling_rows_come_as_they_stand():
    order = Order(rows(10), 3, shuffle=False)
    assert [[row for _, row, _ in batch] for batch in order.batches(7)] == [[5, 8, 11], [14, 17, 20], [23, 26, 29], [32]]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("mode", modes(1))
def test_ranks_deal_out_the_batches_of_one_process(mode, drop_last):
    for ranks in (2, 3, 4):
        settled = {"shuffle": True, "drop_last": drop_last, "seed": 2, **modes(41)[mode]}
        alone = Order(rows(41), 3 * ranks, **settled)
        shares = [Order(rows(41), 3, share=(rank, ranks), **settled) for rank in range(ranks)]
        for epoch in EPOCHS:
            dealt = list(itertools.zip_longest(*(share.batches(epoch) for share in shares), fillvalue=[]))
            whole = list(alone.batches(epoch))
            assert [sorted(itertools.chain(*parts)) for parts in dealt] == [sorted(batch) for batch in whole]
            seen = [key for parts in dealt for batch in parts for key in batch]
            assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("mode", modes(1))
def test_an_epoch_begun_in_the_middle_is_the_rest_of_it(mode):
    order = Order(rows(41), 4, shuffle=True, share=(1, 2), **modes(41)[mode])
    straight = [batch for epoch in EPOCHS for batch in order.batches(epoch)]
    for epoch, start in itertools.product(EPOCHS, range(len(order) + 1)):
        assert list(order.batches(epoch, start)) == list(order.batches(epoch))[start:]
        assert list(order.epochs(epoch, start, len(EPOCHS))) == straight[epoch * len(order) + start :]
    assert list(itertools.islice(order.epochs(0), len(straight))) == straight
    assert list(order.epochs(5, 0, 5)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=60), st.integers(0, 2**32), st.integers(0, 1000), st.booleans())
def test_counts_are_expectations_rounded_up_or_down_and_their_sum_is_exact(expected, seed, epoch, shuffle):
    total = round(sum(expected))
    if not total:
        return
    drawn = keys(Order(rows(len(expected)), 5, shuffle=shuffle, seed=seed, expected=np.array(expected)), epoch)
    assert len(drawn) == len(set(drawn)) == total
    counts = Counter(row for _, row, _ in drawn)
    for row, times in zip(rows(len(expected)).tolist(), expected):
        assert abs(counts[row] - times * total / sum(expected)) < 1 + 1e-6
        assert sorted(repeat for _, r, repeat in drawn if r == row) == list(range(counts[row]))


def test_over_many_epochs_counts_average_to_their_expectation():
    expected = np.array([0.1, 0.25, 0.5, 1, 1, 1.5, 2.65, 4])
    order = Order(rows(8), 4, shuffle=True, expected=expected, seed=3)
    epochs = 3000
    counts = Counter(row for epoch in range(epochs) for _, row, _ in keys(order, epoch))
    mean = np.array([counts[row] for row in rows(8).tolist()]) / epochs
    share = expected % 1  # of one more than the whole part
    assert (np.abs(mean - expected) <= 4 * np.sqrt(share * (1 - share) / epochs) + 1e-9).all()


def test_which_pictures_round_up_together_is_mixed_anew():
    """Systematic sampling of a fixed list would only ever draw neighbours that lie a whole expectation apart."""
    order = Order(rows(4), 2, shuffle=True, expected=np.full(4, 0.5))
    pairs = {frozenset(row for _, row, _ in keys(order, epoch)) for epoch in range(200)}
    assert pairs == {frozenset(pair) for pair in itertools.combinations(rows(4).tolist(), 2)}


def test_repeat_factors_by_hand():
    """Of 10 pictures 5 show cracks, 2 slag, 1 of them both; t = 0.4: sqrt(0.4 / 0.5) < 1, sqrt(0.4 / 0.2), sqrt(0.4 / 0.1)."""
    crack, slag, lack = np.array([0, 1, 2, 3, 4]), np.array([4, 5]), np.array([9])
    expected = [1, 1, 1, 1, 2**0.5, 2**0.5, 1, 1, 1, 2]
    np.testing.assert_allclose(repeat_factors([crack, slag, lack, np.array([], int)], 10, 0.4), expected)
    np.testing.assert_array_equal(repeat_factors([crack, slag, lack], 10, 0.05), np.ones(10))


def test_balancing_by_hand():
    """10 pictures: 5 clean, 4 with cracks, 1 with slag. Each of the three kinds gets a third of the epoch."""
    factors = balancing([np.array([5, 6, 7, 8]), np.array([9]), np.array([], int)], 10)
    np.testing.assert_allclose(factors, [10 / 3 / 5] * 5 + [10 / 3 / 4] * 4 + [10 / 3])
    # The ninth shows both: it counts as slag, of which there are fewer. 1/4 1/4 1/4 1 are to be 4 in all.
    np.testing.assert_allclose(balancing([np.arange(4), np.array([3])], 4), np.array([1, 1, 1, 4]) * 4 / 7)
    np.testing.assert_allclose(balancing([], 3), np.ones(3))


def test_balanced_epochs_show_every_class_equally_often():
    classes = [np.arange(40, 90), np.arange(90, 98), np.arange(98, 100)]  # and 40 without defects
    order = Order(np.arange(100), 10, shuffle=True, expected=balancing(classes, 100))
    for epoch in EPOCHS:
        drawn = np.array(keys(order, epoch))[:, 1]
        shown = [(drawn < 40).sum(), *(np.isin(drawn, of).sum() for of in classes)]
        assert sum(shown) == 100 and max(abs(n - 25) for n in shown) < 10


ELONGATED = {0.5: 19, 1.0: 30, 1.05: 5, 2.5: 11}  # shape: pictures; 1.0 and 1.05 are alike


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("expected", [None, "sampled"])
def test_batches_of_one_shape_hold_the_same_pictures_as_mixed_ones(shuffle, expected):
    shapes = np.random.default_rng(0).permutation(np.repeat([*ELONGATED], [*ELONGATED.values()]))
    count = len(shapes)
    of = {"shuffle": shuffle, "seed": 1, "expected": modes(count)["sampled"]["expected"] if expected else None}
    mixed, grouped = Order(rows(count), 4, **of), Order(rows(count), 4, shapes=shapes, **of)
    kind = dict(zip(rows(count).tolist(), np.where(shapes == 1.05, 1.0, shapes).tolist()))
    for epoch in EPOCHS:
        batches = list(grouped.batches(epoch))
        assert batches == list(grouped.batches(epoch))
        assert sorted(itertools.chain(*batches)) == sorted(keys(mixed, epoch))
        of_one = [len({kind[row] for _, row, _ in batch}) == 1 for batch in batches]
        full = sum(n // 4 for n in Counter(kind[row] for _, row, _ in keys(mixed, epoch)).values())
        assert all(of_one[:full]) and full >= len(batches) - 3  # what fills no batch of its own shape is mixed, at the end
    if shuffle:  # shapes take turns
        firsts = {kind[next(iter(grouped.batches(epoch)))[0][1]] for epoch in range(30)}
        assert len(firsts) > 1


@pytest.mark.parametrize("shapes", [None, np.repeat([1, 2.5], [64, 5]), np.repeat([0.5, 1, 2.5], [20, 40, 9])])
def test_what_drop_last_leaves_out_is_drawn_among_all(shapes):
    """5 elongated pictures fill no batch of 8. They must not be the ones that are dropped in every epoch."""
    order = Order(rows(69), 8, shuffle=True, drop_last=True, shapes=shapes)
    epochs = 400
    counts = Counter(row for epoch in range(epochs) for _, row, _ in keys(order, epoch))
    assert len(counts) == 69 and min(counts.values()) > 0.85 * epochs  # 64 of 69 are 93 %


def test_repeats_of_a_picture_are_not_neighbours():
    order = Order(rows(100), 8, shuffle=True, expected=np.full(100, 3.0))
    for epoch in EPOCHS:
        drawn = [row for _, row, _ in keys(order, epoch)]
        assert sum(a == b for a, b in itertools.pairwise(drawn)) < 12  # two on average


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=30), batch_size=st.integers(1, 5), ranks=st.integers(1, 3))
def test_in_order_each_row_comes_once_among_others_of_its_size(sizes, batch_size, ranks):
    of_rows = np.array([(size, 1) for size in sizes])
    orders = [InOrder(rows(len(sizes)), of_rows, batch_size, (rank, ranks)) for rank in range(ranks)]
    dealt = [list(order.epochs(0)) for order in orders]
    assert [len(order) for order in orders] == [len(batches) for batches in dealt]
    batches = [batch for together in itertools.zip_longest(*dealt, fillvalue=()) for batch in together if batch]
    assert [row for batch in batches for _, row, _ in batch] == rows(len(sizes)).tolist()
    size_of = dict(zip(rows(len(sizes)).tolist(), sizes))
    assert all(len({size_of[row] for _, row, _ in batch}) == 1 and len(batch) <= batch_size for batch in batches)
    assert list(orders[0].epochs(0, start=1)) == dealt[0][1:]

"""The page checksum: all versions give the same bits, and damage of every kind shows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.checksum_weights import ROW_BYTES, column_weights, num_rows, row_weights
from kernels.cpu.checksum import sum_words
from serve.multi_level_cache.checksum import checksum, object_checksums, unit_seeds, weighted_sum

SIZES = [8, 504, 512, 520, 4096, ROW_BYTES * 256, ROW_BYTES * 300 + 40, 5, 513]


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def oracle(data: np.ndarray) -> int:
    """The formula in plain Python."""
    rows = num_rows(len(data))
    words = np.frombuffer(bytes(data).ljust(rows * ROW_BYTES, b"\0"), dtype="<u8").reshape(rows, -1).tolist()
    (row_low, row_high), (column_low, column_high) = row_weights(rows), column_weights()
    total = 0
    for row, line in enumerate(words):
        total += int(row_low[row]) * sum(w * int(p) for w, p in zip(line, column_low, strict=True))
        total += int(row_high[row]) * sum((w >> 32) * int(q) for w, q in zip(line, column_high, strict=True))
    return total % 2**64


@pytest.mark.parametrize("size", SIZES)
def test_numpy_agrees_with_the_formula(size: int):
    data = random_bytes(size)
    assert weighted_sum(data) == oracle(data)


@pytest.mark.parametrize("size", [512, 4096, ROW_BYTES * 300])
def test_numba_agrees_with_numpy(size: int):
    data = random_bytes(size, 1)
    assert int(sum_words(data.view(np.uint64), *row_weights(num_rows(size)), *column_weights())) == weighted_sum(data)


def test_every_single_bit_flip_shows():
    data = random_bytes(3 * ROW_BYTES)
    good = weighted_sum(data)
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            assert weighted_sum(data) != good
            data[position] ^= 1 << bit


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_flips_of_two_bits_show(data: st.DataObject):
    payload = random_bytes(4 * ROW_BYTES)
    good = weighted_sum(payload)
    bits = data.draw(st.lists(st.integers(0, len(payload) * 8 - 1), min_size=2, max_size=2, unique=True))
    for bit in bits:
        payload[bit // 8] ^= 1 << (bit % 8)
    assert weighted_sum(payload) != good


@pytest.mark.parametrize("bit", [31, 63])
def test_swapped_words_that_differ_in_a_sign_bit_only_show(bit: int):
    words = np.zeros((8, 64), dtype=np.uint64)
    good = set()
    for row, column in [(0, 0), (0, 1), (1, 0), (5, 5), (7, 63)]:
        words[:] = 7
        words[row, column] ^= np.uint64(1 << bit)
        good.add(weighted_sum(words.view(np.uint8).reshape(-1)))
    assert len(good) == 5


def test_swaps_of_words_rows_columns_and_blocks_show():
    words = np.random.default_rng(3).integers(0, 4, (16, 64)).astype(np.uint64)  # few values: many equal sums
    good = weighted_sum(words.view(np.uint8).reshape(-1))
    for first, second in [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((3, 4), (9, 60))]:
        swapped = words.copy()
        swapped[first], swapped[second] = words[first] + np.uint64(1), words[first]
        words_before = words.copy()
        words_before[first], words_before[second] = words[first], words[first] + np.uint64(1)
        assert weighted_sum(swapped.view(np.uint8).reshape(-1)) != weighted_sum(words_before.view(np.uint8).reshape(-1))
    rows, columns, blocks = words.copy(), words.copy(), words.copy()
    rows[[2, 9]] = rows[[9, 2]]
    columns[:, [2, 9]] = columns[:, [9, 2]]
    blocks[:8], blocks[8:] = words[8:], words[:8]
    for changed in (rows, columns, blocks):
        assert weighted_sum(np.ascontiguousarray(changed).view(np.uint8).reshape(-1)) != good


def test_a_rectangle_that_keeps_all_row_and_column_sums_shows():
    words = np.full((8, 64), 5, dtype=np.uint64)
    good = weighted_sum(words.view(np.uint8).reshape(-1))
    words[1, 3] += np.uint64(1)
    words[1, 9] -= np.uint64(1)
    words[6, 3] -= np.uint64(1)
    words[6, 9] += np.uint64(1)
    assert weighted_sum(words.view(np.uint8).reshape(-1)) != good


def test_a_tail_of_zeros_shows():
    data = random_bytes(64 * ROW_BYTES)
    good = weighted_sum(data)
    for kept in (0, 1, 512, 4096, len(data) - 1):
        cut = data.copy()
        cut[kept:] = 0
        assert weighted_sum(cut) != good or (cut == data).all()


def test_the_seed_tells_page_group_unit_and_length_apart():
    names = [bytes([n]) * 32 for n in range(3)]
    seeds = {
        int(seed)
        for group in range(3)
        for lengths in ([512, 512], [1024, 1024])
        for seed in unit_seeds(names, group, lengths).reshape(-1)
    }
    assert len(seeds) == 3 * 3 * 2 * 2
    zeros = np.zeros(512, dtype=np.uint8)
    assert checksum(zeros, int(unit_seeds(names, 0, [512])[0, 0])) != checksum(
        zeros, int(unit_seeds(names, 0, [512])[1, 0])
    )


def test_object_checksums_go_unit_by_unit():
    payload, lengths = random_bytes(512 + 1024 + 40), [512, 1024, 40]
    seeds = unit_seeds([b"n" * 32], 2, lengths)[0]
    sums = object_checksums(payload, lengths, seeds)
    assert int(sums[1]) == checksum(payload[512:1536], int(seeds[1]))
    payload[1540] ^= 1
    assert (object_checksums(payload, lengths, seeds) != sums).tolist() == [False, False, True]

import numpy as np
import torch

from serve.model_infer.rng import draw_keys, exponentials, exponentials_batched

# Of seeds 0, 0, 1, 42 at positions 0, 1, 0, 7; and the noise of token 17.
KEYS = [12035550249420947055, 12935080325729570654, 6791897765849424158, 13553200262973777806]
NUMBERS = [1.3159678987338594, 1.2275130458128618, 1.5729610373270095, 3.694036500375095]
EDGE_IDS = np.array([0, 1, 49151, 2**31, 2**40 + 3])


def test_keys_depend_on_seed_and_position_only():
    seeds = np.array([1, 2, 3, 2**64 - 1], dtype=np.uint64)
    positions = np.array([10, 10, 4_000_000, 0])
    together = draw_keys(seeds, positions)
    alone = [draw_keys(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_noise_depends_on_key_and_id_only():
    ids = np.array([5, 900, 31])
    together = exponentials(77, ids)
    assert together.tolist() == [exponentials(77, ids[i : i + 1])[0] for i in range(3)]
    assert together.tolist() != exponentials(78, ids).tolist()


def test_numbers_are_the_same_in_every_release():
    seeds = np.array([0, 0, 1, 42], dtype=np.uint64)
    keys = draw_keys(seeds, np.array([0, 1, 0, 7])).tolist()
    assert keys == KEYS
    numbers = [exponentials(key, np.array([17]))[0] for key in keys]
    np.testing.assert_allclose(numbers, NUMBERS, rtol=1e-12)


def test_every_device_makes_the_same_numbers():
    keys = np.array([0, 3, 2**63, 2**64 - 1], dtype=np.uint64)
    batched = exponentials_batched(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(EDGE_IDS))
    expected = [exponentials(key, EDGE_IDS) for key in keys.tolist()]
    np.testing.assert_allclose(batched.numpy(), np.array(expected), rtol=1e-14)


def test_noise_is_exponential_over_ids_over_positions_and_over_seeds():
    count = 100_000
    by_position = draw_keys(np.full(count, 3, dtype=np.uint64), np.arange(count))
    by_seed = draw_keys(np.arange(count, dtype=np.uint64), np.full(count, 5))
    samples = [
        exponentials(99, np.arange(count)),
        exponentials_batched(torch.from_numpy(by_position.view(np.int64)), torch.tensor([8])).numpy()[:, 0],
        exponentials_batched(torch.from_numpy(by_seed.view(np.int64)), torch.tensor([8])).numpy()[:, 0],
    ]
    for numbers in samples:
        assert (numbers > 0).all()
        assert np.isfinite(numbers).all()
        observed, _ = np.histogram(np.exp(-numbers), bins=100, range=(0, 1))
        chi_square = ((observed - count / 100) ** 2 / (count / 100)).sum()
        assert chi_square < 150  # 99 degrees of freedom: exceeded with probability 0.0007
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015

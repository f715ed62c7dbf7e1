import numpy as np

from serve.model_infer.rng import uniforms


def test_numbers_depend_on_seed_and_position_only():
    seeds = np.array([1, 2, 3, 2**64 - 1], dtype=np.uint64)
    positions = np.array([10, 10, 4_000_000, 0])
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone


def test_numbers_are_the_same_in_every_release():
    seeds = np.array([0, 0, 1, 42], dtype=np.uint64)
    numbers = uniforms(seeds, np.array([0, 1, 0, 7]))
    assert numbers.tolist() == [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.7347204584623639]


def test_numbers_are_uniform_over_positions_and_over_seeds():
    count = 100_000
    for seeds, positions in [(np.zeros(count), np.arange(count)), (np.arange(count), np.full(count, 5))]:
        numbers = uniforms(seeds.astype(np.uint64), positions)
        assert (numbers >= 0).all()
        assert (numbers < 1).all()
        observed, _ = np.histogram(numbers, bins=100, range=(0, 1))
        chi_square = ((observed - count / 100) ** 2 / (count / 100)).sum()
        assert chi_square < 150  # 99 degrees of freedom: exceeded with probability 0.0007
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015

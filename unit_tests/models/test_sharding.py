import itertools

import pytest

from models.config import MoeConfig
from models.errors import ModelError
from models.sharding import shard_model
from unit_tests.models.builders import tiny_config


def test_ranges_cover_everything_at_multiples_of_32():
    config = tiny_config(moe=MoeConfig(4, 2, 96, True))
    for size in (1, 2, 3, 9):
        shards = [shard_model(config, size, rank) for rank in range(size)]
        for name, total in (("mlp", 1536), ("vocab", 49152)):
            ranges = [getattr(shard, name) for shard in shards]
            assert ranges[0][0] == 0
            assert ranges[-1][1] == total
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
            assert all(start % 32 == 0 for start, _ in ranges)
        assert shards[0].vocab_widths == [end - start for start, end in (shard.vocab for shard in shards)]
    assert [shard_model(config, 2, rank).expert for rank in range(2)] == [(0, 64), (64, 96)]


def test_an_odd_dimension_is_cut_anywhere():
    shards = [shard_model(tiny_config(vocab_size=101), 2, rank) for rank in range(2)]
    assert [shard.vocab for shard in shards] == [(0, 51), (51, 101)]


def test_too_many_ranks_are_one_line():
    with pytest.raises(ModelError, match=r"--tp 10 is too large for this model: 9 query heads"):
        shard_model(tiny_config(), 10, 0)
    with pytest.raises(ModelError, match=r"--tp 3 is too large .* a dimension of 2"):
        shard_model(tiny_config(intermediate_size=2), 3, 0)
